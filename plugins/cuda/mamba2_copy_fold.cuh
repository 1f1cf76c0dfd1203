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

// `state` and `copy` are the slot's. All warps of the block take part, and none reads the copy any more.
__device__ __forceinline__ void fold_heads(Sequence seq, const SharedScalars& scalars, int first, int heads, STATE* state,
                                           const ReadCopy& copy, const RandomSource& random, WarpMagnitudes& magnitudes) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, group = first / HEADS_A_GROUP;
    const int row = 16 * warp + state_row(g);
    const bool has_checkpoint = seq.row.folded > 0;
    const int entries = seq.row.fold_entries();
    state += first * HEAD_SIZE + row * STATE_SIZE;

    StateTile<STATE> tile;
    const auto load = [&](int k) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (has_checkpoint)
                tile[k][r].load(state + 2 * r * STATE_SIZE, k, t);
            else
                tile[k][r].clear();
        }
    };
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) load(k);
    HeadCursor cursor(seq, first, 16 * warp, lane);
    HeadInputs in;
    cursor.take(in, seq, lane);

    for (int head = 0; head < heads; ++head) {
        const Decays decays = scalars.decays(in.dt, seq, head, lane);
        Updates updates(in, decays, entries, lane);
        seq.forget_addresses();
        const BRows b_rows(seq, group, entries, lane);
        const int element = (first + head) * HEAD_SIZE + row * STATE_SIZE;
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            tile[k][0].keep(), tile[k][1].keep();
            fold_block(tile[k], tile[k], updates, b_rows, k, lane, state, k, random, element);
        }
        // The sums' registers are free for what the next head needs.
        if (head + 1 < heads) cursor.take(in, seq, lane);
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
        for (int k = 0; k < BLOCKS; ++k) {
            store_copy_rows(tile[k], head_scale, written, row, k, t);
            if (head + 1 < heads) load(k);
        }
    }
}
