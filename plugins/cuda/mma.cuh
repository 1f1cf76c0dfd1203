// Warp-wide matrix products on registers (mma.sync) and the operand layouts built on them.
//
// Lane = 4 g + t. An m16n8 accumulator holds rows g and g + 8, columns 2t and 2t + 1: {g,2t}, {g,2t+1}, {g+8,2t}, {g+8,2t+1}.
// The order of the contracted index is free as long as both operands agree, which saves every shuffle below: a lane reads
// adjacent elements of a row ("pairs") and names them whatever the instruction wants.
#pragma once
#include "types.cuh"

struct Accumulator {
    float v[4];
};

// d += a b, 16 contracted elements of 16 bits.
template <typename T>
__device__ __forceinline__ void mma_16bit(Accumulator& d, const u32 (&a)[4], u32 b0, u32 b1);
template <>
__device__ __forceinline__ void mma_16bit<bf16>(Accumulator& d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16bit<fp16>(Accumulator& d, const u32 (&a)[4], u32 b0, u32 b1) {
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

// The part of x that tf32 holds exactly. x - tf32_part(x) is exact too, and a product of both parts with an operand that tf32
// holds exactly (any 16-bit float) is as good as float32's: 22 of 24 bits.
__device__ __forceinline__ float tf32_part(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// Transposes the 8 x 8 matrix of 16-bit elements of which a lane holds row g, columns 2t and 2t + 1.
__device__ __forceinline__ u32 transpose_8x8(u32 pair) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}
