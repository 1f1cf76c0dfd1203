// See plugins/cuda/ptx/arithmetic.cuh. What a GPU approximates is exact here; subnormal numbers are 0 where they are there.
#pragma once
#include "ptx/conversions.cuh"

inline float without_subnormals(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
inline float power_of_2(float x) { return without_subnormals(exp2f(without_subnormals(x))); }
inline float inverse_of(float x) { return without_subnormals(1.0f / without_subnormals(x)); }
inline float max_or_nan(float a, float b) { return a != a || b != b ? __uint_as_float(0x7fffffffu) : fmaxf(a, b); }
inline float min_or_nan(float a, float b) { return a != a || b != b ? __uint_as_float(0x7fffffffu) : fminf(a, b); }
inline u32 select_bits(u32 mask, u32 a, u32 b) { return (mask & a) | (~mask & b); }
inline u32 multiply_halves(u32 a, u32 b) {
    return f32_to_f16_pair(f16_to_f32(u16(a)) * f16_to_f32(u16(b)), f16_to_f32(u16(a >> 16)) * f16_to_f32(u16(b >> 16)));
}
