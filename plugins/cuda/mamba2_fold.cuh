// Stage 4 of mamba2_step: the ring moves into the checkpoint, and the step's tokens into the ring.
//
//     S = exp(c_last) S0 + sum_{j < entries} u_j B_j^T,   u_j = exp(c_last - c_j) dt_j x_j
//
// The sum is formed from zero by tf32 products of both parts of u, and added to the decayed checkpoint in float32.
#pragma once
#include "mamba2_readout.cuh"
#include "rounding.cuh"

struct Updates {
    float u[ENTRY_BLOCKS][2][4];  // as operand of the 8 entries of half-block s
    float decay;

    __device__ __forceinline__ Updates(const HeadInputs& in, const Decays& decays, int entries, int lane) {
        const Weights weights(decays, entries, lane);
        decay = weights.decay;
#pragma unroll
        for (int block = 0; block < ENTRY_BLOCKS; ++block) {
            const TransposedX x(in.x[block]);
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int j = 16 * block + 8 * s + 2 * (lane % 4);
                x.operand(u[block][s], s, weights.at(block, j), weights.at(block, j + 1));
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

// Second operands of two products: B of a lane's entries 16 b + 8 s + 2 t (even) and the next (odd), in one column for each m.
struct BOperands {
    float even[2], odd[2];
};

// B where the entries lie; behind the end, the last of them.
struct BRows {
    const Sequence& seq;
    int entries, t, g, offsets[ENTRY_BLOCKS][2][2];

    __device__ __forceinline__ BRows(const Sequence& sequence, int group, int count, int lane)
        : seq(sequence), entries(count), t(lane % 4), g(lane / 4) {
#pragma unroll
        for (int i = 0; i < 4 * ENTRY_BLOCKS; ++i)
            offsets[i / 4][i / 2 % 2][i % 2] = seq.b_offset(existing(i / 4, i / 2 % 2, i % 2), group);
    }
    __device__ __forceinline__ int existing(int b, int s, int e) const {
        return min(16 * b + 8 * s + 2 * t + e, entries - 1);
    }
    __device__ __forceinline__ const ACT* row(int b, int s, int e) const { return seq.b_base(existing(b, s, e)) + offsets[b][s][e]; }
    __device__ __forceinline__ BOperands get(int b, int s, int block, int half) const {
        const uint2 even = load_two_pairs<WIDE_STATE>(row(b, s, 0), block, half, g / 2);
        const uint2 odd = load_two_pairs<WIDE_STATE>(row(b, s, 1), block, half, g / 2);
        return {{half_to_float<ACT>(even.x, g & 1), half_to_float<ACT>(even.y, g & 1)},
                {half_to_float<ACT>(odd.x, g & 1), half_to_float<ACT>(odd.y, g & 1)}};
    }
};

// sum_j u_j B_j^T of one block of 32 columns, pairs 2 half and 2 half + 1.
template <typename Rows>
__device__ __forceinline__ void sum_updates(Accumulator (&sum)[2], const Updates& updates, int entries, int block, int half,
                                            const Rows& b_rows) {
#pragma unroll
    for (int b = 0; b < ENTRY_BLOCKS; ++b) {
        if (!is_needed(b, entries)) continue;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            if (16 * b + 8 * s >= ENTRIES) continue;
            const BOperands operands = b_rows.get(b, s, block, half);
#pragma unroll
            for (int m = 0; m < 2; ++m) mma_split_a(sum[m], updates.u[b][s], operands.even[m], operands.odd[m]);
        }
    }
}

// The random bits of a lane's four pairs, of 8 adjacent elements of a 16-bit state; nothing without STOCHASTIC.
struct PairBits {
    u32 v[4] = {};

    __device__ __forceinline__ void draw(const RandomSource& random, int element) {
        if constexpr (STOCHASTIC) {
            const RandomBits bits = random.bits(element);
#pragma unroll
            for (int m = 0; m < 4; ++m) v[m] = bits.v[m];
        }
    }
};

// Sets pair m of a state that is stored, or of one that stays in float32 registers.
template <typename T>
__device__ __forceinline__ void set_pair(StatePairs<T>& out, int m, float first, float second, const PairBits& random) {
    if constexpr (STOCHASTIC && sizeof(T) == 2)
        out.v[m] = pack_at_random<T>(first, second, random.v[m]);
    else
        out.set(m, first, second);
}

template <typename From, typename To>
__device__ __forceinline__ void add_updates(StatePairs<To>& out, const StatePairs<From>& state, float decay,
                                            const Accumulator (&sum)[2], int half, int r, const PairBits& random = {}) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
        set_pair(out, 2 * half + m, decay * state.get(2 * half + m, 0) + sum[m].v[2 * r],
                 decay * state.get(2 * half + m, 1) + sum[m].v[2 * r + 1], random);
}

// Folds into block `block` of a warp's rows, `state`, and stores the result, which becomes `folded`. `rows_out`: this lane's
// first row, of which the block is number k, and whose first column is element `element` of the slot's state.
template <bool UPDATE = false, typename Rows>
__device__ __forceinline__ void fold_block(StatePairs<STATE> (&folded)[2], const StatePairs<STATE> (&state)[2],
                                           Updates& updates, const Rows& b_rows, int entries, int block, int lane,
                                           STATE* rows_out, int k, const RandomSource& random, int element) {
    const int t = lane % 4;
    PairBits bits[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) bits[r].draw(random, element + 2 * r * STATE_SIZE + 32 * k + 8 * t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Accumulator sum[2] = {};
        if constexpr (!UPDATE) updates.keep();
        sum_updates(sum, updates, entries, block, half, b_rows);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            add_updates(folded[r], state[r], updates.decay, sum, half, r, bits[r]);
            folded[r].template store_half<UPDATE>(rows_out + 2 * r * STATE_SIZE, k, half, t);
        }
    }
}

// Folds into one chunk of the state and stores it. `rows_out`: this lane's first row, at the chunk's first block, which is
// element `element` of the slot's state.
__device__ __forceinline__ void fold(const Chunk& state, Updates& updates, const Sequence& seq, int group, int entries, int chunk,
                                     int lane, STATE* rows_out, const RandomSource& random, int element) {
    asm volatile("" : "+l"(rows_out));
    const BRows b_rows(seq, group, entries, lane);
#pragma unroll
    for (int k = 0; k < BLOCKS_A_CHUNK; ++k) {
        StatePairs<STATE> folded[2];
        fold_block(folded, state.v[k], updates, b_rows, entries, chunk * BLOCKS_A_CHUNK + k, lane, rows_out, k, random, element);
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
