// The read copy of a state that lies in registers: 16 rows of a head in a warp, in the order of rows.cuh.
#pragma once
#include "mamba2_shape.cuh"
#include "read_copy.cuh"
#include "rows.cuh"

// A warp's rows as they are stored: row g of them is row state_row(g) of the warp's 16, row g + 8 the one two behind.
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

// Writes the copy of one row's block of 32 columns; `codes` and `scales` are the row's.
//
// A wide state has columns 4 t ... 4 t + 3 of each half in lane t, a narrow one columns 8 t ... 8 t + 7 of the whole.
template <bool WIDE>
__device__ __forceinline__ void store_copy_block(const CopyColumns& c, float head_scale, u8* codes, u8* scales, int block, int t) {
    if constexpr (READ_BITS == 8) {
        const u32 scale = fp8_scale(quad_magnitude<4>(larger_magnitude(c.amax[0], c.amax[1])));
        const float factor = fp8_factor(scale);
        const u32 first = copy_codes(c.x, factor), second = copy_codes(c.x + 4, factor);
        if (t == block % 4) scales[block] = u8(scale);
        if constexpr (WIDE) {
            store_codes(codes + 32 * block + 4 * t, first);
            store_codes(codes + 32 * block + 16 + 4 * t, second);
        } else {
            *reinterpret_cast<uint2*>(codes + 32 * block + 8 * t) = {first, second};
        }
    } else if constexpr (WIDE) {
        // Lanes 0 and 1 work out the scales of the halves for the others.
        const float low = quad_magnitude<4>(c.amax[0]), high = quad_magnitude<4>(c.amax[1]);
        const u32 scale = nvfp4_scale(t % 2 ? high : low, head_scale);
        const float factor = nvfp4_factor(scale, head_scale);
        if (t < 2) scales[2 * block + t] = u8(scale);
        const u32 both = copy_codes(c.x, __shfl_sync(~0u, factor, 0, 4)) | copy_codes(c.x + 4, __shfl_sync(~0u, factor, 1, 4)) << 16;
        // A quad's 16 bytes leave in words: two lanes' parts of one half.
        const u32 even = __shfl_sync(~0u, both, 2 * t % 4, 4), odd = __shfl_sync(~0u, both, 2 * t % 4 + 1, 4);
        *reinterpret_cast<u32*>(codes + 16 * block + 4 * t) = __byte_perm(even, odd, t < 2 ? 0x5410 : 0x7632);
    } else {
        const u32 scale = nvfp4_scale(quad_magnitude<2>(larger_magnitude(c.amax[0], c.amax[1])), head_scale);
        const float factor = nvfp4_factor(scale, head_scale);
        if (t % 2 == 0) scales[2 * block + t / 2] = u8(scale);
        *reinterpret_cast<u32*>(codes + 16 * block + 4 * t) = copy_codes(c.x, factor) | copy_codes(c.x + 4, factor) << 16;
    }
}

// The same of rows g and g + 8 of a tile, the head's copy being `copy` and the lane's first row `row` of the head.
template <typename T>
__device__ __forceinline__ void store_copy_rows(const StatePairs<T> (&pairs)[2], float head_scale, const ReadCopy& copy, int row,
                                                int block, int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int at = row + 2 * r;
        store_copy_block<sizeof(T) == 4>(CopyColumns(pairs[r]), head_scale, copy.codes + at * (STATE_SIZE * READ_BITS / 8),
                                         copy.scales + at * (STATE_SIZE / COPY_BLOCK), block, t);
    }
}
