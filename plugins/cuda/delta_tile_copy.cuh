// The read copy of a tile of a state that a warp has at hand, in the layout of delta_chunk.cuh: lane 4 g + t has two rows and, of
// every 16 columns, columns 4 t + 0 ... 3.
#pragma once
#include "delta_copy.cuh"

// Pairs of columns that are quantised at a time: their codes fill whole sectors of memory.
constexpr int COPY_PAIRS = 4, COPY_COLUMNS = 16 * COPY_PAIRS;

struct TileCopy {
    static constexpr int COPY_BLOCKS = COPY_COLUMNS / COPY_BLOCK;  // of a row
    static constexpr int BLOCK_PAIRS = COPY_BLOCK / 16;            // of a block
    static constexpr int OWNED = COPY_BLOCKS / 2;                  // blocks of a lane, for which it works out scales: of row t / 2
    ReadCopy to;  // of the head's slice
    float head_scale;
    int row, t;  // the upper row of the lane

    __device__ __forceinline__ u8* at_row(u8* rows, int half, int bytes) const { return rows + (row + 8 * half) * bytes; }

    // x: as it is stored. Of all lanes of a warp.
    __device__ __forceinline__ void store(const float (&x)[COPY_PAIRS][2][4], int first_pair) const {
        float factor[2][COPY_BLOCKS];
        u32 scales = 0;
        find_scales(x, factor, scales);
        const int first_block = first_pair / BLOCK_PAIRS + t % 2 * OWNED;
        u8* scale = at_row(to.scales, t / 2, KEY_DIM / COPY_BLOCK) + first_block;
        if constexpr (OWNED == 2)
            *reinterpret_cast<u16*>(scale) = u16(scales);
        else
            *scale = u8(scales);
        if constexpr (READ_BITS == 8)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 words[4];
#pragma unroll
                for (int p = 0; p < 4; ++p) words[p] = four_codes(x[p][half], factor[half][p / BLOCK_PAIRS]);
                transpose_quad(words, t);
                store_codes(half, 16 * (first_pair + t), words);
            }
        else {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i / 2, p = i % 2 * 2;
                words[i] = four_codes(x[p][half], factor[half][p]) | four_codes(x[p + 1][half], factor[half][p + 1]) << 16;
            }
            transpose_quad(words, t);
            const u32 parts[4] = {words[0], words[1], words[2], words[3]};
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = __byte_perm(parts[2 * i % 4], parts[2 * i % 4 + 1], i < 2 ? 0x5410 : 0x7632);
            store_codes(t / 2, 16 * first_pair + 32 * (t % 2), words);
        }
    }

private:
    __device__ __forceinline__ void store_codes(int half, int column, const u32 (&v)[4]) const {
        *reinterpret_cast<uint4*>(at_row(to.codes, half, KEY_DIM * READ_BITS / 8) + column * READ_BITS / 8) = {v[0], v[1], v[2], v[3]};
    }

    // The lanes of a quad divide the blocks among them, and tell each other what to multiply by.
    __device__ __forceinline__ void find_scales(const float (&x)[COPY_PAIRS][2][4], float (&factor)[2][COPY_BLOCKS], u32& scales) const {
        float amax[2 * COPY_BLOCKS] = {};
#pragma unroll
        for (int n = 0; n < 8 * COPY_PAIRS; ++n) {
            float& of_block = amax[n / 4 % 2 * COPY_BLOCKS + n / 8 / BLOCK_PAIRS];
            of_block = larger_magnitude(of_block, x[n / 8][n / 4 % 2][n % 4]);
        }
        exchange<2, COPY_BLOCKS>(amax);
        exchange<1, OWNED>(amax);
        float own[OWNED];
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {
            const u32 scale = block_scale(amax[i], head_scale);
            own[i] = block_factor(scale, head_scale);
            scales |= scale << 8 * i;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < COPY_BLOCKS; ++i) factor[half][i] = __shfl_sync(~0u, own[i % OWNED], 2 * half + i / OWNED, 4);
    }
    // Keeps the lower or the upper COUNT of twice as many maxima.
    template <int DISTANCE, int COUNT>
    __device__ __forceinline__ void exchange(float* amax) const {
        const bool upper = t & DISTANCE;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float kept = upper ? amax[i + COUNT] : amax[i], given = upper ? amax[i] : amax[i + COUNT];
            amax[i] = larger_magnitude(kept, __shfl_xor_sync(~0u, given, DISTANCE));
        }
    }
};
