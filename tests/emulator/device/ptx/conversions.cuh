// Conversions between floats of different widths; see plugins/cuda/ptx/conversions.cuh.
#pragma once
#include "runtime.h"

inline float f16_to_f32(u16 x) { return emulator::from_f16(x); }
inline u16 f32_to_f16(float x) { return emulator::to_f16(x); }
inline u16 f32_to_bf16(float x) { return emulator::to_bf16(x); }
inline u32 f32_to_f16_pair(float low, float high) { return emulator::to_f16(low) | u32(emulator::to_f16(high)) << 16; }
inline u32 f32_to_bf16_pair(float low, float high) { return emulator::to_bf16(low) | u32(emulator::to_bf16(high)) << 16; }

inline u32 to_e4m3_pair(float low, float high) { return emulator::to_e4m3(low) | u32(emulator::to_e4m3(high)) << 8; }
inline u32 from_e4m3_pair(u16 pair) {
    return emulator::f16_of_e4m3(u8(pair)) | u32(emulator::f16_of_e4m3(u8(pair >> 8))) << 16;
}
inline void from_e4m3_word(u32& low, u32& high, u32 word) {
    low = from_e4m3_pair(u16(word)), high = from_e4m3_pair(u16(word >> 16));
}

inline u32 f32_to_e2m1_pair(float low, float high) { return emulator::to_e2m1(low) | u32(emulator::to_e2m1(high)) << 4; }
inline void from_e2m1_word(u32* pairs, u32 word) {
    for (int i = 0; i < 4; ++i)
        pairs[i] = emulator::f16_of_e2m1(word >> 8 * i & 15) | u32(emulator::f16_of_e2m1(word >> (8 * i + 4) & 15)) << 16;
}
