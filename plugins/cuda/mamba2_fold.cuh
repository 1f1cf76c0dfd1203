// Stage 5 of mamba2_step, if the row folds: the ring moves into the checkpoint.
//
//     S = exp(c_last) S0 + sum_{j < entries} u_j B_j^T,   u_j = exp(c_last - c_j) dt_j x_j
//
// (names in mamba2_replay.cuh). The sum is formed from zero and added to the decayed checkpoint in float32. A lane has rows g
// and g + 8 of a warp's 16.
#pragma once
#include "mamba2_weights.cuh"
#include "rounding.cuh"

// B of the entries that a row folds. Within 32 columns pairs lie in the order in which a lane of the state has them (rows.cuh):
// transposed, pair m of lane t becomes columns 2 t and 2 t + 1 of matrix m. The other entries, which weigh nothing, are zero.
struct SharedB {
    uint4 v[ENTRY_ROWS * PITCH<B_UNITS>];

    __device__ __forceinline__ void fill(const Sequence& seq, int group, int entries) {
        constexpr int N = (ENTRY_ROWS * B_UNITS + 32 * WARPS - 1) / (32 * WARPS);
        uint4 loaded[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int at = threadIdx.x + 32 * WARPS * i, j = at / B_UNITS;
            loaded[i] = {0, 0, 0, 0};
            if (j < entries) loaded[i] = *reinterpret_cast<const uint4*>(seq.b(j, group) + UNIT * (at % B_UNITS));
        }
        u32* words = reinterpret_cast<u32*>(v);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int at = threadIdx.x + 32 * WARPS * i, j = at / B_UNITS, unit = at % B_UNITS, part = unit % 4;
            if (j >= ENTRY_ROWS) continue;
            const u32 pairs[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const int m = WIDE_STATE ? 2 * (part / 2) + p % 2 : p, t = WIDE_STATE ? 2 * (part % 2) + p / 2 : part;
                words[4 * (j * PITCH<B_UNITS> + unit - part + m) + t] = pairs[p];
            }
        }
    }
    // Matrices `unit` and `unit` + 1 of the entries' block b.
    __device__ __forceinline__ Matrices get(int b, int unit, int lane) const { return load_entries<B_UNITS>(v, b, unit, lane); }
};

// u_j of a warp's rows as first operands, of a block of 16 entries. Tokens behind the `entries` that are folded become zero: their
// x may be no number.
struct EntryUpdates {
    Parts<UPDATE_PARTS> v[4];

    // Of entries 8 s + 2 t and the next of the block, what they count in the new checkpoint; `left`: entries of the block that
    // are folded.
    __device__ __forceinline__ void set(const Matrices& x, int s, float2 kept, int left, int lane) {
        left -= 8 * s + 2 * (lane % 4);
        const u32 folded = left > 1 ? ~0u : left > 0 ? 0xffffu : 0u;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const u32 pair = x.v[2 * m + s] & folded;
            v[m + 2 * s] =
                split_pair<UPDATE_PARTS>(kept.x * half_to_float<ACT>(pair, false), kept.y * half_to_float<ACT>(pair, true));
        }
    }
    __device__ __forceinline__ void load(const BlockWeights& block, int b, int h, int entries, int warp, int lane) {
        const Matrices x = load_entries<X_UNITS>(block.x[h], b, 2 * warp, lane);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const float2 kept = *reinterpret_cast<const float2*>(&block.kept[h][16 * b + 8 * s + 2 * (lane % 4)]);
            set(x, s, kept, entries - 16 * b, lane);
        }
    }
};

// Of all entries that head h of the block folds. The blocks that a flush needs stay in registers; an absorbing verify step
// works out those behind them where it needs them.
struct HeadUpdates {
    static constexpr int HELD = ((TOKENS > 1 && ENTRIES > TOKENS ? ENTRIES - TOKENS : ENTRIES) + 15) / 16;
    EntryUpdates held[HELD];
    const BlockWeights& block;
    int entries, h, warp, lane;

    __device__ __forceinline__ HeadUpdates(const BlockWeights& weights, int count, int head, int warp_index, int lane_index)
        : block(weights), entries(count), h(head), warp(warp_index), lane(lane_index) {
#pragma unroll
        for (int b = 0; b < HELD; ++b)
            if (is_needed(b, entries)) held[b].load(block, b, h, entries, warp, lane);
    }
    __device__ __forceinline__ float decay() const { return block.kept_state[h]; }
    __device__ __forceinline__ EntryUpdates get(int b) const {
        if (b < HELD) return held[b < HELD ? b : 0];
        EntryUpdates later;
        later.load(block, b, h, entries, warp, lane);
        return later;
    }
};

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

// Folds into block `block` of 32 columns of a warp's rows, `state`, and stores the result, which becomes `folded`. `rows_out`:
// row g, of which the block is number k, and whose first column is element `element` of the slot's state.
template <typename Updates, typename RowsOfB>
__device__ __forceinline__ void fold_block(StatePairs<STATE> (&folded)[2], const StatePairs<STATE> (&state)[2],
                                           const Updates& updates, const RowsOfB& b_rows, int block, int lane, STATE* rows_out,
                                           int k, const RandomSource& random, int element) {
    const int t = lane % 4;
    const float decay = updates.decay();
    // Keeps the compiler from loading operands of all blocks at once: their registers are needed.
    __syncwarp();
    PairBits bits[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) bits[r].draw(random, element + 8 * r * STATE_SIZE + 32 * k + 8 * t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Accumulator sum[2] = {};
#pragma unroll
        for (int b = 0; b < ENTRY_BLOCKS; ++b) {
            if (!is_needed(b, updates.entries)) continue;
            const EntryUpdates u = updates.get(b);
            const Matrices B = b_rows.get(b, 4 * block + 2 * half, lane);
#pragma unroll
            for (int m = 0; m < 2; ++m)
                mma_parts<0, UPDATE_PARTS>(sum[m], u.v, exact_parts<ACT>(B.v[2 * m]), exact_parts<ACT>(B.v[2 * m + 1]));
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            add_updates(folded[r], state[r], decay, sum, half, r, bits[r]);
            folded[r].store_half(rows_out + 8 * r * STATE_SIZE, k, half, t);
        }
    }
}
