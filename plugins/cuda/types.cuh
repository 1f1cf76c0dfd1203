// Element types and their conversions to and from float, without any header of the CUDA toolkit.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct bf16 {
    u16 bits;
};
struct fp16 {
    u16 bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_float(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
    fp16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

template <typename A, typename B>
struct same_type {
    static constexpr bool value = false;
};
template <typename A>
struct same_type<A, A> {
    static constexpr bool value = true;
};

// A register holds two 16-bit elements, the first in its low half. `high` says which one to widen.
template <typename T>
__device__ __forceinline__ float half_to_float(u32 pair, bool high);
template <>
__device__ __forceinline__ float half_to_float<bf16>(u32 pair, bool high) {
    return __uint_as_float(high ? pair & 0xffff0000u : pair << 16);
}
template <>
__device__ __forceinline__ float half_to_float<fp16>(u32 pair, bool high) {
    return to_float(fp16{u16(high ? pair >> 16 : pair)});
}

template <typename T>
__device__ __forceinline__ u32 pack_pair(float low, float high);
template <>
__device__ __forceinline__ u32 pack_pair<bf16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <>
__device__ __forceinline__ u32 pack_pair<fp16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// N elements that are read and written with accesses as wide as their alignment (16 bytes at most) permits.
template <typename T, int N>
struct alignas(sizeof(T) * N >= 16 ? 16 : sizeof(T) * N) vec {
    T v[N];
};

// The same value, of which the compiler knows nothing: what follows from it is computed where it is used, instead of once
// before all loops, in registers that the state needs.
__device__ __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}
// Of an address: it stays in two registers, and what is added to it is added in bytes.
template <typename T>
__device__ __forceinline__ T* opaque(T* address) {
    asm volatile("" : "+l"(address));
    return address;
}
