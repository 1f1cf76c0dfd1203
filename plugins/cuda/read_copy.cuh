// Read copies of checkpoints: codes, scales, and the copy of a head that a block has just written. Contract: plugins/read_copy.py.
//
// Macro: READ_BITS (bits of a code: 8 for fp8, 4 for nvfp4, 0 without a copy).
#pragma once
#include "ptx/arithmetic.cuh"
#include "ptx/cluster.cuh"
#include "types.cuh"

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

#if __CUDA_ARCH__ >= 1000 && (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
// Conversions from and to E2M1 are instructions of the variants of compute capability 10 that are specific to an architecture.
#define HAS_E2M1 1
#else
#define HAS_E2M1 0
#endif

// Columns that share a scale.
constexpr int COPY_BLOCK = READ_BITS == 4 ? 16 : 32;
// Magnitudes: the largest of E4M3 and of E2M1, and their product.
constexpr float E4M3_MAX = 448.0f, E2M1_MAX = 6.0f, HEAD_MAX = 2688.0f;

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

// The larger magnitude; what is not a number wins.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
    return max_or_nan(fabsf(a), fabsf(b));
}

__device__ __forceinline__ float warp_magnitude(float x) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) x = larger_magnitude(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}

// ---- E4M3 ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 to_e4m3(float x) { return to_e4m3_pair(x, 0.0f) & 0xffu; }
__device__ __forceinline__ float from_e4m3(u32 code) { return half_to_float<fp16>(from_e4m3_pair(u16(code)), false); }

// ---- E2M1 ------------------------------------------------------------------------------------------------------------

// Code of a float, 6 at most in magnitude. Added to a power of two (and to twice or thrice its last place, where that makes
// codes consecutive), a magnitude is rounded to the spacing of E2M1 around it, and the sum's last bits are the code.
__device__ __forceinline__ u32 to_e2m1(float x) {
    const float magnitude = fminf(fabsf(x), E2M1_MAX);
    const float shift = magnitude < 2.0f ? 4194304.0f : magnitude < 4.0f ? 8388610.0f : 16777224.0f;
    return (__float_as_uint(__fadd_rn(magnitude, shift)) & 7u) | (__float_as_uint(x) >> 28 & 8u);
}

// Codes of two floats, that of `low` in the lower four bits.
__device__ __forceinline__ u32 to_e2m1_pair(float low, float high) {
#if HAS_E2M1
    return f32_to_e2m1_pair(low, high);
#else
    return to_e2m1(low) | to_e2m1(high) << 4;
#endif
}

// The value of a code's four bits: they are exponent and fraction of a float of which 2^-126 is one.
__device__ __forceinline__ float from_e2m1(u32 code) {
    const float magnitude = __uint_as_float((code & 7u) << 22) * 8.507059173023462e37f;
    return code & 8u ? -magnitude : magnitude;
}

// ---- scales ----------------------------------------------------------------------------------------------------------

// fp8: the stored scale of a block whose largest magnitude is `amax`: 127 + the least e with amax <= 448 * 2^e.
__device__ __forceinline__ u32 fp8_scale(float amax) {
    const u32 bits = __float_as_uint(amax);
    // A fraction above 1.75, that of 448, carries into the exponent.
    return bits >= 0x7f800000u ? 254u : u32(max(int((bits + 0x1fffffu) >> 23) - 8, 1));
}
// What values are multiplied with to become codes: the inverse of the scale; no number for a block that is not finite.
__device__ __forceinline__ float fp8_factor(u32 scale) {
    return __uint_as_float(scale == 254u ? 0x7fc00000u : (254u - scale) << 23);
}
__device__ __forceinline__ float fp8_scale_value(u32 scale) { return __uint_as_float(scale << 23); }

__device__ __forceinline__ float nvfp4_head_scale(float amax) { return __fdiv_rn(amax, HEAD_MAX); }
// The stored scale of a block.
__device__ __forceinline__ u32 nvfp4_scale(float amax, float head_scale) {
    if (head_scale == 0.0f) return 0;
    return to_e4m3(fminf(__fdiv_rn(__fdiv_rn(amax, E2M1_MAX), head_scale), E4M3_MAX));
}
// What values are multiplied with to become codes, or 0 where all codes are zero.
__device__ __forceinline__ float nvfp4_factor(u32 scale, float head_scale) {
    const float whole = __fmul_rn(from_e4m3(scale), head_scale);
    return whole == 0.0f ? 0.0f : __fdiv_rn(1.0f, whole);
}

// Of either format; fp8 has no scale of a head.
__device__ __forceinline__ u32 block_scale(float amax, float head_scale) {
    return READ_BITS == 8 ? fp8_scale(amax) : nvfp4_scale(amax, head_scale);
}
__device__ __forceinline__ float block_factor(u32 scale, float head_scale) {
    return READ_BITS == 8 ? fp8_factor(scale) : nvfp4_factor(scale, head_scale);
}

// The codes of four columns, nvfp4's in the lower 16 bits. `factor` is that of their block.
__device__ __forceinline__ u32 copy_codes(const float* x, float factor) {
    float scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled[i] = __fmul_rn(x[i], factor);
    if constexpr (READ_BITS == 8) return to_e4m3_pair(scaled[0], scaled[1]) | to_e4m3_pair(scaled[2], scaled[3]) << 16;
    // A block of codes that are zero has no signs.
    return factor == 0.0f ? 0 : to_e2m1_pair(scaled[0], scaled[1]) | to_e2m1_pair(scaled[2], scaled[3]) << 8;
}

__device__ __forceinline__ void store_codes(u8* to, u32 four) {
    if constexpr (READ_BITS == 8)
        *reinterpret_cast<u32*>(to) = four;
    else
        *reinterpret_cast<u16*>(to) = u16(four);
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
    float head_scale = 0.0f;
    if constexpr (READ_BITS == 4) {
        float amax = block_magnitude<OWN_ROWS * HEAD_COLUMNS, THREADS>(state);
        if constexpr (HEAD_BLOCKS > 1) amax = cluster_magnitude<HEAD_BLOCKS>(amax);
        head_scale = nvfp4_head_scale(amax);
        if (threadIdx.x == 0 && blockIdx.x % HEAD_BLOCKS == 0) *copy.head_scale = head_scale;
    }
    for (int block = threadIdx.x; block < COPY_BLOCKS; block += THREADS) {
        float x[COPY_BLOCK], amax = 0.0f;
#pragma unroll
        for (int i = 0; i < COPY_BLOCK; ++i) {
            x[i] = to_float(state[block * COPY_BLOCK + i]);
            amax = larger_magnitude(amax, x[i]);
        }
        const u32 scale = block_scale(amax, head_scale);
        const float factor = block_factor(scale, head_scale);
        copy.scales[block] = u8(scale);
        u8* to = copy.codes + block * (COPY_BLOCK * READ_BITS / 8);
#pragma unroll
        for (int i = 0; i < COPY_BLOCK; i += 4) store_codes(to + i * READ_BITS / 8, copy_codes(x + i, factor));
    }
    __syncthreads();
}
