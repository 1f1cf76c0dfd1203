// Vectors of a lane, and sums over lanes.
#pragma once
#include "ptx/memory.cuh"
#include "types.cuh"

// N neighbouring elements as floats, with one access.
template <int N, typename T>
__device__ __forceinline__ void load_vector(const T* from, float* to) {
    const vec<T, N> loaded = *reinterpret_cast<const vec<T, N>*>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_float(loaded.v[i]);
}
template <int N, typename T>
__device__ __forceinline__ void store_vector(T* to, const float* from) {
    vec<T, N> stored;
#pragma unroll
    for (int i = 0; i < N; ++i) stored.v[i] = from_float<T>(from[i]);
    *reinterpret_cast<vec<T, N>*>(to) = stored;
}

template <int N>
__device__ __forceinline__ float dot(const float (&a)[N], const float (&b)[N]) {
    float sum = a[0] * b[0];
#pragma unroll
    for (int i = 1; i < N; ++i) sum = fmaf(a[i], b[i], sum);
    return sum;
}

// Sums of N values over groups of LANES neighbouring lanes; every lane gets every sum.
template <int LANES, int N>
__device__ __forceinline__ void sum_all(float (&values)[N]) {
#pragma unroll
    for (int offset = LANES / 2; offset; offset /= 2)
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] += __shfl_xor_sync(~0u, values[i], offset);
}

// The same sums with fewer shuffles: each exchange halves the values that a lane still carries. Afterwards `lane` holds,
// in values[0 ... KEPT-1], the sums of values first_kept<LANES, N>(lane) and on. N is a power of two.
template <int LANES, int N>
constexpr int KEPT = N > LANES ? N / LANES : 1;
// Lanes that end with the same sums.
template <int LANES, int N>
constexpr int COPIES = N < LANES ? LANES / N : 1;

template <int LANES, int N>
__device__ __forceinline__ int first_kept(int lane) {
    return lane % LANES / COPIES<LANES, N> * KEPT<LANES, N>;
}

template <int OFFSET, int N>
__device__ __forceinline__ void sum_scattered_from(float* values, int lane) {
    if constexpr (N > 1) {
        const bool upper = lane & OFFSET;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const float kept = upper ? values[i + N / 2] : values[i], given = upper ? values[i] : values[i + N / 2];
            values[i] = kept + __shfl_xor_sync(~0u, given, OFFSET);
        }
        if constexpr (OFFSET > 1) sum_scattered_from<OFFSET / 2, N / 2>(values, lane);
    } else {
        values[0] += __shfl_xor_sync(~0u, values[0], OFFSET);
        if constexpr (OFFSET > 1) sum_scattered_from<OFFSET / 2, 1>(values, lane);
    }
}
template <int LANES, int N>
__device__ __forceinline__ void sum_scattered(float (&values)[N], int lane) {
    sum_scattered_from<LANES / 2, N>(values, lane);
}
