// The left operand of products with the read copy (delta_copy_read.cuh): codes and scales as float16.
#pragma once
#include "delta_copy_shape.cuh"
#include "ptx/arithmetic.cuh"

// Eight codes as four pairs of float16; those of E2M1, without an instruction for it, times 2^-14: their lower three bits become
// the lowest of the exponent and the highest of the fraction, even ones first.
__device__ __forceinline__ void widen(const u32* words, u32 (&pairs)[4]) {
    if constexpr (READ_BITS == 8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = from_e4m3_pair(u16(words[i / 2] >> i % 2 * 16));
    } else {
        const u32 word = words[0];
#if HAS_E2M1
        from_e2m1_word(pairs, word);
#else
        constexpr u32 MAGNITUDES = 0x0e0e0e0eu;
        const u32 signs = select_bits(0x88888888u, word, 0);  // for both: an operator would be repeated behind the shift
        const u32 even = select_bits(MAGNITUDES, word << 1, signs << 4), odd = select_bits(MAGNITUDES, word >> 3, signs);
        pairs[0] = __byte_perm(even, 0, 0x1404), pairs[1] = __byte_perm(even, 0, 0x3424);
        pairs[2] = __byte_perm(odd, 0, 0x1404), pairs[3] = __byte_perm(odd, 0, 0x3424);
#endif
    }
}
constexpr float CODE_UNIT = READ_BITS == 4 && !HAS_E2M1 ? 16384.0f : 1.0f;

__device__ __forceinline__ float scale_of(u8 code) {
    if constexpr (READ_BITS == 8) return fp8_scale_value(code);
    else return from_e4m3(code);
}
// A row's E4M3 scales as float16, of which both halves of a pair are multiplied by one.
__device__ __forceinline__ u32 widen_scales(const vec<u8, LANE_SCALES>& codes) {
    return from_e4m3_pair(LANE_SCALES == 2 ? *reinterpret_cast<const u16*>(codes.v) : u16(codes.v[0]));
}
__device__ __forceinline__ u32 times_half(u32 pair, u32 factors, int s) {
    return multiply_halves(pair, __byte_perm(factors, 0, s ? 0x3232 : 0x1010));
}
