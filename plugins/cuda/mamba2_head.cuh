// Stage 4 of mamba2_step: a warp's 16 rows of a head, y_i = exp(c_e) S0 C_i + sum_j M_ij x_j (names in mamba2_replay.cuh).
#pragma once
#include "mamba2_weights.cuh"

// C of the step's tokens as operands, for all warps of the block.
struct SharedC {
    uint4 v[TOKEN_TILES][BLOCKS][32];

    // One of the block's warps stores its share.
    __device__ __forceinline__ void set(const TokenC& c, int warp, int lane) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
            for (int k = 0; k < BLOCKS; ++k)
                if (k % WARPS == warp) v[n][k][lane] = {c.v[n][k].v[0], c.v[n][k].v[1], c.v[n][k].v[2], c.v[n][k].v[3]};
    }
    __device__ __forceinline__ Pairs get(int n, int block, int lane) const {
        const uint4 at = v[n][block][lane];
        return {at.x, at.y, at.z, at.w};
    }
};

// BLOCKS_A_CHUNK blocks of columns of a warp's rows, of which a lane has rows g and g + 8.
struct StateChunk {
    StatePairs<STATE> v[BLOCKS_A_CHUNK][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; k < BLOCKS_A_CHUNK; ++k) v[k][0].clear(), v[k][1].clear();
    }
    // Keeps the compiler from preparing operands where the chunk is loaded: it would wait for memory there.
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (int k = 0; k < BLOCKS_A_CHUNK; ++k) v[k][0].keep(), v[k][1].keep();
    }
    // `rows`: row g, at the chunk's first block. UPDATE: it is loaded to be written back at once.
    template <bool UPDATE>
    __device__ __forceinline__ void load(const STATE* rows, int t) {
        rows = opaque(rows);
#pragma unroll
        for (int k = 0; k < BLOCKS_A_CHUNK; ++k)
            v[k][0].template load<UPDATE>(rows, k, t), v[k][1].template load<UPDATE>(rows + 8 * STATE_SIZE, k, t);
    }
};

// A head's outputs as they form: tile q holds tokens g and g + 8, channels 8 q + 2 t and 8 q + 2 t + 1 of the warp's 16. The
// state and x are the second operands: a lane's adjacent elements are one, without moving a register.
struct Outputs {
    Accumulator v[2];
};

// S0 C of a head, accumulated chunk by chunk. A float32 state counts in two parts.
template <typename T>
struct StateProducts {
    static constexpr int PARTS = sizeof(T) == 4 ? 2 : 1;
    static constexpr bool AS_STORED = same_type<T, ACT>::value, IN_PARTS = same_type<ACT, bf16>::value && PARTS > 1;
    static constexpr bool IN_PAIRS = ONE_TOKEN && (AS_STORED || IN_PARTS);
    // Or else a sum of each part: two halve the chain of dependent instructions.
    static constexpr int SUMS = IN_PAIRS ? 1 : PARTS;
    PairProducts pairs[2];
    Accumulator v[2][SUMS];

    // 32 columns: rows g of both tiles, C of tokens g and g + 8.
    __device__ __forceinline__ void add(const StatePairs<T> (&s)[2], const Pairs& low, const Pairs& high) {
        if constexpr (IN_PAIRS)
            add_in_pairs(s, low);
        else if constexpr (AS_STORED)
            add_as_stored(s, low, high);
        else if constexpr (IN_PARTS)
            add_in_parts(s, low, high);
        else
            add_as_float(s, low, high);
    }
    __device__ __forceinline__ Outputs sum() const {
        Outputs out = {};
#pragma unroll
        for (int q = 0; q < 2; ++q) {
#pragma unroll
            for (int i = 0; i < 2 * TOKEN_TILES; ++i) {
                if constexpr (IN_PAIRS)
                    out.v[q].v[i] = pairs[q].sum(i);
                else
                    out.v[q].v[i] = SUMS > 1 ? v[q][0].v[i] + v[q][SUMS - 1].v[i] : v[q][0].v[i];
            }
        }
        return out;
    }

private:
    __device__ __forceinline__ void add_in_pairs(const StatePairs<T> (&s)[2], const Pairs& c) {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            if constexpr (AS_STORED) {
                pairs[q].add(c, s[q].v[0], s[q].v[1], s[q].v[2], s[q].v[3]);
            } else {
                Parts<PARTS> b[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) b[m] = split_pair<PARTS>(s[q].get(m, 0), s[q].get(m, 1));
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    pairs[q].add(c, b[0].v[part], b[1].v[part], b[2].v[part], b[3].v[part]);
            }
        }
    }
    __device__ __forceinline__ void add_as_stored(const StatePairs<T> (&s)[2], const Pairs& low, const Pairs& high) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 a[4] = {low.v[2 * half], high.v[2 * half], low.v[2 * half + 1], high.v[2 * half + 1]};
#pragma unroll
            for (int q = 0; q < 2; ++q) mma_16bit<ACT>(v[q][0], a, s[q].v[2 * half], s[q].v[2 * half + 1]);
        }
    }
    // Two bfloat16 parts of a number keep 16 bits of its significand.
    __device__ __forceinline__ void add_in_parts(const StatePairs<T> (&s)[2], const Pairs& low, const Pairs& high) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 a[4] = {low.v[2 * half], high.v[2 * half], low.v[2 * half + 1], high.v[2 * half + 1]};
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                Parts<PARTS> b[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) b[i] = split_pair<PARTS>(s[q].get(2 * half + i, 0), s[q].get(2 * half + i, 1));
#pragma unroll
                for (int part = 0; part < PARTS; ++part) mma_16bit<ACT>(v[q][part], a, b[0].v[part], b[1].v[part]);
            }
        }
    }
    __device__ __forceinline__ void add_as_float(const StatePairs<T> (&s)[2], const Pairs& low, const Pairs& high) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const u32 c[2] = {low.v[operand_pair(m)], high.v[operand_pair(m)]};
            const float a[4] = {half_to_float<ACT>(c[0], false), half_to_float<ACT>(c[1], false), half_to_float<ACT>(c[0], true),
                                half_to_float<ACT>(c[1], true)};
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

// Adds sum_j M_ij x_j to a warp's outputs of head h.
__device__ __forceinline__ void add_entries(Outputs& out, const BlockWeights& block, const Extent& seq, int h, int warp,
                                            int lane) {
#pragma unroll
    for (int b = 0; b < ENTRY_BLOCKS; ++b) {
        if (!is_needed(b, seq.length)) continue;
        const Matrices x = load_entries<X_UNITS>(block.x[h], b, 2 * warp, lane);
        Parts<WEIGHT_PARTS> m[4] = {};
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const uint4 parts = block.m[h][b][n][lane];
            m[n] = {{parts.x, parts.z}}, m[2 + n] = {{parts.y, parts.w}};
        }
#pragma unroll
        for (int q = 0; q < 2; ++q)
            mma_parts<0, WEIGHT_PARTS>(out.v[q], m, exact_parts<ACT>(x.v[2 * q]), exact_parts<ACT>(x.v[2 * q + 1]));
    }
}

// Finishes a warp's outputs of head h and stores them; `y` is at token 0 and the first of its 16 channels. Of TOKENS tokens
// those that do not exist become zero.
__device__ __forceinline__ void finish_head(Outputs out, const BlockWeights& block, const Extent& seq, int h, int warp, int lane,
                                            ACT* y) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        const float decay = block.decay[h][8 * n + g];
#pragma unroll
        for (int q = 0; q < 2; ++q) out.v[q].v[2 * n] *= decay, out.v[q].v[2 * n + 1] *= decay;
    }
    add_entries(out, block, seq, h, warp, lane);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        // Tile q has channels 8 q + 2 t and the next: lanes exchange one so that each has four neighbours.
        const u32 low = pack_pair<ACT>(out.v[0].v[2 * n], out.v[0].v[2 * n + 1]);
        const u32 high = pack_pair<ACT>(out.v[1].v[2 * n], out.v[1].v[2 * n + 1]);
        const u32 other = __shfl_xor_sync(~0u, t % 2 ? low : high, 1);
        const int i = 8 * n + g;
        if (i >= TOKENS) continue;
        uint2 channels = t % 2 ? uint2{other, high} : uint2{low, other};
        if (seq.history + i >= seq.length) channels = {0, 0};
        *reinterpret_cast<uint2*>(y + i64(i) * INNER + 8 * (t % 2) + 4 * (t / 2)) = channels;
    }
}
