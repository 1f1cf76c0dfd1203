// The read copy of a delta-rule state (read_copy.cuh): written from the checkpoint that a block has just stored.
#pragma once
#include "delta_lanes.cuh"

// Eight columns of a state row; the lanes of a block of columns are neighbours.
constexpr int PIECE = 8, PIECE_LANES = COPY_BLOCK / PIECE;

// ---- the scale of a head ---------------------------------------------------------------------------------------------

// The largest magnitude of a head from those that the block's threads have met. Magnitudes compare as their bits do, and what
// is not finite is above the rest.
__device__ __forceinline__ float head_magnitude(float mine, u32* shared) {
    if (threadIdx.x == 0) *shared = 0;
    __syncthreads();
    const u32 of_warp = __reduce_max_sync(~0u, __float_as_uint(mine));
    if (threadIdx.x % 32 == 0) atomicMax(shared, of_warp);
    __syncthreads();
    return __uint_as_float(*shared);
}

// ---- codes -----------------------------------------------------------------------------------------------------------

#if READ_BITS == 4 && !HAS_E2M1
// copy_codes with fewer instructions. Codes grow by one for 0.5 up to 2, for 1 up to 4 and for 2 up to 6: the least of three lines,
// rounded to the nearest integer, to the even one between two, by a sum whose last bit counts ones.
__device__ __forceinline__ u32 four_codes(const float* x, float factor) {
    constexpr float ONES = 12582912.0f;
    constexpr u32 BITS = 0x4b400000u;  // of ONES, which the codes are added to
    u32 word = 0, signs = 0;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
        const float y = __fmul_rn(fabsf(x[i]), factor);
        const float low = fminf(__fmaf_rn(y, 2.0f, ONES), __fadd_rn(y, ONES + 2.0f));
        const float high = fminf(__fmaf_rn(y, 0.5f, ONES + 4.0f), ONES + 7.0f);
        word = (word << 4) + __float_as_uint(fminf(low, high));
        signs = __funnelshift_l(__float_as_uint(x[i]), signs, 4);
    }
    word = (word - (BITS + (BITS << 4) + (BITS << 8))) | (signs & 0x8888u);
    return factor == 0.0f ? 0 : word;
}
#else
__device__ __forceinline__ u32 four_codes(const float* x, float factor) { return copy_codes(x, factor); }
#endif

struct Piece {
    float x[PIECE];

    __device__ __forceinline__ void load(const STATE* from) {
        if constexpr (ALIGNED) {
#pragma unroll
            for (int i = 0; i < PIECE; i += 4) load_vector<4>(from + i, x + i);
        } else {
#pragma unroll
            for (int i = 0; i < PIECE; ++i) x[i] = to_float(from[i]);
        }
    }
    // All lanes of the warp come here; `at` is the piece's place in the slice, if it exists.
    __device__ __forceinline__ void store(const ReadCopy& copy, int at, bool exists, float head_scale) const {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < PIECE; ++i) amax = larger_magnitude(amax, x[i]);
#pragma unroll
        for (int offset = 1; offset < PIECE_LANES; offset *= 2) amax = larger_magnitude(amax, __shfl_xor_sync(~0u, amax, offset));
        const u32 scale = block_scale(amax, head_scale);
        const float factor = block_factor(scale, head_scale);
        const u32 first = four_codes(x, factor), second = four_codes(x + 4, factor);
        if (!exists) return;
        if (at % PIECE_LANES == 0) copy.scales[at / PIECE_LANES] = u8(scale);
        u8* codes = copy.codes + at * (PIECE * READ_BITS / 8);
        if constexpr (ALIGNED && READ_BITS == 4) {
            *reinterpret_cast<u32*>(codes) = first | second << 16;
        } else if constexpr (ALIGNED) {
            *reinterpret_cast<uint2*>(codes) = {first, second};
        } else {
#pragma unroll
            for (int i = 0; i < READ_BITS / 2; ++i) codes[i] = u8(first >> 8 * i), codes[READ_BITS / 2 + i] = u8(second >> 8 * i);
        }
    }
};

// Renews the copy of the slice's rows, which the block has written before; all its threads come here, with the largest
// magnitude that each has stored. `shared`: a word that nobody uses.
__device__ __forceinline__ void renew_copy(const Work& w, float largest, u32* shared) {
    __syncthreads();
    const ReadCopy copy = w.copy();
    float head_scale = 0.0f;
    static_assert(READ_BITS != 4 || SPLIT == 1, "a block needs all rows of a head for its scale");
    if constexpr (READ_BITS == 4) {
        head_scale = nvfp4_head_scale(head_magnitude(largest, shared));
        if (threadIdx.x == 0 && w.leads_head()) *copy.head_scale = head_scale;
    }
    constexpr int TOGETHER = 4;  // pieces of a thread that are requested at once
    const int pieces = w.value_rows() * (KEY_DIM / PIECE);
    const STATE* state = w.t.state_out + w.state_at(0);
#pragma unroll 1
    for (int first = 0; first < pieces; first += TOGETHER * THREADS) {
        Piece piece[TOGETHER] = {};
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
            const int at = first + n * THREADS + int(threadIdx.x);
            if (at < pieces) piece[n].load(state + at * PIECE);
        }
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
            const int at = first + n * THREADS + int(threadIdx.x);
            piece[n].store(copy, at, at < pieces, head_scale);
        }
    }
    __syncthreads();
}
