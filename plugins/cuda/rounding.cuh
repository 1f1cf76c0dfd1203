// Stochastic rounding of a 16-bit state. Contract: plugins/rounding.py.
#pragma once
#include "step.cuh"

// Random bits of eight neighbouring elements of a slot's state: word m belongs to elements 2 m (its low half) and 2 m + 1.
struct RandomBits {
    u32 v[4];

    // Philox-4x32-10. `element`: index of the first of them in the state.
    __device__ __forceinline__ RandomBits(u32 seed, u32 position, u32 element) : v{element / 8, position, 0, 0} {
        u32 key0 = seed, key1 = 0;
#pragma unroll
        for (int round = 0; round < 10; ++round) {
            const u64 first = u64(v[0]) * 0xD2511F53u, second = u64(v[2]) * 0xCD9E8D57u;
            const u32 words[4] = {u32(second >> 32) ^ v[1] ^ key0, u32(second), u32(first >> 32) ^ v[3] ^ key1, u32(first)};
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = words[i];
            key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
        }
    }
};

// What the bits of a row's state depend on besides the element; read where it is needed.
struct RandomSource {
    const int* step;
    int row;

    __device__ __forceinline__ RandomBits bits(u32 element) const {
        const int* words = step + i64(row) * STEP_WORDS;
        return RandomBits(words[5], words[3], element);
    }
    // The word of an element and its neighbour.
    __device__ __forceinline__ u32 pair_bits(u32 element) const {
        const RandomBits all = bits(element);
        const bool odd = element & 2, upper = element & 4;
        const u32 first = odd ? all.v[1] : all.v[0], last = odd ? all.v[3] : all.v[2];
        return upper ? last : first;
    }
    // Of one element.
    __device__ __forceinline__ u32 bits_of(u32 element) const {
        const u32 word = pair_bits(element);
        return element % 2 ? word >> 16 : word & 0xffffu;
    }
};

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// x as T, `random` being 16 bits.
template <typename T>
__device__ __forceinline__ T round_at_random(float x, u32 random);
template <>
__device__ __forceinline__ bf16 round_at_random<bf16>(float x, u32 random) {
    return is_finite(x) ? bf16{u16((__float_as_uint(x) + random) >> 16)} : from_float<bf16>(x);
}
template <>
__device__ __forceinline__ fp16 round_at_random<fp16>(float x, u32 random) {
    const float size = fabsf(x);
    if (size < 6.103515625e-05f) {
        // Subnormal numbers are multiples of 2^-24, and their count is their bit pattern.
        const u32 steps = u32(floorf(size * 16777216.0f + float(random) * 1.52587890625e-05f));
        return {u16(steps | (__float_as_uint(x) >> 16 & 0x8000u))};
    }
    return from_float<fp16>(is_finite(x) ? __uint_as_float((__float_as_uint(x) + (random >> 3)) & ~0x1fffu) : x);
}
template <>
__device__ __forceinline__ float round_at_random<float>(float x, u32) {
    return x;
}

// Two elements of T in a register, the first in its low half; `random` is their word of RandomBits.
template <typename T>
__device__ __forceinline__ u32 pack_at_random(float low, float high, u32 random) {
    return round_at_random<T>(low, random & 0xffffu).bits | u32(round_at_random<T>(high, random >> 16).bits) << 16;
}
