// Numbers as sums of two tf32 parts, for products of float32's size on the tensor cores.
#pragma once
#include "mma.cuh"

// Both tf32 parts of an operand.
struct Split {
    float high[4], low[4];

    __device__ __forceinline__ Split(float a0, float a1, float a2, float a3) {
        const float a[4] = {a0, a1, a2, a3};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high[i] = tf32_part(a[i]);
            low[i] = a[i] - high[i];
        }
    }
};

// Products of tf32 parts: those with a lower part, and those of the upper ones. EXACT: b has no lower part.
template <bool EXACT>
__device__ __forceinline__ void add_lower(Accumulator& sum, const Split& a, float b0, float b1) {
    const float high0 = EXACT ? b0 : tf32_part(b0), high1 = EXACT ? b1 : tf32_part(b1);
    mma_tf32(sum, a.low, high0, high1);
    if constexpr (!EXACT) mma_tf32(sum, a.high, b0 - high0, b1 - high1);
}
template <bool EXACT>
__device__ __forceinline__ void add_upper(Accumulator& sum, const Split& a, float b0, float b1) {
    mma_tf32(sum, a.high, EXACT ? b0 : tf32_part(b0), EXACT ? b1 : tf32_part(b1));
}

// Long sums keep both apart.
struct Sum {
    Accumulator upper, rest;

    template <bool EXACT>
    __device__ __forceinline__ void add(const Split& a, float b0, float b1) {
        add_lower<EXACT>(rest, a, b0, b1);
        add_upper<EXACT>(upper, a, b0, b1);
    }
    __device__ __forceinline__ float get(int e) const { return upper.v[e] + rest.v[e]; }
};
