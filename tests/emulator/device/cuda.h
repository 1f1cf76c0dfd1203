// CUDA C++ for a host compiler, as far as plugins/cuda speaks it.
#pragma once
#include <math.h>
#include <string.h>

#include "runtime.h"

// ---- declarations ----------------------------------------------------------------------------------------------------

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// GNU attributes may stand behind __shared__, where the language's own may not.
#define alignas(n) __attribute__((aligned(n)))
// A kernel has no other variables that outlive a function: what the linker calls .bss is the block's shared memory.
#define __shared__ static

#define threadIdx ::emulator::thread_index
#define blockIdx ::emulator::block_index
#define blockDim ::emulator::block_dim
#define gridDim ::emulator::grid_dim

struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

// ---- arithmetic ------------------------------------------------------------------------------------------------------

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a < b ? b : a; }
inline i64 min(i64 a, i64 b) { return a < b ? a : b; }
inline i64 max(i64 a, i64 b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline u32 __float_as_uint(float x) { return same_bits<u32>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __uint_as_float(u32 x) { return same_bits<float>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
// To the nearest, 0 of what is not a number, the last one of what is beyond all integers.
inline int __float2int_rn(float x) {
    return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x <= -2147483648.0f ? -2147483647 - 1 : int(rintf(x));
}

inline int __popc(u32 x) { return __builtin_popcount(x); }
// The upper word of high:low, shifted left.
inline u32 __funnelshift_l(u32 low, u32 high, u32 shift) {
    return u32(((u64(high) << 32 | low) << (shift & 31)) >> 32);
}
// Byte i of the result is that byte of y:x which digit i of the selector names.
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    const u64 bytes = u64(y) << 32 | x;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) out |= u32(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}

template <typename T>
inline T atomicAdd(T* at, T x) {
    const T before = *at;
    *at = before + x;
    return before;
}
template <typename T>
inline T atomicMax(T* at, T x) {
    const T before = *at;
    if (x > before) *at = x;
    return before;
}

// ---- warps -----------------------------------------------------------------------------------------------------------

// `from`: the lane that is read, of the reader's `width` lanes; the reader's own where there is none.
template <typename T>
struct Shuffle {
    T given, received;
    int from;

    static void apply(void* const (&operands)[32], u32 mask) {
        for (int lane = 0; lane < 32; ++lane) {
            if (!(mask >> lane & 1)) continue;
            auto& own = *static_cast<Shuffle*>(operands[lane]);
            // Of a lane that takes no part: anything.
            if (mask >> own.from & 1)
                own.received = static_cast<Shuffle*>(operands[own.from])->given;
            else
                memset(&own.received, 0xff, sizeof(T));
        }
    }
};
template <typename T>
inline T shuffle(const char* name, u32 mask, T value, int from, emulator::Place place) {
    Shuffle<T> own{value, value, from};
    emulator::collective(name, Shuffle<T>::apply, mask, &own, place);
    return own.received;
}
inline int lane_index() { return int(threadIdx.x % 32); }
template <typename T>
inline T __shfl_sync(u32 mask, T value, int from, int width = 32, PLACE) {
    return shuffle("__shfl_sync", mask, value, (lane_index() & -width) | (from & (width - 1)), place);
}
template <typename T>
inline T __shfl_xor_sync(u32 mask, T value, int with, int width = 32, PLACE) {
    const int lane = lane_index(), from = lane ^ with;
    return shuffle("__shfl_xor_sync", mask, value, from < (lane & -width) + width ? from : lane, place);
}
template <typename T>
inline T __shfl_up_sync(u32 mask, T value, u32 by, int width = 32, PLACE) {
    const int lane = lane_index(), from = lane - int(by);
    return shuffle("__shfl_up_sync", mask, value, from >= (lane & -width) ? from : lane, place);
}
template <typename T>
inline T __shfl_down_sync(u32 mask, T value, u32 by, int width = 32, PLACE) {
    const int lane = lane_index(), from = lane + int(by);
    return shuffle("__shfl_down_sync", mask, value, from < (lane & -width) + width ? from : lane, place);
}

inline void meet_lanes(void* const (&)[32], u32) {}
inline void __syncwarp(u32 mask = ~0u, PLACE) { emulator::collective("__syncwarp", meet_lanes, mask, nullptr, place); }

inline void gather_votes(void* const (&operands)[32], u32 mask) {
    u32 votes = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && *static_cast<u32*>(operands[lane])) votes |= 1u << lane;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) *static_cast<u32*>(operands[lane]) = votes;
}
inline u32 __ballot_sync(u32 mask, bool vote, PLACE) {
    u32 own = vote;
    emulator::collective("__ballot_sync", gather_votes, mask, &own, place);
    return own;
}
inline void find_largest(void* const (&operands)[32], u32 mask) {
    u32 largest = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) largest = max(largest, *static_cast<u32*>(operands[lane]));
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) *static_cast<u32*>(operands[lane]) = largest;
}
inline u32 __reduce_max_sync(u32 mask, u32 value, PLACE) {
    emulator::collective("__reduce_max_sync", find_largest, mask, &value, place);
    return value;
}

// ---- blocks ----------------------------------------------------------------------------------------------------------

inline void __syncthreads(PLACE) { emulator::sync_block(0, 0, false, place); }
inline int __syncthreads_count(int vote, PLACE) { return emulator::sync_block(0, 0, vote != 0, place); }
// Fibers of one thread see each other's stores at once.
inline void __threadfence_block() {}
