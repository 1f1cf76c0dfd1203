// The read copy of a state that lies in registers: 16 rows of a head in a warp, in the order of rows.cuh.
#pragma once
#include "mamba2_shape.cuh"
#include "read_copy.cuh"
#include "rows.cuh"

// A warp's rows as they are stored, of which a lane has rows g and g + 8.
template <typename T>
using StateTile = StatePairs<T>[BLOCKS][2];

template <typename T>
__device__ __forceinline__ float tile_magnitude(const StateTile<T>& tile) {
    float amax = 0.0f;
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
        for (int i = 0; i < 16; ++i) amax = larger_magnitude(amax, tile[k][i / 8].get(i % 8 / 2, i % 2));
    return warp_magnitude(amax);
}

template <int WIDTH>
__device__ __forceinline__ float quad_magnitude(float x) {
#pragma unroll
    for (int offset = 1; offset < WIDTH; offset <<= 1) x = larger_magnitude(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}

// A lane's eight columns of a row and block of 32, and the largest magnitudes of their halves.
struct CopyColumns {
    float x[8], amax[2];

    template <typename T>
    __device__ __forceinline__ explicit CopyColumns(const StatePairs<T>& pairs) : amax{0.0f, 0.0f} {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = pairs.get(i / 2, i % 2);
            amax[i / 4] = larger_magnitude(amax[i / 4], x[i]);
        }
    }
};

// Blocks of 32 columns of a row whose codes leave together, in accesses of 16 bytes that fill whole sectors of memory.
constexpr int COPY_STORE_BLOCKS = BLOCKS > 4 ? 2 : BLOCKS;

// Codes and scales of these blocks of one row.
//
// A wide state has columns 4 t ... 4 t + 3 of each half of a block in lane t, a narrow one columns 8 t ... 8 t + 7 of the block.
template <typename T>
struct CopyStore {
    static constexpr bool WIDE = sizeof(T) == 4;
    static constexpr int N = COPY_STORE_BLOCKS;
    u32 first[N], second[N];  // the lane's codes; nvfp4's eight are in `first`
    u32 scales[N];

    // Block i.
    __device__ __forceinline__ void set(int i, CopyColumns c, const HeadScale& head, int t) {
        if constexpr (READ_BITS == 8) {
            const BlockScale scale(quad_magnitude<4>(larger_magnitude(c.amax[0], c.amax[1])), head);
            scales[i] = scale.stored;
            first[i] = fp8_codes(c.x, scale.factor), second[i] = fp8_codes(c.x + 4, scale.factor);
        } else if constexpr (WIDE) {
            // Even lanes work out the scale of the lower half, odd ones that of the upper, for all four.
            const float low = quad_magnitude<4>(c.amax[0]), high = quad_magnitude<4>(c.amax[1]);
            const float amax = t % 2 ? high : low;
            BlockScale scale(amax, head);
            if (!scale.settled) scale.define(amax, head.value);
            scales[i] = scale.stored;
            float lower = __shfl_sync(~0u, scale.factor, 0, 4), upper = __shfl_sync(~0u, scale.factor, 1, 4);
            if (has_to_limit(lower) || has_to_limit(upper)) limit_values<4>(c.x, lower), limit_values<4>(c.x + 4, upper);
            first[i] = nvfp4_codes(c.x, lower, upper);
        } else {
            const float amax = quad_magnitude<2>(larger_magnitude(c.amax[0], c.amax[1]));
            BlockScale scale(amax, head);
            if (!scale.settled) scale.settle(c.x, amax, head);
            scales[i] = scale.stored;
            first[i] = nvfp4_codes(c.x, scale.factor, scale.factor);
        }
    }
    // Row `row` of the head's copy, from block `block` on.
    __device__ __forceinline__ void store(const ReadCopy& copy, int row, int block, int t) {
        u8* codes = copy.codes + row * (STATE_SIZE * READ_BITS / 8) + block * (4 * READ_BITS);
        u8* to = copy.scales + row * (STATE_SIZE / COPY_BLOCK) + block * (32 / COPY_BLOCK);
        if constexpr (READ_BITS == 8 && !WIDE) {
#pragma unroll
            for (int i = 0; i < N; ++i) *reinterpret_cast<uint2*>(codes + 32 * i + 8 * t) = {first[i], second[i]};
        } else if constexpr (READ_BITS == 8) {
#pragma unroll
            for (int i = 0; i < N; i += 2) {
                const int next = i + 1 < N ? i + 1 : i;
                u32 halves[4] = {first[i], second[i], first[next], second[next]};
                transpose_quad(halves, t);
                if (i + t / 2 < N) store_16_bytes(codes + 32 * i + 16 * t, halves);
            }
        } else {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = first[i < N ? i : 0];
            transpose_quad(words, t);
            if constexpr (WIDE) {
                const u32 parts[4] = {words[0], words[1], words[2], words[3]};
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    words[i] = __byte_perm(parts[2 * i % 4], parts[2 * i % 4 + 1], i < 2 ? 0x5410 : 0x7632);
            }
            if (t < N) store_16_bytes(codes + 16 * t, words);
        }
        store_scales(to, t);
    }

private:
    __device__ __forceinline__ static void store_16_bytes(u8* to, const u32 (&v)[4]) {
        *reinterpret_cast<uint4*>(to) = {v[0], v[1], v[2], v[3]};
    }
    __device__ __forceinline__ void store_scales(u8* to, int t) const {
        if constexpr (N < 4) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (READ_BITS == 8 && t == 0) to[i] = u8(scales[i]);
                if (READ_BITS == 4 && WIDE && t < 2) to[2 * i + t] = u8(scales[i]);
                if (READ_BITS == 4 && !WIDE && t % 2 == 0) to[2 * i + t / 2] = u8(scales[i]);
            }
        } else {
            const u32 own = scales[0] | scales[1] << 8 | scales[2] << 16 | scales[3] << 24;
            if constexpr (READ_BITS == 8) {
                if (t == 0) *reinterpret_cast<u32*>(to) = own;
            } else {
                // Both halves' scales of the first two blocks, then of the last two.
                constexpr int STEP = WIDE ? 1 : 2;
                const u32 other = __shfl_xor_sync(~0u, own, STEP);
                const bool upper = t & STEP;
                const u32 low = upper ? other : own, high = upper ? own : other;
                if (WIDE ? t < 2 : t % 2 == 0)
                    *reinterpret_cast<u32*>(to + (upper ? 4 : 0)) = __byte_perm(low, high, upper ? 0x7362 : 0x5140);
            }
        }
    }
};
