// Arithmetic that CUDA C++ has no name for without a header of the toolkit.
#pragma once
#include "integers.cuh"

// 2^x to some 22 bits; 0 instead of subnormal numbers.
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1 / x for x of ordinary size, with one unit in the last place.
__device__ __forceinline__ float inverse_of(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The larger one; what is not a number wins.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}
// The smaller one; what is not a number wins.
__device__ __forceinline__ float min_or_nan(float a, float b) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
}
// Bits of `a` where `mask` has ones, and of `b` where it has zeros, in one instruction.
__device__ __forceinline__ u32 select_bits(u32 mask, u32 a, u32 b) {
    u32 selected;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(selected) : "r"(mask), "r"(a), "r"(b));
    return selected;
}
// Products of two pairs of float16.
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
