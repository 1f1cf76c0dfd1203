// Matrices of 16-bit elements in shared memory, in units of 16 bytes that are exchanged within their row so that two kinds of
// access meet no bank twice: eight rows at one unit (transposed fragments), and two rows at four units (rows in order).
#pragma once
#include "ptx/mma.cuh"

constexpr int UNIT = 8;  // elements

// Where a unit of a row of UNITS units lies, in units.
template <int UNITS>
__device__ __forceinline__ u32 unit_at(u32 row, u32 unit) {
    const u32 turn = UNITS == 2 ? row >> 2 & 1 : ((row & 1) << 2 | (row >> 1 & 3)) & (UNITS - 1);
    return row * UNITS + (unit ^ turn);
}

__device__ __forceinline__ uint4 load_unit(const void* units, u32 at) { return static_cast<const uint4*>(units)[at]; }

// A 16 x 16 block of a matrix, transposed: with lane = 4 g + t, v[2 m + h] holds rows 8 h + 2 t and 8 h + 2 t + 1 of column
// 8 m + g. `first` is the block's first row, `unit` its first unit.
template <int UNITS>
__device__ __forceinline__ Matrices load_transposed(const void* units, u32 first, u32 unit, u32 lane) {
    const u32 row = first + lane % 16, at = unit_at<UNITS>(row, unit + lane / 16);
    return load_transposed_matrices(static_cast<const uint4*>(units) + at);
}
