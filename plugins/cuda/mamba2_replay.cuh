// Stage 2 of mamba2_step: what the sequence contributes beside the checkpoint.
//
// With a_j = A dt_j and c_j = a_0 + ... + a_j (zero at the checkpoint), token i at entry e = history + i reads
//
//     y_i = exp(c_e) S0 C_i + sum_{j <= e} M_ij x_j,   M_ij = exp(c_e - c_j) dt_j (B_j . C_i) + [j = e] D
//
// (Mamba-2, arXiv 2405.21060, section 6, with the checkpoint as the chunk's initial state). Exponents are differences of
// prefix sums, so none is positive and nothing overflows.
#pragma once
#include "mamba2_load.cuh"
#include "mma.cuh"

// B_j . C_i of a group: tile n holds tokens g and g + 8, entries 8 n + 2 t and 8 n + 2 t + 1.
struct GroupProducts {
    Accumulator v[2 * ENTRY_BLOCKS];

    // Both entries of token 8 half + g.
    __device__ __forceinline__ float2 get(int tile, int half) const { return {v[tile].v[2 * half], v[tile].v[2 * half + 1]}; }
};

// The same, kept in shared memory from head to head; every lane reads what it wrote.
struct KeptProducts {
    float2 v[2 * ENTRY_BLOCKS][TOKEN_TILES][32];

    __device__ __forceinline__ void set(int tile, const Accumulator& products, int lane) {
#pragma unroll
        for (int half = 0; half < TOKEN_TILES; ++half)
            v[tile][half][lane] = {products.v[2 * half], products.v[2 * half + 1]};
    }
    // Volatile, or the compiler would keep the values in registers after all.
    __device__ __forceinline__ float2 get(int tile, int half) const {
        float2 value;
        const u32 at = u32(__cvta_generic_to_shared(&v[tile][half][threadIdx.x % 32]));
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(at) : "memory");
        return value;
    }
};

// C of the step's tokens: tile n holds token 8 n + g. Serves as either operand.
struct TokenC {
    Pairs v[TOKEN_TILES][BLOCKS];

    __device__ __forceinline__ void load(const Sequence& seq, int group, int tokens, int lane) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const int i = 8 * n + lane / 4;
            const ACT* row = seq.c(i < tokens ? i : 0, group);
#pragma unroll
            for (int k = 0; k < BLOCKS; ++k)
                v[n][k] = i < tokens ? load_pairs<WIDE_STATE>(row, k, lane % 4) : Pairs{0, 0, 0, 0};
        }
    }
    // Keeps the compiler from widening C once and for all, which would cost two registers for each of these.
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
            for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
                for (int m = 0; m < 4; ++m) asm volatile("" : "+r"(v[n][k].v[m]));
    }
};

// Multiplies B of entries 8 n ... 8 n + 7 with C and, where `append` says so, stores the tokens' B rows in the ring.
__device__ __forceinline__ void tile_products(KeptProducts& out, int n, const Sequence& seq, const TokenC& c, int group, int lane,
                                              bool append, ACT* ring_b_out) {
    const int j = 8 * n + lane / 4, t = lane % 4;
    const ACT* row = seq.b(seq.existing(j), group);
    Accumulator products = {};
    Pairs b[BLOCKS];
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) b[k] = load_pairs<WIDE_STATE>(row, k, t);
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Pairs low = c.v[0][k], high = TOKEN_TILES > 1 ? c.v[TOKEN_TILES - 1][k] : Pairs{0, 0, 0, 0};
            const u32 a[4] = {low.v[2 * half], high.v[2 * half], low.v[2 * half + 1], high.v[2 * half + 1]};
            mma_16bit<ACT>(products, a, b[k].v[2 * half], b[k].v[2 * half + 1]);
        }
    out.set(n, products, lane);
    if (append && seq.is_token(j) && j < seq.length) {
        ACT* to = ring_b_out + (group * RING_ROWS + seq.ring_row(j)) * STATE_SIZE;
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) store_pairs<WIDE_STATE>(to, k, t, b[k]);
    }
}

// The same of all entries.
__device__ __forceinline__ void group_products(KeptProducts& out, const Sequence& seq, const TokenC& c, int group, int lane,
                                               bool append, ACT* ring_b_out) {
#pragma unroll
    for (int n = 0; n < 2 * ENTRY_BLOCKS; ++n) {
        if (8 * n >= seq.length) {
            out.set(n, Accumulator{}, lane);
            continue;
        }
        tile_products(out, n, seq, c, group, lane, append, ring_b_out);
    }
}

// A head's time steps and their prefix sums; lane l holds entries l + 32 b. Entries that do not exist have dt = 0.
struct Decays {
    float dt[ENTRY_LANES], sum[ENTRY_LANES];
    float rate;

    __device__ __forceinline__ Decays(const HeadInputs& in, const TokenSteps& steps, float head_rate, int head_of_block,
                                      const Sequence& seq, int lane)
        : rate(head_rate) {
#pragma unroll
        for (int b = 0; b < ENTRY_LANES; ++b) {
            const int j = lane + 32 * b, i = j - seq.history;
            const float step = steps.get(head_of_block * TOKENS + min(max(i, 0), TOKENS - 1));
            dt[b] = i < 0 ? in.dt[b] : j < seq.length ? step : 0.0f;
        }
        add_up(lane);
    }
    // `steps`: of entries lane + 32 b, zero where there is none.
    __device__ __forceinline__ Decays(const float (&steps)[ENTRY_LANES], float head_rate, int lane) : rate(head_rate) {
#pragma unroll
        for (int b = 0; b < ENTRY_LANES; ++b) dt[b] = steps[b];
        add_up(lane);
    }
    __device__ __forceinline__ void add_up(int lane) {
        float carried = 0.0f;
#pragma unroll
        for (int b = 0; b < ENTRY_LANES; ++b) {
            float s = dt[b];
#pragma unroll
            for (int offset = 1; offset < (ENTRIES < 32 ? ENTRIES : 32); offset <<= 1) {
                const float before = __shfl_up_sync(~0u, s, offset);
                if (lane >= offset) s += before;
            }
            sum[b] = s + carried;
            if (b + 1 < ENTRY_LANES) carried = __shfl_sync(~0u, sum[b], 31);
        }
    }
    // Prefix sum at an entry that lanes may choose freely.
    __device__ __forceinline__ float sum_at(int j) const {
        float found = __shfl_sync(~0u, sum[0], j & 31);
#pragma unroll
        for (int b = 1; b < ENTRY_LANES; ++b) {
            const float other = __shfl_sync(~0u, sum[b], j & 31);
            if (j >= 32 * b) found = other;
        }
        return found;
    }
    __device__ __forceinline__ float decay(float from, float to) const { return exp2f(rate * (to - from)); }
};

// exp(c_e - c_j) dt_j of all entries j before `count`, seen from entry e = count - 1; lane l holds j = l + 32 b.
struct Weights {
    float v[ENTRY_LANES];
    float decay;  // exp(c_e)

    __device__ __forceinline__ Weights(const Decays& decays, int count, int lane) {
        const float last = decays.sum_at(count - 1);
        decay = decays.decay(0.0f, last);
#pragma unroll
        for (int b = 0; b < ENTRY_LANES; ++b)
            v[b] = lane + 32 * b < count ? decays.decay(decays.sum[b], last) * decays.dt[b] : 0.0f;
    }
    // Of entry j in block b of 16.
    __device__ __forceinline__ float at(int b, int j) const { return __shfl_sync(~0u, v[b / 2], j & 31); }
};

// x of 16 entries, transposed: part[s][half] holds state rows g (half 0) or g + 8, entries 16 b + 8 s + 2t and ... + 1.
struct TransposedX {
    u32 part[2][2];

    __device__ __forceinline__ TransposedX(const uint2 (&x)[2]) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            part[s][0] = transpose_8x8(x[s].x);
            part[s][1] = transpose_8x8(x[s].y);
        }
    }
    // Operand of the 8 entries of half-block s, each multiplied by its weight.
    __device__ __forceinline__ void operand(float (&a)[4], int s, float even, float odd) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            a[half] = even * half_to_float<ACT>(part[s][half], false);
            a[2 + half] = odd * half_to_float<ACT>(part[s][half], true);
        }
    }
};
