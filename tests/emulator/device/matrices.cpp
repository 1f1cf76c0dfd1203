// Matrix products and rearrangements of a warp. Lane = 4 g + t; layouts: PTX ISA, "Matrix Fragments for mma.m16n8k8" and
// "mma.m16n8k16".
#include <string.h>

#include "runtime.h"

namespace emulator {

namespace {

// Tensor cores cut a sum off where its float ends (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021).
float truncated(double x) {
    float y = float(x);
    if (__builtin_fabs(double(y)) > __builtin_fabs(x)) {
        y = same_bits<float>(same_bits<u32>(y) - 1);
    }
    return y;
}

// d [16, 8] += a [16, K] b [K, 8]. Of the operands, `widen(word, half)` is the number in a half of a register, or in all of it;
// a register has PER_WORD of them, neighbours along K.
template <int K, int PER_WORD, typename Widen>
void multiply(void* const (&operands)[32], Widen widen) {
    double a[16][K], b[K][8];
    constexpr int STEP = 4 * PER_WORD;  // columns of a that its first two registers hold
    for (int lane = 0; lane < 32; ++lane) {
        const auto& own = *static_cast<const MatrixOperands*>(operands[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int e = 0; e < PER_WORD; ++e) {
            for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][i / 2 * STEP + t * PER_WORD + e] = widen(own.a[i], e);
            for (int i = 0; i < 2; ++i) b[i * STEP + t * PER_WORD + e][g] = widen(own.b[i], e);
        }
    }
    double sums[16][8] = {};
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < K; ++k)
            for (int column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; ++lane) {
        float* d = static_cast<const MatrixOperands*>(operands[lane])->d;
        for (int i = 0; i < 4; ++i) d[i] = truncated(double(d[i]) + sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
}

// Element [row][column] of matrix m, as the lanes have named its rows.
u16 element(void* const (&operands)[32], int m, int row, int column) {
    u16 values[8];
    memcpy(values, static_cast<const RowOperands*>(operands[8 * m + row])->row, sizeof(values));
    return values[column];
}

template <bool TRANSPOSED>
void load(void* const (&operands)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
        const auto& own = *static_cast<const RowOperands*>(operands[lane]);
        check_shared(own.row, 16, own.place), check_aligned(own.row, 16, own.place);
    }
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int m = 0; m < 4; ++m) {
            u32 pair[2];
            for (int e = 0; e < 2; ++e)
                pair[e] = TRANSPOSED ? element(operands, m, 2 * t + e, g) : element(operands, m, g, 2 * t + e);
            static_cast<RowOperands*>(operands[lane])->v[m] = pair[0] | pair[1] << 16;
        }
    }
}

}  // namespace

void multiply_bf16(void* const (&operands)[32], u32) {
    multiply<16, 2>(operands, [](u32 word, int half) { return same_bits<float>(half ? word & 0xffff0000u : word << 16); });
}
void multiply_f16(void* const (&operands)[32], u32) {
    multiply<16, 2>(operands, [](u32 word, int half) { return from_f16(u16(half ? word >> 16 : word)); });
}
void multiply_tf32(void* const (&operands)[32], u32) {
    multiply<8, 1>(operands, [](u32 word, int) { return same_bits<float>(word & 0xffffe000u); });
}

void load_rows(void* const (&operands)[32], u32) { load<false>(operands); }
void load_transposed_rows(void* const (&operands)[32], u32) { load<true>(operands); }

void transpose(void* const (&operands)[32], u32) {
    u16 matrix[8][8];
    for (int lane = 0; lane < 32; ++lane) memcpy(&matrix[lane / 4][lane % 4 * 2], operands[lane], 4);
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        *static_cast<u32*>(operands[lane]) = matrix[2 * t][g] | u32(matrix[2 * t + 1][g]) << 16;
    }
}

}  // namespace emulator
