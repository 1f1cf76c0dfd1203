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

// Steps of one token multiply with PairProducts. Of more tokens its sums would take registers that their weights need.
constexpr bool ONE_TOKEN = TOKENS == 1;

// C as first operand, and where that has pair m.
__device__ __forceinline__ Pairs as_operand(const Pairs& c) {
    return ONE_TOKEN ? Pairs{c.v[0], c.v[2], c.v[1], c.v[3]} : c;
}
__device__ constexpr int operand_pair(int m) { return ONE_TOKEN && (m == 1 || m == 2) ? 3 - m : m; }

// Products of C of a token with rows in its order. The operand's rows g + 8, for which there are no tokens, are given pairs 2 and
// 3: no register is moved for a product, and those of the last pairs form beside those of the first.
struct PairProducts {
    Accumulator first, last;  // in rows g of the one and rows g + 8 of the other; what else they hold means nothing

    __device__ __forceinline__ void add(const Pairs& c, u32 pair0, u32 pair1, u32 pair2, u32 pair3) {
        mma_16bit<ACT>(first, c.v, pair0, pair1);
        mma_16bit<ACT>(last, c.v, pair2, pair3);
    }
    __device__ __forceinline__ void add(const Pairs& c, const Pairs& b) { add(c, b.v[0], b.v[1], b.v[2], b.v[3]); }
    __device__ __forceinline__ float sum(int i) const { return first.v[i] + last.v[2 + i]; }
};

// C of the step's tokens, as first operand: tile n holds token 8 n + g.
struct TokenC {
    Pairs v[TOKEN_TILES][BLOCKS];

    __device__ __forceinline__ void load(const Sequence& seq, int group, int tokens, int lane) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const int i = 8 * n + lane / 4;
            const ACT* row = seq.c(i < tokens ? i : 0, group);
#pragma unroll
            for (int k = 0; k < BLOCKS; ++k)
                v[n][k] = i < tokens ? as_operand(load_pairs<WIDE_STATE>(row, k, lane % 4)) : Pairs{0, 0, 0, 0};
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
    if constexpr (ONE_TOKEN) {
        PairProducts sums = {};
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) sums.add(c.v[0][k], b[k]);
        products.v[0] = sums.sum(0), products.v[1] = sums.sum(1);
    } else {
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Pairs low = c.v[0][k], high = c.v[TOKEN_TILES - 1][k];
                const u32 a[4] = {low.v[2 * half], high.v[2 * half], low.v[2 * half + 1], high.v[2 * half + 1]};
                mma_16bit<ACT>(products, a, b[k].v[2 * half], b[k].v[2 * half + 1]);
            }
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
