// The read copy of a delta-rule state (read_copy.cuh): written from the checkpoint that a block has just stored.
#pragma once
#include "delta_lanes.cuh"

// Eight columns of a state row; the lanes of a block of columns are neighbours.
constexpr int PIECE = 8, PIECE_LANES = COPY_BLOCK / PIECE;

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

struct Piece {
    static constexpr int WORDS = PIECE / WORD_CODES;
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
    __device__ __forceinline__ void store(const ReadCopy& copy, int at, bool exists, const HeadScale& head) {
        float amax = largest_magnitude(x);
#pragma unroll
        for (int offset = 1; offset < PIECE_LANES; offset *= 2) amax = larger_magnitude(amax, __shfl_xor_sync(~0u, amax, offset));
        BlockScale scale(amax, head);
        if (!scale.settled) scale.settle(x, amax, head);
        u32 words[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) words[i] = code_word(x + i * WORD_CODES, scale.factor);
        if (!exists) return;
        if (at % PIECE_LANES == 0) copy.scales[at / PIECE_LANES] = u8(scale.stored);
        u8* codes = copy.codes + at * (PIECE * READ_BITS / 8);
        if constexpr (ALIGNED && READ_BITS == 4) {
            *reinterpret_cast<u32*>(codes) = words[0];
        } else if constexpr (ALIGNED) {
            *reinterpret_cast<uint2*>(codes) = {words[0], words[1]};
        } else {
#pragma unroll
            for (int i = 0; i < 4 * WORDS; ++i) codes[i] = u8(words[i / 4] >> i % 4 * 8);
        }
    }
};

// Renews the copy of the slice's rows, which the block has written before; all its threads come here, with the largest
// magnitude that each has stored. `shared`: a word that nobody uses.
__device__ __forceinline__ void renew_copy(const Work& w, float largest, u32* shared) {
    __syncthreads();
    const ReadCopy copy = w.copy();
    HeadScale head;
    static_assert(READ_BITS != 4 || SPLIT == 1, "a block needs all rows of a head for its scale");
    if constexpr (READ_BITS == 4) {
        head = HeadScale(head_magnitude(largest, shared));
        if (threadIdx.x == 0 && w.leads_head()) *copy.head_scale = head.value;
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
            piece[n].store(copy, at, at < pieces, head);
        }
    }
    __syncthreads();
}
