// Stage 4 of mamba2_step: the ring moves into the checkpoint, and the step's tokens into the ring.
//
//     S = exp(c_last) S0 + sum_{j < entries} u_j B_j^T,   u_j = exp(c_last - c_j) dt_j x_j
//
// The sum is formed from zero by tf32 products of both parts of u, and added to the decayed checkpoint in float32.
#pragma once
#include "mamba2_readout.cuh"

struct Updates {
    float a[ENTRY_BLOCKS][2][4];  // u, as operand of the 8 entries of half-block s
    float decay;

    __device__ __forceinline__ Updates(const HeadInputs& in, const Decays& decays, int entries, int lane) {
        const float last = decays.sum_at(entries - 1);
        decay = entries > 0 ? decays.decay(0.0f, last) : 1.0f;
#pragma unroll
        for (int b = 0; b < ENTRY_BLOCKS; ++b) {
            const TransposedX x(in.x[b]);
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                float weight[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int j = 16 * b + 8 * s + 2 * (lane % 4) + e;
                    const float sum = __shfl_sync(~0u, decays.sum[b / 2], j & 31);
                    const float dt = __shfl_sync(~0u, decays.dt[b / 2], j & 31);
                    weight[e] = j < entries ? decays.decay(sum, last) * dt : 0.0f;
                }
                x.operand(a[b][s], s, weight[0], weight[1]);
            }
        }
    }
};

// Folds into one chunk of the state and stores it.
__device__ __forceinline__ void fold(Chunk& state, const Updates& u, const Sequence& seq, int group, int entries, int chunk,
                                     int lane, STATE* rows_out) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < BLOCKS_A_CHUNK; ++k) {
        const int block = chunk * BLOCKS_A_CHUNK + k;
        Accumulator sum[4] = {};
#pragma unroll
        for (int b = 0; b < ENTRY_BLOCKS; ++b)
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int j = 16 * b + 8 * s + 2 * t;
                if (16 * b + 8 * s >= entries) continue;
                const Pairs even = load_pairs_or_zero(j < entries ? seq.b(j, group) : nullptr, block, g / 2);
                const Pairs odd = load_pairs_or_zero(j + 1 < entries ? seq.b(j + 1, group) : nullptr, block, g / 2);
#pragma unroll
                for (int m = 0; m < 4; ++m)
                    mma_split_a(sum[m], u.a[b][s], half_to_float<ACT>(even.v[m], g & 1), half_to_float<ACT>(odd.v[m], g & 1));
            }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            StatePairs<STATE>& s = state.v[k][half];
#pragma unroll
            for (int m = 0; m < 4; ++m)
                s.set(m, u.decay * s.get(m, 0) + sum[m].v[2 * half], u.decay * s.get(m, 1) + sum[m].v[2 * half + 1]);
            s.store(rows_out + 2 * half * STATE_SIZE, block, t);
        }
    }
}

// Stores a head's tokens in the ring; the time steps only where `with_dt`.
__device__ __forceinline__ void append(const HeadInputs& in, const Decays& decays, const Sequence& seq, int head, int p0,
                                       int lane, bool with_dt, ACT* ring_x_out, float* ring_dt_out) {
#pragma unroll
    for (int b = 0; b < ENTRY_BLOCKS; ++b)
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const int j = 16 * b + 8 * s + lane / 4;
            if (j < seq.length && seq.is_token(j))
                *reinterpret_cast<uint2*>(ring_x_out + (head * RING_ROWS + seq.ring_row(j)) * HEAD_DIM + p0 + 4 * (lane % 4)) =
                    in.x[b][s];
        }
    if (!with_dt) return;
#pragma unroll
    for (int b = 0; b < ENTRY_LANES; ++b) {
        const int j = lane + 32 * b;
        if (j < seq.length && seq.is_token(j)) ring_dt_out[head * RING_ROWS + seq.ring_row(j)] = decays.dt[b];
    }
}
