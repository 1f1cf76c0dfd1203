// Matrix products and rearrangements of a warp; see plugins/cuda/ptx/mma.cuh.
#pragma once
#include "runtime.h"

struct Accumulator {
    float v[4];
};

inline void mma_bf16(Accumulator& d, const u32 (&a)[4], u32 b0, u32 b1, PLACE) {
    emulator::MatrixOperands own{d.v, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulator::collective("mma_bf16", emulator::multiply_bf16, ~0u, &own, place);
}
inline void mma_f16(Accumulator& d, const u32 (&a)[4], u32 b0, u32 b1, PLACE) {
    emulator::MatrixOperands own{d.v, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulator::collective("mma_f16", emulator::multiply_f16, ~0u, &own, place);
}
inline void mma_tf32(Accumulator& d, const float (&a)[4], float b0, float b1, PLACE) {
    emulator::MatrixOperands own{d.v, {}, {}};
    memcpy(own.a, a, sizeof(own.a));
    memcpy(own.b, &b0, sizeof(b0)), memcpy(own.b + 1, &b1, sizeof(b1));
    emulator::collective("mma_tf32", emulator::multiply_tf32, ~0u, &own, place);
}
inline u32 transpose_8x8(u32 pair, PLACE) {
    emulator::collective("transpose_8x8", emulator::transpose, ~0u, &pair, place);
    return pair;
}

struct Matrices {
    u32 v[4];
};
inline Matrices load_matrices(const void* row, PLACE) {
    emulator::RowOperands own{row, {}, place};
    emulator::collective("load_matrices", emulator::load_rows, ~0u, &own, place);
    return {{own.v[0], own.v[1], own.v[2], own.v[3]}};
}
inline Matrices load_transposed_matrices(const void* row, PLACE) {
    emulator::RowOperands own{row, {}, place};
    emulator::collective("load_transposed_matrices", emulator::load_transposed_rows, ~0u, &own, place);
    return {{own.v[0], own.v[1], own.v[2], own.v[3]}};
}
