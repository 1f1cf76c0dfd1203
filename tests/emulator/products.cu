// Matrix instructions and conversions, one each, for the tests of the emulator.
#include "ptx/mma.cuh"
#include "types.cuh"

#define KERNEL extern "C" __global__ void

// d [16, 8] = c + a b, a [16, K] in rows and b [K, 8] in columns: 32-bit registers as the instruction's tables say.
KERNEL multiply(const u32* a, const u32* b, const float* c, float* d) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    Accumulator sum;
    for (int i = 0; i < 4; ++i) sum.v[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
    u32 left[4], right[2];
    for (int i = 0; i < 4; ++i) left[i] = a[(g + i % 2 * 8) * 8 + i / 2 * 4 + t];
    for (int i = 0; i < 2; ++i) right[i] = b[g * 8 + i * 4 + t];
#if KIND == 0
    mma_bf16(sum, left, right[0], right[1]);
#elif KIND == 1
    mma_f16(sum, left, right[0], right[1]);
#else
    float rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = __uint_as_float(left[i]);
    mma_tf32(sum, rows, __uint_as_float(right[0]), __uint_as_float(right[1]));
#endif
    for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum.v[i];
}

// Four matrices of 8 x 8, as they are and transposed, by each of the instructions.
KERNEL rearrange(const u16* in, u16* plain, u16* transposed, u16* moved) {
    __shared__ __align__(16) u16 rows[32][8];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i) rows[lane][i] = in[lane * 8 + i];
    __syncwarp();
    const Matrices straight = load_matrices(rows[lane]), turned = load_transposed_matrices(rows[lane]);
    for (int m = 0; m < 4; ++m)
        for (int e = 0; e < 2; ++e) {
            const int at = m * 64 + g * 8 + 2 * t + e;
            plain[at] = u16(straight.v[m] >> 16 * e);
            transposed[at] = u16(turned.v[m] >> 16 * e);
            moved[at] = u16(transpose_8x8(straight.v[m]) >> 16 * e);
        }
}

// Of `count` floats: their narrow codes.
KERNEL narrow(const float* in, int count, u16* f16, u16* bf16s, u8* e4m3, u8* e2m1) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        f16[i] = f32_to_f16(in[i]), bf16s[i] = f32_to_bf16(in[i]);
        e4m3[i] = u8(to_e4m3_pair(in[i], 0.0f)), e2m1[i] = u8(f32_to_e2m1_pair(in[i], 0.0f));
    }
}

// Of all codes: their values.
KERNEL widen(float* f16, float* e4m3, float* e2m1) {
    for (int i = threadIdx.x; i < 65536; i += blockDim.x) f16[i] = f16_to_f32(u16(i));
    for (int i = threadIdx.x; i < 256; i += blockDim.x) e4m3[i] = f16_to_f32(u16(from_e4m3_pair(u16(i << 8)) >> 16));
    u32 pairs[4];
    from_e2m1_word(pairs, 0x01234567u);
    if (threadIdx.x == 0)
        for (int i = 0; i < 8; ++i) e2m1[i] = f16_to_f32(u16(pairs[i / 2] >> 16 * (i % 2)));
}
