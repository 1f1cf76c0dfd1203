// Products of matrices that a warp holds in its registers, and how matrices of 16-bit elements come there.
//
// Lane = 4 g + t. An m16n8 accumulator holds rows g and g + 8, columns 2t and 2t + 1: {g,2t}, {g,2t+1}, {g+8,2t}, {g+8,2t+1}.
#pragma once
#include "ptx/memory.cuh"

struct Accumulator {
    float v[4];
};

// d += a b, 16 contracted elements of 16 bits.
__device__ __forceinline__ void mma_bf16(Accumulator& d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_f16(Accumulator& d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d += a b, 8 contracted elements of tf32: float32 of which the instruction reads the leading 11 bits of the significand.
__device__ __forceinline__ void mma_tf32(Accumulator& d, const float (&a)[4], float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// Transposes the 8 x 8 matrix of 16-bit elements of which a lane holds row g, columns 2t and 2t + 1.
__device__ __forceinline__ u32 transpose_8x8(u32 pair) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// Four 8 x 8 matrices of 16-bit elements: columns 2t and 2t + 1 of row g of matrix m in v[m].
struct Matrices {
    u32 v[4];
};

// From shared memory. `row`, of lane 8 m + i: row i of matrix m.
__device__ __forceinline__ Matrices load_matrices(const void* row) {
    Matrices out;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.v[0]), "=r"(out.v[1]), "=r"(out.v[2]), "=r"(out.v[3])
                 : "r"(shared_address(row))
                 : "memory");
    return out;
}
// The same matrices, transposed.
__device__ __forceinline__ Matrices load_transposed_matrices(const void* row) {
    Matrices out;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.v[0]), "=r"(out.v[1]), "=r"(out.v[2]), "=r"(out.v[3])
                 : "r"(shared_address(row))
                 : "memory");
    return out;
}
