// Read copies of checkpoints: codes, scales, and the copy of a head that a block has just written. Contract: plugins/read_copy.py.
//
// Macro: READ_BITS (bits of a code: 8 for fp8, 4 for nvfp4, 0 without a copy).
#pragma once
#include "copy_codes.cuh"
#include "ptx/cluster.cuh"

// What kernels of layers with a copy take besides: behind the other inputs, strides and outputs. An output's address is also
// the input's.
#if READ_BITS == 4
#define COPY_INPUTS const u8* /*read_codes*/, const u8* /*read_scales*/, const float* /*read_head_scale*/,
#define COPY_STRIDES int codes_stride, int scales_stride, int head_scale_stride,
#define COPY_OUTPUTS , u8 *codes, u8 *scales, float *head_scale
#define COPY_OF_SLOT(slot) \
    ReadCopy { codes + i64(slot) * codes_stride, scales + i64(slot) * scales_stride, head_scale + i64(slot) * head_scale_stride }
#elif READ_BITS == 8
#define COPY_INPUTS const u8* /*read_codes*/, const u8* /*read_scales*/,
#define COPY_STRIDES int codes_stride, int scales_stride,
#define COPY_OUTPUTS , u8 *codes, u8 *scales
#define COPY_OF_SLOT(slot) \
    ReadCopy { codes + i64(slot) * codes_stride, scales + i64(slot) * scales_stride, nullptr }
#else
#define COPY_INPUTS
#define COPY_STRIDES
#define COPY_OUTPUTS
#define COPY_OF_SLOT(slot) \
    ReadCopy {}
#endif

// Where a copy lies, of a slot or of a head. `head_scale` is nvfp4's.
struct ReadCopy {
    u8* codes;
    u8* scales;
    float* head_scale;

    // Of head `head` of a state of heads [rows, columns], from row `first` on.
    __device__ __forceinline__ ReadCopy of_head(int head, int rows, int columns, int first = 0) const {
        const i64 row = i64(head) * rows + first;
        return {codes + row * (columns * READ_BITS / 8), scales + row * (columns / COPY_BLOCK), head_scale + head};
    }
};

__device__ __forceinline__ float warp_magnitude(float x) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) x = larger_magnitude(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}

// Lane t of each quad has item i in v[i]; afterwards it has item t of lane i there.
__device__ __forceinline__ void transpose_quad(u32 (&v)[4], int t) {
#pragma unroll
    for (int distance = 1; distance < 4; distance <<= 1)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & distance) continue;
            const bool upper = t & distance;
            const u32 received = __shfl_xor_sync(~0u, upper ? v[i] : v[i + distance], distance);
            (upper ? v[i] : v[i + distance]) = received;
        }
}

// ---- whole heads -----------------------------------------------------------------------------------------------------

// The value of a code's four bits: they are exponent and fraction of a float of which 2^-126 is one.
__device__ __forceinline__ float from_e2m1(u32 code) {
    const float magnitude = __uint_as_float((code & 7u) << 22) * 8.507059173023462e37f;
    return code & 8u ? -magnitude : magnitude;
}

// Value of a copy's element; `copy` is that of a head [.., HEAD_COLUMNS].
template <int HEAD_COLUMNS>
__device__ __forceinline__ float copy_value(const ReadCopy& copy, int row, int column) {
    const int at = row * HEAD_COLUMNS + column;
    const u32 scale = copy.scales[at / COPY_BLOCK];
    if constexpr (READ_BITS == 8) {
        return __fmul_rn(from_e4m3(copy.codes[at]), fp8_scale_value(scale));
    } else {
        const u32 code = copy.codes[at / 2] >> (at % 2 ? 4 : 0);
        return __fmul_rn(__fmul_rn(from_e2m1(code), from_e4m3(scale)), *copy.head_scale);
    }
}

// The largest of N magnitudes of a state that the block has stored; for all of its THREADS.
template <int N, int THREADS, typename T>
__device__ __forceinline__ float block_magnitude(const T* state) {
    __shared__ float largest[THREADS / 32];
    float amax = 0.0f;
    for (int i = threadIdx.x; i < N; i += THREADS) amax = larger_magnitude(amax, to_float(state[i]));
    amax = warp_magnitude(amax);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) amax = larger_magnitude(amax, largest[warp]);
    return amax;
}

// The largest of what the blocks of a cluster, those of a head, have found; for all of their threads.
template <int HEAD_BLOCKS>
__device__ __forceinline__ float cluster_magnitude(float amax) {
    __shared__ float of_block;
    if (threadIdx.x == 0) of_block = amax;
    wait_cluster();
#pragma unroll
    for (int i = 1; i < HEAD_BLOCKS; ++i) amax = larger_magnitude(amax, load_of_block(&of_block, (blockIdx.x + i) % HEAD_BLOCKS));
    wait_cluster();  // no block ends before the others have read
    return amax;
}

// Writes the copy of OWN_ROWS rows of a head's checkpoint [.., HEAD_COLUMNS], which the threads of this block have written before.
// All of its THREADS come here together, and may write that checkpoint again behind it. The blocks of an nvfp4 head, if there are
// several, are a cluster, and all of them come here.
template <int OWN_ROWS, int HEAD_COLUMNS, int THREADS, int HEAD_BLOCKS = 1, typename T>
__device__ __forceinline__ void write_copy(const T* state, const ReadCopy& copy) {
    constexpr int COPY_BLOCKS = OWN_ROWS * HEAD_COLUMNS / COPY_BLOCK;
    __syncthreads();
    HeadScale head;
    if constexpr (READ_BITS == 4) {
        float amax = block_magnitude<OWN_ROWS * HEAD_COLUMNS, THREADS>(state);
        if constexpr (HEAD_BLOCKS > 1) amax = cluster_magnitude<HEAD_BLOCKS>(amax);
        head = HeadScale(amax);
        if (threadIdx.x == 0 && blockIdx.x % HEAD_BLOCKS == 0) *copy.head_scale = head.value;
    }
    for (int block = threadIdx.x; block < COPY_BLOCKS; block += THREADS) {
        float x[COPY_BLOCK];
#pragma unroll
        for (int i = 0; i < COPY_BLOCK; ++i) x[i] = to_float(state[block * COPY_BLOCK + i]);
        const float amax = largest_magnitude(x);
        BlockScale scale(amax, head);
        if (!scale.settled) scale.settle(x, amax, head);
        copy.scales[block] = u8(scale.stored);
        constexpr int WORDS = COPY_BLOCK / WORD_CODES;
        u32* to = reinterpret_cast<u32*>(copy.codes) + block * WORDS;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) to[i] = code_word(x + i * WORD_CODES, scale.factor);
    }
    __syncthreads();
}
