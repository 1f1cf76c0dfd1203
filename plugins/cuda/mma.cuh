// Warp-wide matrix products on registers, and the operand layouts built on them.
//
// The order of the contracted index is free as long as both operands agree, which saves every shuffle below: a lane reads
// adjacent elements of a row ("pairs") and names them whatever the instruction wants.
#pragma once
#include "ptx/mma.cuh"
#include "types.cuh"

// d += a b, 16 contracted elements of type T.
template <typename T>
__device__ __forceinline__ void mma_16bit(Accumulator& d, const u32 (&a)[4], u32 b0, u32 b1);
template <>
__device__ __forceinline__ void mma_16bit<bf16>(Accumulator& d, const u32 (&a)[4], u32 b0, u32 b1) {
    mma_bf16(d, a, b0, b1);
}
template <>
__device__ __forceinline__ void mma_16bit<fp16>(Accumulator& d, const u32 (&a)[4], u32 b0, u32 b1) {
    mma_f16(d, a, b0, b1);
}

// The part of x that tf32 holds exactly. x - tf32_part(x) is exact too, and a product of both parts with an operand that tf32
// holds exactly (any 16-bit float) is as good as float32's: 22 of 24 bits.
__device__ __forceinline__ float tf32_part(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
