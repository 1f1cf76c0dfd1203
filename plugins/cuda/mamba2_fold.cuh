// Stage 4 of mamba2_step: the ring moves into the checkpoint, and the step's tokens into the ring.
//
//     S = exp(c_last) S0 + sum_{j < entries} u_j B_j^T,   u_j = exp(c_last - c_j) dt_j x_j
//
// The sum is formed from zero by tf32 products of both parts of u, and added to the decayed checkpoint in float32.
#pragma once
#include "mamba2_readout.cuh"

struct Updates {
    float u[ENTRY_BLOCKS][2][4];  // as operand of the 8 entries of half-block s
    int b[ENTRY_BLOCKS][2][2];  // where the entries' B rows lie
    float decay;

    __device__ __forceinline__ Updates(const HeadInputs& in, const Decays& decays, const Sequence& seq, int group, int entries,
                                       int lane) {
        const Weights weights(decays, entries, lane);
        decay = weights.decay;
#pragma unroll
        for (int block = 0; block < ENTRY_BLOCKS; ++block) {
            const TransposedX x(in.x[block]);
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int j = 16 * block + 8 * s + 2 * (lane % 4);
                x.operand(u[block][s], s, weights.at(block, j), weights.at(block, j + 1));
#pragma unroll
                for (int e = 0; e < 2; ++e) b[block][s][e] = seq.b_offset(min(j + e, entries - 1), group);
            }
        }
    }
    // Keeps the compiler from splitting u once and for all, which would double its registers.
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (int block = 0; block < ENTRY_BLOCKS; ++block)
#pragma unroll
            for (int i = 0; i < 8; ++i) asm volatile("" : "+f"(u[block][i / 4][i % 4]));
    }
};

// Folds into one chunk of the state and stores it. `rows_out`: this lane's first row, at the chunk's first block.
__device__ __forceinline__ void fold(const Chunk& state, Updates& updates, const Sequence& seq, int entries, int chunk, int lane,
                                     STATE* rows_out) {
    const int g = lane / 4, t = lane % 4;
    asm volatile("" : "+l"(rows_out));
#pragma unroll
    for (int k = 0; k < BLOCKS_A_CHUNK; ++k) {
        StatePairs<STATE> folded[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Accumulator sum[2] = {};
            updates.keep();
#pragma unroll
            for (int b = 0; b < ENTRY_BLOCKS; ++b)
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    if (16 * b + 8 * s >= entries) continue;
                    const int block = chunk * BLOCKS_A_CHUNK + k, j = 16 * b + 8 * s + 2 * t;
                    const ACT* rows[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) rows[e] = seq.b_base(min(j + e, entries - 1)) + updates.b[b][s][e];
                    const uint2 even = load_two_pairs<WIDE_STATE>(rows[0], block, half, g / 2);
                    const uint2 odd = load_two_pairs<WIDE_STATE>(rows[1], block, half, g / 2);
                    mma_split_a(sum[0], updates.u[b][s], half_to_float<ACT>(even.x, g & 1), half_to_float<ACT>(odd.x, g & 1));
                    mma_split_a(sum[1], updates.u[b][s], half_to_float<ACT>(even.y, g & 1), half_to_float<ACT>(odd.y, g & 1));
                }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    folded[r].set(2 * half + m, updates.decay * state.v[k][r].get(2 * half + m, 0) + sum[m].v[2 * r],
                                  updates.decay * state.v[k][r].get(2 * half + m, 1) + sum[m].v[2 * r + 1]);
                folded[r].store_half(rows_out + 2 * r * STATE_SIZE, k, half, t);
            }
        }
    }
}

// Stores a head's tokens in the ring, `ring_x` and `ring_dt` being that head's; the time steps only where `with_dt`.
__device__ __forceinline__ void append(const HeadInputs& in, const Decays& decays, const Sequence& seq, int p0, int lane,
                                       bool with_dt, ACT* ring_x, float* ring_dt) {
#pragma unroll
    for (int b = 0; b < ENTRY_BLOCKS; ++b)
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const int j = 16 * b + 8 * s + lane / 4;
            if (j < seq.length && seq.is_token(j))
                *reinterpret_cast<uint2*>(ring_x + seq.ring_row(j) * HEAD_DIM + p0 + 4 * (lane % 4)) = in.x[b][s];
        }
    if (!with_dt) return;
#pragma unroll
    for (int b = 0; b < ENTRY_LANES; ++b) {
        const int j = lane + 32 * b;
        if (j < seq.length && seq.is_token(j)) ring_dt[seq.ring_row(j)] = decays.dt[b];
    }
}
