// Loads and stores of a lane's share of a row, in the order of mma.cuh.
//
// A row is read in blocks of 32 columns. Of a block, lane t of a quad owns four pairs of adjacent columns, so that a quad
// touches 64 contiguous bytes of the state with 16 bytes a lane:
//     2-byte state: pair m = columns 8 t + 2 m
//     4-byte state: pair m = columns 16 (m / 2) + 4 t + 2 (m % 2)
// Rows of activations that meet the state (B, C) are read in the same order, whatever their own width.
#pragma once
#include "ptx/memory.cuh"
#include "types.cuh"

struct Pairs {
    u32 v[4];
};

// Four pairs of 16-bit elements of block `block`; WIDE when the state has 4-byte elements.
template <bool WIDE>
__device__ __forceinline__ Pairs load_pairs(const void* row, int block, int t) {
    Pairs out;
    if constexpr (WIDE) {
        const uint2* at = reinterpret_cast<const uint2*>(static_cast<const u16*>(row) + 32 * block + 4 * t);
        const uint2 first = at[0], second = at[4];
        out = {first.x, first.y, second.x, second.y};
    } else {
        const uint4 all = *reinterpret_cast<const uint4*>(static_cast<const u16*>(row) + 32 * block + 8 * t);
        out = {all.x, all.y, all.z, all.w};
    }
    return out;
}

template <bool WIDE>
__device__ __forceinline__ void store_pairs(void* row, int block, int t, const Pairs& pairs) {
    if constexpr (WIDE) {
        uint2* at = reinterpret_cast<uint2*>(static_cast<u16*>(row) + 32 * block + 4 * t);
        at[0] = {pairs.v[0], pairs.v[1]};
        at[4] = {pairs.v[2], pairs.v[3]};
    } else {
        uint4* at = reinterpret_cast<uint4*>(static_cast<u16*>(row) + 32 * block + 8 * t);
        *at = {pairs.v[0], pairs.v[1], pairs.v[2], pairs.v[3]};
    }
}

// A lane's four pairs of one row and block of the state, as stored. UPDATE: it is loaded to be written back at once.
template <typename T>
struct StatePairs {
    static constexpr int WORDS = 2 * sizeof(T);
    u32 v[WORDS];

    template <bool UPDATE>
    __device__ __forceinline__ void load(const T* row, int block, int t) {
#pragma unroll
        for (int part = 0; part < WORDS / 4; ++part) {
            const T* at = row + 32 * block + (WORDS == 8 ? 16 * part + 4 * t : 8 * t);
            const uint4 word = UPDATE ? load_16_bytes(at) : stream_16_bytes(at);
            v[4 * part] = word.x, v[4 * part + 1] = word.y, v[4 * part + 2] = word.z, v[4 * part + 3] = word.w;
        }
    }
    // Stores pairs 2 half and 2 half + 1 as far as they complete 16 bytes: those of a 2-byte state wait for half 1.
    __device__ __forceinline__ void store_half(T* row, int block, int half, int t) const {
        if (WORDS == 4 && half == 0) return;
        T* at = row + 32 * block + (WORDS == 8 ? 16 * half + 4 * t : 8 * t);
        const int first = WORDS == 8 ? 4 * half : 0;
        store_16_bytes(at, {v[first], v[first + 1], v[first + 2], v[first + 3]});
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) v[i] = 0;
    }
    // Makes the values opaque to the compiler here, at no cost.
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) v[i] = opaque(v[i]);
    }
    // Element e (0 or 1) of pair m.
    __device__ __forceinline__ float get(int m, int e) const {
        if constexpr (WORDS == 8)
            return __uint_as_float(v[2 * m + e]);
        else
            return half_to_float<T>(v[m], e);
    }
    __device__ __forceinline__ void set(int m, float first, float second) {
        if constexpr (WORDS == 8)
            v[2 * m] = __float_as_uint(first), v[2 * m + 1] = __float_as_uint(second);
        else
            v[m] = pack_pair<T>(first, second);
    }
};
