// Conversions between floats of different widths, rounding to the nearest, and to even between two. Of two elements in a
// register, the first is in the low half.
#pragma once
#include "integers.cuh"

__device__ __forceinline__ float f16_to_f32(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ u16 f32_to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u16 f32_to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 f32_to_f16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u32 f32_to_bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// ---- E4M3 ------------------------------------------------------------------------------------------------------------

// Codes of two floats, that of `low` in the lower byte; 448 for what is larger.
__device__ __forceinline__ u32 to_e4m3_pair(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
// Two float16 of the two codes in `pair`.
__device__ __forceinline__ u32 from_e4m3_pair(u16 pair) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
// Float16 of the four codes of a word. A conversion takes either half of a register as it is.
__device__ __forceinline__ void from_e4m3_word(u32& low, u32& high, u32 word) {
    asm("{\n"
        ".reg .b16 first, second;\n"
        "mov.b32 {first, second}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, first;\n"
        "cvt.rn.f16x2.e4m3x2 %1, second;\n"
        "}\n"
        : "=r"(low), "=r"(high)
        : "r"(word));
}

// ---- E2M1: instructions of the variants of compute capability 10 that are specific to an architecture ----------------

// Codes of two floats, that of `low` in the lower four bits; 6 for what is larger.
__device__ __forceinline__ u32 f32_to_e2m1_pair(float low, float high) {
    u16 pair;
    asm("{\n"
        ".reg .b8 codes, zero;\n"
        "cvt.rn.satfinite.e2m1x2.f32 codes, %1, %2;\n"
        "mov.b16 %0, {codes, zero};\n"
        "}\n"
        : "=h"(pair)
        : "f"(high), "f"(low));
    return pair & 0xffu;
}
// Float16 of the eight codes of a word, in their order, in four registers.
__device__ __forceinline__ void from_e2m1_word(u32* pairs, u32 word) {
    asm("{\n"
        ".reg .b8 byte<4>;\n"
        "mov.b32 {byte0, byte1, byte2, byte3}, %4;\n"
        "cvt.rn.f16x2.e2m1x2 %0, byte0;\n"
        "cvt.rn.f16x2.e2m1x2 %1, byte1;\n"
        "cvt.rn.f16x2.e2m1x2 %2, byte2;\n"
        "cvt.rn.f16x2.e2m1x2 %3, byte3;\n"
        "}\n"
        : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
        : "r"(word));
}
