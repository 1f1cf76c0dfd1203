// The adjoint of a step (delta_read.cuh) where decays are scalars and inputs have one 16-bit type: from the products of all
// keys with each other and with the queries, which tensor cores form.
//
// With entries 0 ... L of the ring and the step, L the token at hand, G the log decays summed from the checkpoint on and unit
// vectors k and q, unrolling the recurrence from the token backwards gives
//
//     y_j = exp(G_L - G_j) q . k_j - sum_{j<i<=L} exp(G_i - G_j) (k_i . k_j) c_i,   c_j = beta_j y_j
//     o = sum_j c_j v_j + S0 x,                                                     x = exp(G_L) q - sum_j exp(G_j) c_j k_j
//
// A lane has an entry; the triangular system is solved from the last entry down. Keys stay as they are stored: their norms
// go into the coefficients.
//
// |x| <= exp(G_L) K^-1/2, which says what it can be multiplied by.
#pragma once
#include "delta_gram_system.cuh"

// T: of keys, queries and values. Results: Adjoint<T> or FloatAdjoint.
template <typename T, typename Results>
struct Gram : GramSystem<T, Results> {
    typedef GramKeys<T> Keys;
    typedef GramSystem<T, Results> System;
    using Keys::has_keys, Keys::history, Keys::in, Keys::lane, Keys::tokens, Keys::warp;
    using System::find_decays, System::out, System::solve, System::solves;

    __device__ Gram(const Work& work, GramInputs& inputs, Results& results) : System(work, inputs, results) {}

    // Keys are the left operand, a tile of 16 columns of them. Of the right one, columns 2 i and 2 i + 1 are the first two parts of
    // adjoint i, that of a head and token; the third part is added to the first. With two adjoints at most, the upper four columns are
    // those of a second tile, so that no lane is without a result.
    __device__ void combine() const {
        constexpr int ADJOINTS = KEY_HEADS_HERE * READ_TOKENS, OPERANDS = (ADJOINTS + 3) / 4, TILES = KEY_DIM / (16 * WARPS);
        constexpr int TOGETHER = ADJOINTS <= 2 && TILES % 2 == 0 ? 2 : 1;
        const int entries = history + tokens, group = lane / 4, t = lane % 4;
        const auto result_column = [&](int tile) { return 16 * (warp + WARPS * (tile + (TOGETHER == 2 ? t / 2 : 0))) + group; };
#pragma unroll
        for (int key = 0; key < KEYS; ++key) {
            const int head = key * KEY_HEADS_HERE;
            Accumulator sums[TILES / TOGETHER][OPERANDS] = {};
#pragma unroll
            for (int s = 0; s < ENTRIES / 16; ++s) {
                if (s > 0 && 16 * s >= entries) continue;
                u32 parts[OPERANDS][2][2];  // the lane's of the first or second, and of the third
#pragma unroll
                for (int i = 0; i < OPERANDS; ++i) {
                    const int adjoint = min(TOGETHER == 2 ? group / 2 % 2 : 4 * i + group / 2, ADJOINTS - 1);
                    const auto& along = in.along[head + adjoint / READ_TOKENS][adjoint % READ_TOKENS];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int entry = 16 * s + 8 * half + 2 * t;
                        parts[i][0][half] = *reinterpret_cast<const u32*>(&along[group % 2][entry]);
                        const u32 third = *reinterpret_cast<const u32*>(&along[2][entry]);
                        parts[i][1][half] = group % 2 ? 0 : third;
                    }
                }
                const ACT* rows = &in.k[key][lane_entry(lane, s)][lane / 8 % 2 * 8 + 16 * warp];
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    const Matrices keys = load_transposed_matrices(rows + 16 * WARPS * tile);
                    const bool own = TOGETHER == 1 || group / 4 == tile % TOGETHER;
#pragma unroll
                    for (int m = 0; m < 2 * OPERANDS; ++m) {
                        const u32(&part)[2] = parts[m / 2][m % 2];
                        mma_16bit<T>(sums[tile / TOGETHER][m / 2], keys.v, own ? part[0] : 0, own ? part[1] : 0);
                    }
                }
            }
            // All of a lane's before it stores the first, behind which loads from shared memory would have to wait.
            float x[TILES / TOGETHER][OPERANDS][2];
#pragma unroll
            for (int i = 0; i < OPERANDS; ++i) {
                const int adjoint = min(TOGETHER == 2 ? t % 2 : 4 * i + t, ADJOINTS - 1);
                const int token = adjoint % READ_TOKENS, n = head + adjoint / READ_TOKENS;
                const float whole = in.whole[n][token], unit = same_type<T, fp16>::value ? in.along_unit[n][token] : 1.0f;
#pragma unroll
                for (int m = 0; m < TILES / TOGETHER; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float* own = sums[m][i].v + 2 * half;
                        const float q = to_float(in.q[key][token][result_column(m * TOGETHER) + 8 * half]);
                        x[m][i][half] = fmaf(whole, q, (own[0] + own[1]) * unit);
                    }
            }
#pragma unroll
            for (int i = 0; i < OPERANDS; ++i) {
                const int adjoint = TOGETHER == 2 ? t % 2 : 4 * i + t;
                if (adjoint >= ADJOINTS) continue;
                const int token = adjoint % READ_TOKENS, n = head + adjoint / READ_TOKENS;
#pragma unroll
                for (int m = 0; m < TILES / TOGETHER; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        out.store(n, token, result_column(m * TOGETHER) + 8 * half, x[m][i][half]);
            }
        }
    }

    // All of it but x, from inputs that have been requested; for all threads. `append`: called by those of KEY_WARPS. LATER: groups of
    // copies requested after them, which need not have arrived.
    template <int LATER = 0, typename Append>
    __device__ void find_coefficients(float unit, Append append) const {
        typename System::Decays decays;
        if (has_keys()) {
            Keys::template wait_for_keys<LATER>();
            Keys::multiply();
        }
        if (solves()) find_decays(decays);
        wait_for_copies<LATER>();
        __syncthreads();
        if (has_keys()) {
            Keys::append_keys();
            append();
        }
        if (solves()) solve(decays, unit);
        __syncthreads();
    }
    // What x has of an entry's key then, from its parts.
    __device__ float along(int n, int token, int entry) const {
        float sum = 0.0f;
#pragma unroll
        for (int part = 2; part >= 0; --part) sum += to_float(in.along[n][token][part][entry]);
        return sum;
    }
    // x, too.
    template <int LATER = 0, typename Append>
    __device__ void run(float unit, Append append) const {
        find_coefficients<LATER>(unit, append);
        combine();
    }
};
