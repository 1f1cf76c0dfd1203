// Stage 1 of mamba2_step: where the entries of a row's sequence lie, and a head's share of them.
//
// The sequence of a row is its history (live ring rows, oldest first), then the step's tokens: entries 0 ... length - 1.
// Entry j of the history is position folded + j, kept in ring row (folded + j) % RING_ROWS; entry history + i is token i.
#pragma once
#include "mamba2_shape.cuh"
#include "rows.cuh"
#include "scalars.cuh"
#include "step.cuh"

struct Inputs {
    const ACT* xbc;
    const ACT* dt;
    const float* A_log;
    const float* dt_bias;
    const float* D;
    const STATE* state;
    const ACT* ring_x;
    const ACT* ring_b;
    const float* ring_dt;
    int xbc_stride, dt_stride;
};

// A row's sequence, with all addresses of the row and group applied.
struct Sequence {
    Row row;
    int history, length;
    Inputs in;  // xbc and dt at the row's first token, the pools at the row's slot

    // Makes addresses of entries be computed anew instead of being kept in registers from head to head.
    __device__ __forceinline__ void forget_addresses() { asm volatile("" : "+r"(row.folded), "+r"(history)); }
    __device__ bool is_token(int j) const { return j >= history; }
    __device__ int ring_row(int j) const { return (row.folded + j) % RING_ROWS; }
    // Row of x, starting at channel p of the head; null behind the end.
    __device__ const ACT* x(int j, int head, int p) const {
        if (j >= length) return nullptr;
        return is_token(j) ? in.xbc + i64(j - history) * in.xbc_stride + head * HEAD_DIM + p
                           : in.ring_x + (head * RING_ROWS + ring_row(j)) * HEAD_DIM + p;
    }
    __device__ const ACT* b(int j, int group) const {
        if (j >= length) return nullptr;
        return is_token(j) ? in.xbc + i64(j - history) * in.xbc_stride + INNER + group * STATE_SIZE
                           : in.ring_b + (group * RING_ROWS + ring_row(j)) * STATE_SIZE;
    }
    __device__ const ACT* c(int i, int group) const {
        if (i >= length - history) return nullptr;
        return in.xbc + i64(i) * in.xbc_stride + INNER + (GROUPS + group) * STATE_SIZE;
    }
};

__device__ __forceinline__ Pairs load_pairs_or_zero(const ACT* row, int block, int t) {
    return row ? load_pairs<WIDE_STATE>(row, block, t) : Pairs{0, 0, 0, 0};
}

// A warp's part of the state: 16 rows and BLOCKS_A_CHUNK blocks of columns. Row g of the products is state row state_row(g).
struct Chunk {
    StatePairs<STATE> v[BLOCKS_A_CHUNK][2];

    __device__ __forceinline__ void load(const STATE* rows, int chunk, int t, bool present) {
#pragma unroll
        for (int k = 0; k < BLOCKS_A_CHUNK; ++k)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (present)
                    v[k][half].load(rows + 2 * half * STATE_SIZE, chunk * BLOCKS_A_CHUNK + k, t);
                else
                    v[k][half].clear();
            }
    }
};

// Row g of a warp's 16 is p = 4 (g / 2) + g % 2 and row g + 8 the one two behind: then four adjacent channels of x, read with
// one access, are what two transposed 8 x 8 matrices need.
__device__ __forceinline__ int state_row(int g) { return 4 * (g / 2) + g % 2; }

// What a head needs beside its state. Entries 16 b + 8 s + g of x, channels 4t ... 4t + 3; time step of entries lane + 32 b,
// finished in the ring and raw in the step's tokens.
struct HeadInputs {
    uint2 x[ENTRY_BLOCKS][2];
    float dt[ENTRY_LANES];
    float A_log, dt_bias, D;

    __device__ __forceinline__ void load(const Sequence& seq, int head, int p0, int lane) {
        const int g = lane / 4, t = lane % 4;
        A_log = seq.in.A_log[head], dt_bias = seq.in.dt_bias[head], D = seq.in.D[head];
#pragma unroll
        for (int b = 0; b < ENTRY_LANES; ++b) {
            const int j = lane + 32 * b;
            dt[b] = 0.0f;
            if (j < seq.history)
                dt[b] = seq.in.ring_dt[head * RING_ROWS + seq.ring_row(j)];
            else if (j < seq.length)
                dt[b] = to_float(seq.in.dt[i64(j - seq.history) * seq.in.dt_stride + head]);
        }
#pragma unroll
        for (int b = 0; b < ENTRY_BLOCKS; ++b)
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const ACT* at = seq.x(16 * b + 8 * s + g, head, p0 + 4 * t);
                x[b][s] = at ? *reinterpret_cast<const uint2*>(at) : uint2{0, 0};
            }
    }
};
