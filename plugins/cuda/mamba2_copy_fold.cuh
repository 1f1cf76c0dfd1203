// Folds a row's ring into the checkpoint of several heads, and writes their read copies.
//
// A warp owns 16 rows of each head and keeps them in registers until the head's largest magnitude is known and their codes
// are stored. The next head's rows are requested block by block as registers become free.
#pragma once
#include "mamba2_copy.cuh"
#include "mamba2_fold.cuh"

// Scalars of a block's heads, for all its warps.
struct SharedScalars {
    float rate[HEADS_A_BLOCK], D[HEADS_A_BLOCK], copy_scale[HEADS_A_BLOCK];
    float dt[HEADS_A_BLOCK][TOKENS];  // finished steps of the tokens

    __device__ __forceinline__ void fill(const Sequence& seq, const ReadCopy& copy, int first, int heads) {
        for (int i = threadIdx.x; i < heads * TOKENS; i += 32 * WARPS) {
            const int head = i / TOKENS, token = i % TOKENS;
            float step = 0.0f;
            if (token < seq.row.tokens) {
                const float raw = to_float(seq.in.dt[i64(token) * seq.in.dt_stride + first + head]) + seq.in.dt_bias[first + head];
                step = fminf(fmaxf(softplus(raw), DT_MIN), DT_MAX);
            }
            dt[head][token] = step;
        }
        for (int head = threadIdx.x; head < heads; head += 32 * WARPS) {
            rate[head] = -LOG2_E * expf(seq.in.A_log[first + head]);
            D[head] = seq.in.D[first + head];
            copy_scale[head] = READ_BITS == 8 ? 1.0f : seq.row.folded > 0 ? copy.head_scale[first + head] : 0.0f;
        }
    }
    // Decays of the block's head number `head`; `ring_dt`: of the history's entries lane + 32 b.
    __device__ __forceinline__ Decays decays(const float (&ring_dt)[ENTRY_LANES], const Sequence& seq, int head, int lane) const {
        float steps[ENTRY_LANES];
#pragma unroll
        for (int b = 0; b < ENTRY_LANES; ++b) {
            const int j = lane + 32 * b;
            steps[b] = j < seq.history ? ring_dt[b] : j < seq.length ? dt[head][j - seq.history] : 0.0f;
        }
        return Decays(steps, rate[head], lane);
    }
};

// Largest magnitudes of the warps' rows, of even and odd heads: one barrier a head keeps them apart.
struct WarpMagnitudes {
    float v[2][WARPS];
};

// B of the group's entries in float32, two entries side by side.
struct SharedB {
    static constexpr int ROWS = 4 * ((ENTRIES + 7) / 8), PITCH = STATE_SIZE + 16;
    float2 v[ROWS][PITCH];

    // Rows begin in different banks, so that the lanes of a quad read at once what lies below each other.
    __device__ static __forceinline__ int shift(int row) { return WIDE_STATE ? 2 * (row % 2) + 8 * (row / 2 % 2) : 2 * (row % 4); }
    __device__ __forceinline__ void fill(const Sequence& seq, int group, int entries) {
        constexpr int UNITS = STATE_SIZE / 8;
        for (int at = threadIdx.x; at < (entries + 1) / 2 * UNITS; at += 32 * WARPS) {
            const int row = at / UNITS, column = at % UNITS * 8;
            const uint4 even = *reinterpret_cast<const uint4*>(seq.b(2 * row, group) + column);
            const uint4 odd = *reinterpret_cast<const uint4*>(seq.b(min(2 * row + 1, entries - 1), group) + column);
            const u32 low[4] = {even.x, even.y, even.z, even.w}, high[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
            for (int i = 0; i < 8; ++i)
                v[row][shift(row) + column + i] = {half_to_float<ACT>(low[i / 2], i % 2), half_to_float<ACT>(high[i / 2], i % 2)};
        }
    }
};

// The lane's view of it. Rows behind the last are never written: their entries weigh nothing, and the last stands for them.
struct SharedBRows {
    const SharedB& b;
    int lane, last;

    __device__ __forceinline__ BOperands get(int block16, int s, int block, int half) const {
        const int g = lane / 4, row = min(8 * block16 + 4 * s + lane % 4, last);
        const int column = 32 * block + (WIDE_STATE ? 16 * half + 4 * (g / 2) : 8 * (g / 2) + 4 * half) + g % 2;
        const float2* at = &b.v[row][SharedB::shift(row) + column];
        const float2 first = at[0], second = at[2];
        return {{first.x, second.x}, {first.y, second.y}};
    }
};

// Requests a head's share of the sequence. Its addresses are worked out anew: registers are short, and time is not.
__device__ __forceinline__ void load_inputs(HeadInputs& in, const Sequence& seq, int head, int p0, int lane) {
#pragma unroll
    for (int b = 0; b < ENTRY_LANES; ++b)
        in.dt[b] = lane + 32 * b < seq.history ? seq.in.ring_dt[head * RING_ROWS + seq.ring_row(lane + 32 * b)] : 0.0f;
#pragma unroll
    for (int b = 0; b < ENTRY_BLOCKS; ++b)
#pragma unroll
        for (int s = 0; s < 2; ++s)
            if (is_needed(b, seq.length))
                in.x[b][s] = load_8_bytes(seq.x(seq.existing(16 * b + 8 * s + lane / 4), head) + p0 + 4 * (lane % 4));
}

// `state` and `copy` are the slot's. All warps of the block take part, and none reads the copy any more.
__device__ __forceinline__ void fold_heads(Sequence seq, const SharedScalars& scalars, int first, int heads, STATE* state,
                                           const ReadCopy& copy, const RandomSource& random, WarpMagnitudes& magnitudes, SharedB& b) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, group = first / HEADS_A_GROUP;
    const int row = 16 * warp + state_row(g);
    const bool has_checkpoint = seq.row.folded > 0;
    const int entries = seq.row.fold_entries();
    state += first * HEAD_SIZE + row * STATE_SIZE;

    StateTile<STATE> tile;
    const auto load = [&](int k, int r) {
        if (has_checkpoint)
            tile[k][r].template load<true>(state + 2 * r * STATE_SIZE, k, t);
        else
            tile[k][r].clear();
    };
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) load(k, 0), load(k, 1);
    HeadInputs in;
    load_inputs(in, seq, first, 16 * warp, lane);
    b.fill(seq, group, entries);
    __syncthreads();
    const SharedBRows b_rows = {b, lane, (entries - 1) / 2};

    for (int head = 0; head < heads; ++head) {
        const Decays decays = scalars.decays(in.dt, seq, head, lane);
        Updates updates(in, decays, entries, lane);
        seq.forget_addresses();
        const int element = (first + head) * HEAD_SIZE + row * STATE_SIZE;
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            tile[k][0].keep(), tile[k][1].keep();
            if constexpr (ENTRY_BLOCKS > 1 || BLOCKS > 4) updates.keep();
            fold_block<true>(tile[k], tile[k], updates, b_rows, entries, k, lane, state, k, random, element);
        }
        // The sums' registers are free for what the next head needs.
        if (head + 1 < heads) load_inputs(in, seq, first + head + 1, 16 * warp, lane);
        float head_scale = 0.0f;
        if constexpr (READ_BITS == 4) {
            float amax = tile_magnitude<STATE>(tile);
            if (lane == 0) magnitudes.v[head % 2][warp] = amax;
            __syncthreads();
#pragma unroll
            for (int w = 0; w < WARPS; ++w) amax = larger_magnitude(amax, magnitudes.v[head % 2][w]);
            head_scale = nvfp4_head_scale(amax);
        }
        const ReadCopy written = copy.of_head(first + head, HEAD_DIM, STATE_SIZE);
        if (READ_BITS == 4 && threadIdx.x == 0) *written.head_scale = head_scale;
        state += HEAD_SIZE;
#pragma unroll
        for (int k = 0; k < BLOCKS; k += COPY_STORE_BLOCKS) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                CopyStore<STATE> codes;
#pragma unroll
                for (int i = 0; i < COPY_STORE_BLOCKS; ++i) {
                    codes.set(i, CopyColumns(tile[k + i][r]), head_scale, t);
                    if (head + 1 < heads) load(k + i, r);
                }
                codes.store(written, row + 2 * r, k, t);
            }
        }
    }
}
