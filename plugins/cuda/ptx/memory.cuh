// Loads and stores that stand where they are written, with the width they are written with. Addresses are multiples of it.
#pragma once
#include "integers.cuh"

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// ---- global memory ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_16_bytes(const void* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
__device__ __forceinline__ uint2 load_8_bytes(const void* at) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
__device__ __forceinline__ u32 load_4_bytes(const void* at) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
__device__ __forceinline__ u16 load_2_bytes(const void* at) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}

// What is read once need not stay in any cache. A warp reads a row in pieces of 64 bytes; the L2 cache is told to fetch 256 at
// once. Of data that is written back at once such hints cost time: half of the traffic is writes.
__device__ __forceinline__ uint4 stream_16_bytes(const void* at) {
    uint4 v;
    asm volatile("ld.global.cs.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
__device__ __forceinline__ uint2 stream_8_bytes(const void* at) {
    uint2 v;
    asm volatile("ld.global.cs.L2::256B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
__device__ __forceinline__ u32 stream_4_bytes(const void* at) {
    u32 v;
    asm volatile("ld.global.cs.L2::256B.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ void store_16_bytes(void* at, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_8_bytes(void* at, uint2 v) {
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(at), "r"(v.x), "r"(v.y) : "memory");
}

// Brings a line of 128 bytes into the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// ---- shared memory ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint2 load_shared_8_bytes(const void* at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared_address(at)) : "memory");
    return v;
}
