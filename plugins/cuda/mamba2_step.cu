// replayssm::mamba2 for decode and verify steps (T <= 16) with 16-bit activations. Contract: plugins/mamba2.py.
//
// A block takes heads of one group of a row. Its warps first work out, for all these heads, what the sequence contributes
// (mamba2_weights.cuh), while the first rows of the state are on their way. Then a warp runs over the heads on its own, 16 rows
// of the state of each, chunk by chunk (4 KB); the registers of a chunk are requested anew as soon as it is used.
//
// Stages: mamba2_load.cuh, mamba2_replay.cuh, mamba2_weights.cuh, mamba2_head.cuh, mamba2_fold.cuh. Macros: mamba2_shape.cuh.
#include "mamba2_fold.cuh"
#include "mamba2_head.cuh"

// What is in shared memory.
struct Shared {
    BlockWeights weights;
    SharedC c;
    SharedB b;
};
static_assert(sizeof(Shared) <= 48 * 1024, "the block needs too much shared memory");

// Where a warp's share of the block's first head lies: row g of the state, channels of token 0.
struct WarpOut {
    STATE* state;
    ACT* y;
};

// All heads of the block, of which the first chunk is on its way into `state`; `rows` is row g of the first. FOLDS: the row
// folds.
template <bool FOLDS>
__device__ __forceinline__ void run_heads(const Sequence& seq, const Shared& shared, const Heads& heads, StateChunk& state,
                                          const STATE* rows, int warp, int lane, WarpOut out, const RandomSource& random) {
    const bool has_checkpoint = seq.row.folded > 0;
    const int entries = seq.row.fold_entries(), first_element = int(rows - seq.in.state);
    for (int h = 0; h < heads.count; ++h, rows += HEAD_SIZE, out.y += HEAD_DIM) {
        StateProducts<STATE> products = {};
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            state.keep();
#pragma unroll
            for (int k = 0; k < BLOCKS_A_CHUNK; ++k) {
                const int block = chunk * BLOCKS_A_CHUNK + k;
                if (k > 0) __syncwarp();
                const Pairs low = shared.c.get(0, block, lane);
                products.add(state.v[k], low, TOKEN_TILES > 1 ? shared.c.get(TOKEN_TILES - 1, block, lane) : Pairs{});
            }
            if constexpr (FOLDS) {
                const HeadUpdates updates(shared.weights, entries, h, warp, lane);
                const int element = h * HEAD_SIZE + chunk * CHUNK_COLUMNS;
#pragma unroll
                for (int k = 0; k < BLOCKS_A_CHUNK; ++k) {
                    StatePairs<STATE> folded[2];
                    fold_block(folded, state.v[k], updates, shared.b, chunk * BLOCKS_A_CHUNK + k, lane, out.state + element, k,
                               random, first_element + element);
                }
            }
            const bool ends = chunk + 1 == CHUNKS;
            if (has_checkpoint && (!ends || h + 1 < heads.count))
                state.load<FOLDS>(ends ? rows + HEAD_SIZE : rows + (chunk + 1) * CHUNK_COLUMNS, lane % 4);
        }
        finish_head(products.sum(), shared.weights, seq, h, warp, lane, out.y);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, WARPS_AN_SM / WARPS)
    mamba2_step(const ACT* xbc, const ACT* dt, const float* A_log, const float* dt_bias, const float* D, const int* step,
                const STATE* state, const ACT* ring_x, const ACT* ring_b, const float* ring_dt, int /*tokens*/, int xbc_stride,
                int dt_stride, int state_stride, int ring_x_stride, int ring_b_stride, int ring_dt_stride, int heads_per_block,
                ACT* y, STATE* state_out, ACT* ring_x_out, ACT* ring_b_out, float* ring_dt_out) {
    __shared__ Shared shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Heads heads(heads_per_block);
    const RowInTurn row = load_row_in_turn(step, blockIdx.y, TOKENS);
    y += i64(row.number) * TOKENS * INNER + heads.first * HEAD_DIM;
    if (row.slot < 0) {
        for (int at = threadIdx.x; at < heads.count * HEAD_DIM; at += 32 * WARPS)
            for (int i = 0; i < TOKENS; ++i) y[i * INNER + at] = from_float<ACT>(0.0f);
        return;
    }
    const Sequence seq(row, row.number, {xbc, dt, A_log, dt_bias, D, state, ring_x, ring_b, ring_dt, xbc_stride, dt_stride},
                       {state_stride, ring_x_stride, ring_b_stride, ring_dt_stride});
    const int element = heads.first * HEAD_SIZE + (16 * warp + lane / 4) * STATE_SIZE;
    const STATE* rows = seq.in.state + element;
    // Without a checkpoint the chunk stays zero: nothing is ever loaded into it.
    StateChunk chunk;
    chunk.clear();
    if (row.folded > 0) chunk.load<false>(rows, lane % 4);
    const RingOut ring = {ring_x_out + row.slot * ring_x_stride, ring_b_out + row.slot * ring_b_stride,
                          ring_dt_out + row.slot * ring_dt_stride, !row.absorbs()};
    weigh_sequence(shared.weights, seq, heads, ring, warp, lane, [&](const TokenC& c) {
        shared.c.set(c, warp, lane);
        if (row.folds()) shared.b.fill(seq, heads.group, row.fold_entries());
    });

    const WarpOut out = {state_out + row.slot * state_stride + element, y + 16 * warp};
    const RandomSource random = {step, row.number};
    if (row.folds())
        run_heads<true>(seq, shared, heads, chunk, rows, warp, lane, out, random);
    else
        run_heads<false>(seq, shared, heads, chunk, rows, warp, lane, out, random);
}
