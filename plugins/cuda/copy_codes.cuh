// Codes and scales of read copies, bit for bit those that plugins/read_copy.py defines, with few instructions.
//
// Macro: READ_BITS (bits of a code: 8 for fp8, 4 for nvfp4, 0 without a copy).
#pragma once
#include "ptx/arithmetic.cuh"
#include "types.cuh"

#if __CUDA_ARCH__ >= 1000 && (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
// Conversions from and to E2M1 are instructions of the variants of compute capability 10 that are specific to an architecture.
#define HAS_E2M1 1
#else
#define HAS_E2M1 0
#endif

// Columns that share a scale, and codes of a word.
constexpr int COPY_BLOCK = READ_BITS == 4 ? 16 : 32, WORD_CODES = READ_BITS == 4 ? 8 : 4;
// Magnitudes: the largest of E4M3 and of E2M1, and their product.
constexpr float E4M3_MAX = 448.0f, E2M1_MAX = 6.0f, HEAD_MAX = 2688.0f;

// The larger magnitude; what is not a number wins.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
    return max_or_nan(fabsf(a), fabsf(b));
}
// The largest of three magnitudes: their bits compare as they do, and one instruction takes three integers.
__device__ __forceinline__ float largest_of(float a, float b, float c) {
    return __uint_as_float(max(max(__float_as_uint(a), __float_as_uint(b)), __float_as_uint(c)));
}
template <int N>
__device__ __forceinline__ float largest_magnitude(const float (&x)[N]) {
    static_assert(N % 4 == 0, "pairs of two pairs");
    float amax = larger_magnitude(larger_magnitude(x[0], x[1]), larger_magnitude(x[2], x[3]));
#pragma unroll
    for (int i = 4; i < N; i += 4) amax = largest_of(amax, larger_magnitude(x[i], x[i + 1]), larger_magnitude(x[i + 2], x[i + 3]));
    return amax;
}

// ---- scales ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 to_e4m3(float x) { return to_e4m3_pair(x, 0.0f) & 0xffu; }
__device__ __forceinline__ float from_e4m3(u32 code) { return half_to_float<fp16>(from_e4m3_pair(u16(code)), false); }

// 1 / x, rounded once, for x and 1 / x of ordinary size. The approximation is one unit in the last place off at most, so that its
// successor is the right result or up to two units above it: from these every fraction of x comes out right (tests/emulator).
__device__ __forceinline__ float refined_inverse(float x, float approximation) {
    const float above = __uint_as_float(__float_as_uint(approximation) + 1);
    const float error = __fmaf_rn(-x, above, 1.0f);
    const float near = __fmaf_rn(above, __fmaf_rn(error, error, error), above);
    return __fmaf_rn(near, __fmaf_rn(-x, near, 1.0f), near);
}

// nvfp4: the scale of a head, and two factors: the quotient that a block's scale is rounded from lies between their products with
// its largest magnitude. The quotient has two roundings, a product four and an approximation, which is less than 2^-20 altogether.
// Factors of heads of extraordinary size leave everything open.
struct HeadScale {
    float value = 0.0f, below = 0.0f, above = 0.0f;

    HeadScale() = default;
    // Of a head whose largest magnitude is `amax`.
    __device__ __forceinline__ explicit HeadScale(float amax) : value(__fdiv_rn(amax, HEAD_MAX)) {
        const bool ordinary = value >= 0x1p-100f && value <= 0x1p100f;
        const float inverse = inverse_of(__fmul_rn(value, E2M1_MAX));
        below = ordinary ? __fmul_rn(inverse, 1.0f - 0x1p-20f) : 0.0f;
        above = ordinary ? __fmul_rn(inverse, 1.0f + 0x1p-20f) : __uint_as_float(0x7f800000u);
    }
};

// Whether nvfp4 values of a block with this factor have to be limited before they become codes: its sign is set.
__device__ __forceinline__ bool has_to_limit(float factor) { return int(__float_as_uint(factor)) < 0; }
// Replaces them by the multiples of their block's scale that they are, 6 at most in magnitude, and the factor by that of these
// multiples, 1. A block whose scale is zero has no signs.
template <int N>
__device__ __forceinline__ void limit_values(float* x, float& factor) {
    const u32 sign = factor == 0.0f ? 0 : 0x80000000u;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float magnitude = fminf(fabsf(__fmul_rn(x[i], factor)), E2M1_MAX);
        x[i] = __uint_as_float(__float_as_uint(magnitude) | (__float_as_uint(x[i]) & sign));
    }
    factor = 1.0f;
}

// The stored scale of a block whose largest magnitude is `amax`, and what its values are multiplied with to become codes.
struct BlockScale {
    u32 stored;
    float factor;
    bool settled = true;  // or `settle` has to be called

    __device__ __forceinline__ BlockScale(float amax, const HeadScale& head) {
        if constexpr (READ_BITS == 8)
            set_fp8(amax);
        else
            set_nvfp4(amax, head);
    }
    // By nvfp4's definition, for the few blocks whose products leave their scale open, or whose scale is subnormal: zero, or too
    // small for the largest values by half. Others are too small by a 16th, with which the largest code is still the nearest.
    template <int N>
    __device__ __forceinline__ void settle(float (&x)[N], float amax, const HeadScale& head) {
        define(amax, head.value);
        limit_values<N>(x, factor);
    }
    // The same without the values: they have to be limited.
    __device__ __forceinline__ void define(float amax, float head) {
        const float wanted = head == 0.0f ? 0.0f : __fdiv_rn(__fdiv_rn(amax, E2M1_MAX), head);
        stored = to_e4m3(min_or_nan(wanted, E4M3_MAX));
        const float whole = __fmul_rn(from_e4m3(stored), head);
        factor = -(whole == 0.0f ? 0.0f : __fdiv_rn(1.0f, whole));
    }

private:
    // 127 + the least e with amax <= 448 * 2^e, and 2^-e; no number for a block that is not finite.
    __device__ __forceinline__ void set_fp8(float amax) {
        const u32 bits = __float_as_uint(amax);
        // A fraction above 1.75, that of 448, carries into the exponent.
        stored = bits >= 0x7f800000u ? 254u : u32(max(int((bits + 0x1fffffu) >> 23) - 8, 1));
        factor = __uint_as_float(stored == 254u ? 0x7fc00000u : (254u - stored) << 23);
    }
    __device__ __forceinline__ void set_nvfp4(float amax, const HeadScale& head) {
        constexpr u32 LEAST_NORMAL = 8;
        const u32 bounds = to_e4m3_pair(__fmul_rn(amax, head.below), __fmul_rn(amax, head.above));
        stored = bounds & 0xffu;
        const float whole = __fmul_rn(from_e4m3(stored), head.value);
        factor = refined_inverse(whole, inverse_of(whole));
        settled = bounds == stored * 0x101u && stored >= LEAST_NORMAL;
    }
};

__device__ __forceinline__ float fp8_scale_value(u32 scale) { return __uint_as_float(scale << 23); }

// ---- codes -----------------------------------------------------------------------------------------------------------

// Codes of four fp8 values.
__device__ __forceinline__ u32 fp8_codes(const float* x, float factor) {
    float scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled[i] = __fmul_rn(x[i], factor);
    return to_e4m3_pair(scaled[0], scaled[1]) | to_e4m3_pair(scaled[2], scaled[3]) << 16;
}

// Codes of eight nvfp4 values, limited where they have to be; `first` is the factor of four of them, `second` of the others.
//
// Codes grow by one for 0.5 up to 2, for 1 up to 4 and for 2 above. A sum of a magnitude and 2^23 - 2 is rounded, to the even one of
// two, to multiples of 0.5 below 2^23 and of 1 above: its bits count as codes do up to 4. Those of 2^23 and half the magnitude do
// from 4 on. The lesser of both is right everywhere.
__device__ __forceinline__ u32 nvfp4_codes(const float* x, float first, float second) {
#if HAS_E2M1
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const float factor = i < 4 ? first : second;
        word |= f32_to_e2m1_pair(__fmul_rn(x[i], factor), __fmul_rn(x[i + 1], factor)) << 4 * i;
    }
    return word;
#else
    constexpr float FOUR = 8388608.0f;                      // the sum that is code 4
    constexpr u32 ZEROS = (0x4b000000u - 4) * 0x11111111u;  // eight times the bits of the sum that is code 0
    u32 word = 0, signs = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        const float y = __fmul_rn(fabsf(x[i]), i < 4 ? first : second);
        word = (word << 4) + __float_as_uint(fminf(__fadd_rn(y, FOUR - 2.0f), __fmaf_rn(y, 0.5f, FOUR)));
        signs = __funnelshift_l(__float_as_uint(x[i]), signs, 4);
    }
    return (word - ZEROS) | (signs & 0x88888888u);
#endif
}

// A word of codes of one block.
__device__ __forceinline__ u32 code_word(const float* x, float factor) {
    return READ_BITS == 4 ? nvfp4_codes(x, factor, factor) : fp8_codes(x, factor);
}
