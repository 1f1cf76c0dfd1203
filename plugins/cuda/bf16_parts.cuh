// Numbers as sums of bfloat16 parts, 8 bits of significand each, for products of more than 8 bits on the tensor cores:
// two parts keep 16 bits, three all 24 of a float. Unlike float16, every part has the exponents of a float.
#pragma once
#include "mma.cuh"

// Two adjacent numbers; part i of both in register i.
template <int N>
struct Parts {
    u32 v[N];
};

template <int N>
__device__ __forceinline__ Parts<N> split_pair(float first, float second) {
    Parts<N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        out.v[i] = pack_pair<bf16>(first, second);
        first -= half_to_float<bf16>(out.v[i], false);
        second -= half_to_float<bf16>(out.v[i], true);
    }
    return out;
}

// Parts that hold a 16-bit element exactly.
template <typename T>
constexpr int EXACT_PARTS = same_type<T, bf16>::value ? 1 : 2;

template <typename T>
__device__ __forceinline__ Parts<EXACT_PARTS<T>> exact_parts(u32 pair) {
    if constexpr (same_type<T, bf16>::value)
        return {{pair}};
    else
        return split_pair<EXACT_PARTS<T>>(half_to_float<T>(pair, false), half_to_float<T>(pair, true));
}

// d += a b, with the products of parts i of a and j of b for which FIRST <= i + j < ORDER; the largest are those of i + j = 0.
template <int FIRST, int ORDER, int NA, int NB>
__device__ __forceinline__ void mma_parts(Accumulator& d, const Parts<NA> (&a)[4], const Parts<NB>& b0, const Parts<NB>& b1) {
#pragma unroll
    for (int i = 0; i < NA; ++i) {
        const u32 part[4] = {a[0].v[i], a[1].v[i], a[2].v[i], a[3].v[i]};
#pragma unroll
        for (int j = 0; j < NB; ++j)
            if (i + j >= FIRST && i + j < ORDER) mma_16bit<bf16>(d, part, b0.v[j], b1.v[j]);
    }
}
