// Element types and their conversions to and from float, without any header of the CUDA toolkit.
#pragma once
#include "ptx/conversions.cuh"
#include "ptx/opaque.cuh"

struct bf16 {
    u16 bits;
};
struct fp16 {
    u16 bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_float(fp16 x) { return f16_to_f32(x.bits); }

// The same of what has been loaded ahead: not before the program comes here, since it would wait for memory there.
template <typename T>
__device__ __forceinline__ float late_float(T x) {
    return to_float(T{opaque_16_bits(x.bits)});
}
__device__ __forceinline__ float late_float(float x) { return x; }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
    return {f32_to_bf16(x)};
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
    return {f32_to_f16(x)};
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
    return f32_to_bf16_pair(low, high);
}
template <>
__device__ __forceinline__ u32 pack_pair<fp16>(float low, float high) {
    return f32_to_f16_pair(low, high);
}

// The same rounding as from_float's by the instruction that packs two elements, of which more are done at a time than of that for one.
template <typename T>
__device__ __forceinline__ T round_quickly(float x) {
    return {u16(pack_pair<T>(x, 0.0f))};
}

// N elements that are read and written with accesses as wide as their alignment (16 bytes at most) permits.
template <typename T, int N>
struct alignas(sizeof(T) * N >= 16 ? 16 : (sizeof(T) * N & -(sizeof(T) * N))) vec {
    T v[N];
};
