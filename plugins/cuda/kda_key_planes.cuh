// Keys of a chunk of Kimi Delta Attention as a fold has them: a thread has one channel of all 16 entries, so that the decays between them
// are products of its registers. Warps bring what they multiply with each other through planes of 8 entries in shared memory.
#pragma once
#include "delta_pairs.cuh"

// Parts of bfloat16 that are enough for what becomes state.
constexpr int FOLD_PARTS = sizeof(STATE) == 2 ? 2 : 3;

// Of 32 channels: a row of 16 bytes each.
typedef bf16 KeyPlane[32][8];

// In bfloat16 parts, of the block's channels: as first or second operand, by either kind of ldmatrix, with columns 4 t and 4 t + 1 of every
// 16 first, then the others.
struct alignas(16) KeyPlanes {
    KeyPlane v[WARPS][FOLD_PARTS][2];  // entries 0 ... 7 and 8 ... 15

    // The row of a channel of 32: threads that store neighbours, and lanes that load what is first, meet in no bank.
    __device__ static constexpr int row(int channel) {
        return (channel & 24) | ((channel ^ channel / 4) & 2) * 2 | (channel & 4) / 2 | (channel & 1);
    }
    // For ldmatrix, from the first row of a block of 16 channels: row `at` of 8 of its first (0) or other (1) channels in either half.
    __device__ static int offset(int half, int others, int at) {
        return opaque((half * 32 + row(at / 2 * 4 + others * 2 + at % 2)) * 8);
    }
    // That row of block p.
    __device__ __forceinline__ const bf16* block(int p, int part) const { return v[p / 2][part][0][p % 2 * 16]; }
};

// Eight entries of a channel into planes of parts.
template <int PARTS>
__device__ __forceinline__ void store_planes(const float (&x)[8], KeyPlane* planes, int pitch, int row) {
    Parts<PARTS> pairs[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) pairs[n] = split_pair<PARTS>(x[2 * n], x[2 * n + 1]);
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
        *reinterpret_cast<uint4*>(planes[p * pitch][row]) = {pairs[0].v[p], pairs[1].v[p], pairs[2].v[p], pairs[3].v[p]};
}

// The decays of a thread's channel within runs of entries: `until` from a run's start through an entry, `behind` from behind it to the
// run's end. No ratio of decays is formed. Two entries differ first in one bit of their index, b: j has it not, i has it, and between
// them lies the boundary of two neighbouring runs of b entries. Then exp(G_i - G_j) is the decay from the boundary through i times that
// from behind j to the boundary.
struct ChannelRuns {
    float k[16], until[16], behind[16];

    // Entry n of the 8 that have bit b, or have it not.
    __device__ static constexpr int entry(int n, int b, bool has) { return n / b * 2 * b + n % b + (has ? b : 0); }

    // Keys with decays to or from the boundary. Here and below products are rounded before their parts are taken: fused with a part's
    // subtraction, as it pleases the compiler, a checkpoint beside a copy would have other bits than one without.
    __device__ __forceinline__ void of_boundary(int b, bool has, float (&x)[8]) const {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int e = entry(n, b, has);
            x[n] = __fmul_rn(k[e], has ? until[e] : behind[e]);
        }
    }
    // Runs of b entries become those of 2 b.
    __device__ __forceinline__ void double_runs(int b) {
#pragma unroll
        for (int start = 0; start < 16; start += 2 * b) {
            const float first = until[start + b - 1], second = until[start + 2 * b - 1];
#pragma unroll
            for (int n = start; n < start + b; ++n) behind[n] *= second, until[n + b] *= first;
        }
    }
};

// Two parts of 8 entries as rows 0 ... 7 and 8 ... 15 of the first operand, from channel `first` on.
__device__ __forceinline__ Matrices load_row_planes(const KeyPlane* planes, int first, int lane) {
    return load_transposed_matrices(planes[lane / 8 % 2][first + lane / 16 * 8 + lane % 8]);
}
// Two parts of 8 entries as columns of the second operand.
__device__ __forceinline__ Matrices load_column_planes(const KeyPlane* planes, int first, int lane) {
    return load_transposed_matrices(planes[lane / 16][first + lane / 8 % 2 * 8 + lane % 8]);
}
// Products of entries with bit b, of planes 0 ... PARTS - 1, and those without, of the next ones, over a warp's channels: row g, columns
// 2 t and 2 t + 1. A first operand has two parts at a time, so that one product does the work of two.
template <int PARTS, int OTHERS>
__device__ __forceinline__ void multiply_planes(const KeyPlane* planes, int lane, float (&products)[2]) {
    Accumulator sum = {}, small = {};
#pragma unroll
    for (int first = 0; first < 32; first += 16) {
        const Matrices rows = load_row_planes(planes, first, lane);
        const Matrices columns = load_column_planes(planes + PARTS, first, OTHERS > 1 ? lane : lane % 16);
        if constexpr (PARTS > 2) {
            const Matrices last = load_row_planes(planes + 2, first, lane / 16 * 16 + lane % 8);
            mma_bf16(small, last.v, columns.v[0], columns.v[1]);
        }
        if constexpr (OTHERS > 2) {
            const Matrices last = load_column_planes(planes + PARTS + 2, first, lane % 16);
            mma_bf16(sum, rows.v, last.v[0], last.v[1]);
        }
        if constexpr (OTHERS > 1) mma_bf16(sum, rows.v, columns.v[2], columns.v[3]);
        mma_bf16(sum, rows.v, columns.v[0], columns.v[1]);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) products[e] = sum.v[e] + (sum.v[2 + e] + small.v[e]);
}
