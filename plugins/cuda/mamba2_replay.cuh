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

// B_j . C_i of a group, in shared memory: tile n holds tokens g and g + 8, entries 8 n + 2 t and 8 n + 2 t + 1.
struct GroupProducts {
    float2 v[2 * ENTRY_BLOCKS][TOKEN_TILES][32];
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
};

// Multiplies B of entries 8 n ... 8 n + 7 with C; the tokens' rows go into the ring, from the first of the group's blocks.
__device__ __forceinline__ void tile_products(GroupProducts& out, int n, const Sequence& seq, const TokenC& c,
                                              const Heads& heads, int lane, const RingOut& ring) {
    const int j = 8 * n + lane / 4, t = lane % 4;
    const ACT* row = seq.b(seq.existing(j), heads.group);
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
#pragma unroll
    for (int half = 0; half < TOKEN_TILES; ++half) out.v[n][half][lane] = {products.v[2 * half], products.v[2 * half + 1]};
    if (ring.appends && heads.lead_group() && seq.is_token(j) && j < seq.length) {
        ACT* to = ring.b + (heads.group * RING_ROWS + seq.ring_row(j)) * STATE_SIZE;
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) store_pairs<WIDE_STATE>(to, k, t, b[k]);
    }
}

// A head's time steps and their prefix sums; lane l holds entries l + 32 b. Entries that do not exist have dt = 0.
struct Decays {
    float dt[ENTRY_LANES], sum[ENTRY_LANES];
    float rate;

    // `steps`: of entries lane + 32 b, zero where there is none.
    __device__ __forceinline__ Decays(const float (&steps)[ENTRY_LANES], float head_rate, int lane) : rate(head_rate) {
        float carried = 0.0f;
#pragma unroll
        for (int b = 0; b < ENTRY_LANES; ++b) {
            dt[b] = steps[b];
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
};
