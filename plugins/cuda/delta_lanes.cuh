// Vectors of key columns spread over the lanes of a warp.
#pragma once
#include "delta_shape.cuh"
#include "lane_sums.cuh"

__device__ __forceinline__ int lane_column(int lane, int i) { return VEC * (lane + 32 * (i / VEC)) + i % VEC; }

// A lane's columns of a row of KEY_DIM elements; zero beyond it.
template <typename T>
__device__ __forceinline__ void load_columns(const T* row, int lane, float (&to)[LANE_COLS]) {
    if constexpr (WIDE) {
#pragma unroll
        for (int i = 0; i < LANE_COLS; i += VEC) load_vector<VEC>(row + lane_column(lane, i), to + i);
    } else {
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) {
            const int column = lane_column(lane, i);
            to[i] = column < KEY_DIM ? to_float(row[column]) : 0.0f;
        }
    }
}
// A query of a warp's lanes as S is to be multiplied by it (plugins/gated_delta.py).
__device__ __forceinline__ void finish_query(float (&q)[LANE_COLS]) {
    float squares[1] = {dot(q, q)};
    sum_all<32>(squares);
    const float scale = rsqrtf(squares[0] + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
#pragma unroll
    for (float& x : q) x *= scale;
}
template <typename T>
__device__ __forceinline__ void store_columns(T* row, int lane, const float (&from)[LANE_COLS]) {
    if constexpr (WIDE) {
#pragma unroll
        for (int i = 0; i < LANE_COLS; i += VEC) store_vector<VEC>(row + lane_column(lane, i), from + i);
    } else {
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) {
            const int column = lane_column(lane, i);
            if (column < KEY_DIM) row[column] = from_float<T>(from[i]);
        }
    }
}
