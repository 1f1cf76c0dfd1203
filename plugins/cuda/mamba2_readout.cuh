// Stage 3 of mamba2_step: y_i = exp(c_e) S0 C_i + sum_j M_ij x_j (formula and names in mamba2_replay.cuh).
#pragma once
#include "mamba2_replay.cuh"

// A head's outputs as they form: tile q holds tokens g and g + 8, channels 4 t + 2 q and 4 t + 2 q + 1 of the warp's 16. The
// state and x are the second operands: a lane's adjacent elements are one, without moving a register.
struct Outputs {
    Accumulator v[2];
};

// S0 C of a head, accumulated chunk by chunk. A float32 state counts in two parts, whose two accumulators halve the chain of
// dependent instructions.
template <typename T>
struct StateProducts {
    static constexpr int PARTS = sizeof(T) == 4 ? 2 : 1;
    Accumulator v[2][PARTS];

    // 32 columns: rows g of both tiles, C of tokens g and g + 8.
    __device__ __forceinline__ void add(const StatePairs<T> (&s)[2], const Pairs& low, const Pairs& high) {
        if constexpr (same_type<T, ACT>::value)
            add_as_stored(s, low, high);
        else
            add_as_float(s, low, high);
    }
    __device__ __forceinline__ Outputs sum() const {
        Outputs out;
#pragma unroll
        for (int q = 0; q < 2; ++q)
#pragma unroll
            for (int i = 0; i < 4; ++i) out.v[q].v[i] = v[q][0].v[i] + (PARTS > 1 ? v[q][PARTS - 1].v[i] : 0.0f);
        return out;
    }

private:
    __device__ __forceinline__ void add_as_stored(const StatePairs<T> (&s)[2], const Pairs& low, const Pairs& high) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 a[4] = {low.v[2 * half], high.v[2 * half], low.v[2 * half + 1], high.v[2 * half + 1]};
#pragma unroll
            for (int q = 0; q < 2; ++q) mma_16bit<ACT>(v[q][0], a, s[q].v[2 * half], s[q].v[2 * half + 1]);
        }
    }
    __device__ __forceinline__ void add_as_float(const StatePairs<T> (&s)[2], const Pairs& low, const Pairs& high) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const float a[4] = {half_to_float<ACT>(low.v[m], false), half_to_float<ACT>(high.v[m], false),
                                half_to_float<ACT>(low.v[m], true), half_to_float<ACT>(high.v[m], true)};
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                const float first = s[q].get(m, 0), second = s[q].get(m, 1);
                mma_tf32(v[q][0], a, first, second);
                if constexpr (PARTS > 1)
                    mma_tf32(v[q][PARTS - 1], a, first - tf32_part(first), second - tf32_part(second));
            }
        }
    }
};

// Adds sum_j M_ij x_j; `weight(n, b, s, e)` is M of token 8 n + g and entry 16 b + 8 s + 2 t + e but for B_j . C_i.
template <typename Products, typename Weight>
__device__ __forceinline__ void add_entries(Outputs& out, const Products& bc, const HeadInputs& in, const Extent& seq,
                                            float D, int lane, Weight weight) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int b = 0; b < ENTRY_BLOCKS; ++b) {
        if (!is_needed(b, seq.length)) continue;
        const TransposedX x(in.x[b]);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            float m[4] = {};
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) {
                const float2 products = bc.get(2 * b + s, n);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int entry = seq.history + 8 * n + g, j = 16 * b + 8 * s + 2 * t + e;
                    float value = weight(n, b, s, e) * (e == 0 ? products.x : products.y);
                    if (j == entry) value += D;
                    m[n + 2 * e] = j > entry || entry >= seq.length ? 0.0f : value;
                }
            }
#pragma unroll
            for (int q = 0; q < 2; ++q)
                mma_split_a(out.v[q], m, half_to_float<ACT>(x.part[s][q], false), half_to_float<ACT>(x.part[s][q], true));
        }
    }
}

// One token: its weights are those of the lanes.
template <typename Products>
__device__ __forceinline__ void finish_one(Outputs& out, const Products& bc, const HeadInputs& in, const Decays& decays,
                                           const Extent& seq, float D, int lane) {
    const Weights weights(decays, seq.length, lane);
#pragma unroll
    for (int q = 0; q < 2; ++q) out.v[q].v[0] *= weights.decay, out.v[q].v[1] *= weights.decay;
    add_entries(out, bc, in, seq, D, lane,
                [&](int, int b, int s, int e) { return weights.at(b, 16 * b + 8 * s + 2 * (lane % 4) + e); });
}

template <typename Products>
__device__ __forceinline__ void finish_many(Outputs& out, const Products& bc, const HeadInputs& in, const Decays& decays,
                                            const Extent& seq, float D, int lane) {
    float sum_i[TOKEN_TILES];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        sum_i[n] = decays.sum_at(seq.history + 8 * n + lane / 4);
        const float decay = decays.decay(0.0f, sum_i[n]);
#pragma unroll
        for (int q = 0; q < 2; ++q) out.v[q].v[2 * n] *= decay, out.v[q].v[2 * n + 1] *= decay;
    }
    add_entries(out, bc, in, seq, D, lane, [&](int n, int b, int s, int e) {
        const int j = (16 * b + 8 * s + 2 * (lane % 4) + e) & 31;
        return decays.decay(__shfl_sync(~0u, decays.sum[b / 2], j), sum_i[n]) * __shfl_sync(~0u, decays.dt[b / 2], j);
    });
}

// Turns S0 C into y and stores it; `y` is at token g, channel 4 t of the warp's 16. Of `capacity` tokens those that do not
// exist become zero.
template <typename Products>
__device__ __forceinline__ void read_out(Outputs out, const Products& bc, const HeadInputs& in, const Decays& decays,
                                         const Extent& seq, float D, int lane, int capacity, ACT* y) {
    if constexpr (TOKENS == 1)
        finish_one(out, bc, in, decays, seq, D, lane);
    else
        finish_many(out, bc, in, decays, seq, D, lane);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        const int i = 8 * n + lane / 4;
        if (i >= capacity) continue;
        uint2 channels = {pack_pair<ACT>(out.v[0].v[2 * n], out.v[0].v[2 * n + 1]),
                          pack_pair<ACT>(out.v[1].v[2 * n], out.v[1].v[2 * n + 1])};
        if (seq.history + i >= seq.length) channels = {0, 0};
        *reinterpret_cast<uint2*>(y + 8 * n * INNER) = channels;
    }
}
