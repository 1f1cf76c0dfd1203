// Scalar functions of the gates, in float32.
#pragma once
#include "ptx/arithmetic.cuh"
#include "types.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

// log(1 + e^x), which is x to float precision above 20.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
// log(1 + e^x) with few instructions and no branch: log(1 + t) = 2 atanh(t / (2 + t)) for t = e^-|x| <= 1, as its series.
__device__ __forceinline__ float short_softplus(float x) {
    const float t = power_of_2(-LOG2_E * fabsf(x)), s = t * inverse_of(2.0f + t), square = s * s;
    float series = 2.0f / 13.0f;
#pragma unroll
    for (int n = 11; n > 0; n -= 2) series = fmaf(series, square, 2.0f / n);
    return fmaxf(x, 0.0f) + s * series;
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
// Of these, and of silu and softplus, what is not a number stays so.
__device__ __forceinline__ float clamped(float x, float low, float high) { return min_or_nan(max_or_nan(x, low), high); }
__device__ __forceinline__ float positive_part(float x) { return max_or_nan(x, 0.0f); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}
