// Conversions between floats of different widths.
#include "runtime.h"

namespace emulator {

namespace {

u32 bits_of(float x) { return same_bits<u32>(x); }
float float_of(u32 bits) { return same_bits<float>(bits); }

// |x| as the code of a narrow float without sign: FRACTION bits of fraction, exponents above BIAS; to the nearest, or to the
// even one. x is a number. The code may be larger than the format has.
template <int FRACTION, int BIAS>
u32 narrow(float x) {
    const u32 size = bits_of(x) & 0x7fffffffu, cut = 23 - FRACTION;
    // Below the smallest normal number codes count the last place of a float in which that place is the subnormals' unit.
    const u32 unit = u32(127 + 24 - BIAS - FRACTION) << 23;
    if (size < u32(128 - BIAS) << 23) return bits_of(float_of(size) + float_of(unit)) - unit;
    return ((size + (1u << (cut - 1)) - 1 + (size >> cut & 1)) >> cut) - (u32(127 - BIAS) << FRACTION);
}

u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

}  // namespace

float from_f16(u16 x) {
    const u32 sign = u32(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) return float_of(sign | bits_of(float(fraction) * 5.9604644775390625e-08f));
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}
u16 to_f16(float x) {
    if (x != x) return 0x7fff;
    return u16(smaller(narrow<10, 15>(x), 0x7c00) | (bits_of(x) >> 16 & 0x8000));
}
u16 to_bf16(float x) {
    if (x != x) return 0x7fff;
    return u16((bits_of(x) + 0x7fff + (bits_of(x) >> 16 & 1)) >> 16);
}

// E4M3 has no infinity, and one magnitude that is not a number.
u16 f16_of_e4m3(u8 code) {
    const u32 sign = u32(code & 0x80) << 8, exponent = code >> 3 & 15, fraction = code & 7;
    if ((code & 0x7f) == 0x7f) return 0x7fff;
    if (exponent == 0) return u16(sign | to_f16(float(fraction) / 512.0f));
    return u16(sign | (exponent + 8) << 10 | fraction << 7);
}
u8 to_e4m3(float x) {
    if (x != x) return 0x7f;
    return u8(smaller(narrow<3, 7>(x), 0x7e) | (bits_of(x) >> 24 & 0x80));
}

// E2M1 has numbers only; what is none becomes the largest.
u16 f16_of_e2m1(u8 code) {
    static const u16 sizes[8] = {0x0000, 0x3800, 0x3c00, 0x3e00, 0x4000, 0x4200, 0x4400, 0x4600};
    return u16(sizes[code & 7] | (code & 8) << 12);
}
u8 to_e2m1(float x) {
    if (x != x) return 7;
    return u8(smaller(narrow<1, 1>(x), 7) | (bits_of(x) >> 28 & 8));
}

}  // namespace emulator
