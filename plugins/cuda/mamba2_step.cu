// replayssm::mamba2 for decode and verify steps (T <= 16) with 16-bit activations. Contract: plugins/mamba2.py.
//
// A warp owns 16 rows of the state of each head of its block and needs no other warp: there is no barrier. It runs
// over its heads chunk by chunk (4 KB); the registers of a chunk are requested anew as soon as it is used, so that memory works
// while outputs are finished. A block holds the HEAD_DIM / 16 warps of the same heads, which find the group's B rows in the L1
// cache after the first of them.
//
// Stages: mamba2_load.cuh, mamba2_replay.cuh, mamba2_readout.cuh, mamba2_fold.cuh. Macros: mamba2_shape.cuh.
#include "mamba2_fold.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, WARPS_AN_SM / WARPS)
    mamba2_step(const ACT* xbc, const ACT* dt, const float* A_log, const float* dt_bias, const float* D, const int* step,
                const STATE* state, const ACT* ring_x, const ACT* ring_b, const float* ring_dt, int /*tokens*/, int xbc_stride,
                int dt_stride, int state_stride, int ring_x_stride, int ring_b_stride, int ring_dt_stride, int heads_per_block,
                ACT* y, STATE* state_out, ACT* ring_x_out, ACT* ring_b_out, float* ring_dt_out) {
    const int lane = threadIdx.x % 32, p0 = 16 * (threadIdx.x / 32), g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * heads_per_block, last = first + heads_per_block, group = first / HEADS_A_GROUP;
    const Row row = load_row(step, blockIdx.y, TOKENS);
    if (row.slot < 0) {
        y += i64(blockIdx.y) * TOKENS * INNER;
        for (int at = threadIdx.x; at < TOKENS * heads_per_block * HEAD_DIM; at += 32 * WARPS) {
            const int width = heads_per_block * HEAD_DIM;
            y[at / width * INNER + first * HEAD_DIM + at % width] = from_float<ACT>(0.0f);
        }
        return;
    }
    const i64 token = i64(blockIdx.y) * TOKENS;
    Sequence seq = {{row.history(), row.history() + row.tokens},
                    row,
                    int(row.slot),
                    {xbc + token * xbc_stride, dt + token * dt_stride, A_log, dt_bias, D, state + row.slot * state_stride,
                     ring_x + row.slot * ring_x_stride, ring_b + row.slot * ring_b_stride,
                     ring_dt + row.slot * ring_dt_stride, xbc_stride, dt_stride}};
    const bool appends = !row.absorbs(), has_checkpoint = row.folded > 0;
    const int entries = row.fold_entries(), tokens = row.tokens;
    const int lane_row = (p0 + state_row(g)) * STATE_SIZE;
    const STATE* rows = seq.in.state + first * HEAD_SIZE + lane_row;

    // Without a checkpoint the chunk stays zero: nothing is ever loaded into it.
    Chunk state_rows;
    state_rows.clear();
    if (has_checkpoint) state_rows.load(rows, t);
    HeadCursor cursor(seq, first, p0, lane);
    HeadInputs in;
    cursor.take(in, seq, lane);
    TokenC c;
    c.load(seq, group, tokens, lane);
    HeadScalars scalars;
    scalars.load(seq.in, first, heads_per_block, lane);
    TokenSteps steps;
    steps.load(seq.in, first, heads_per_block, tokens, lane);
    __shared__ KeptProducts kept[WARPS];
    KeptProducts& bc = kept[threadIdx.x / 32];
    group_products(bc, seq, c, group, lane, appends && p0 == 0 && first % HEADS_A_GROUP == 0,
                   ring_b_out + row.slot * ring_b_stride);

    for (int head = first; head < last; ++head) {
        const Decays decays(in, steps, __shfl_sync(~0u, scalars.rate, head - first), head - first, seq, lane);
        StateProducts<STATE> products = {};
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            c.keep();
            state_rows.keep();
#pragma unroll
            for (int k = 0; k < BLOCKS_A_CHUNK; ++k) {
                const int block = chunk * BLOCKS_A_CHUNK + k;
                products.add(state_rows.v[k], c.v[0][block], TOKEN_TILES > 1 ? c.v[TOKEN_TILES - 1][block] : Pairs{});
            }
            if (row.folds()) {
                seq.forget_addresses();
                Updates updates(in, decays, entries, lane);
                const int element = head * HEAD_SIZE + lane_row + chunk * CHUNK_COLUMNS;
                fold(state_rows, updates, seq, group, entries, chunk, lane, state_out + i64(seq.slot) * state_stride + element,
                     RandomSource{step, int(blockIdx.y)}, element);
                // C's registers served the sums.
                c.load(seq, group, tokens, lane);
            }
            if (chunk + 1 == CHUNKS) rows += HEAD_SIZE;
            if (has_checkpoint && (chunk + 1 < CHUNKS || head + 1 < last))
                state_rows.load(rows + (chunk + 1) % CHUNKS * CHUNK_COLUMNS, t);
        }
        const HeadInputs current = in;
        seq.forget_addresses();
        if (head + 1 < last) cursor.take(in, seq, lane);
        if (appends)
            append(current, decays, seq, p0, lane, p0 == 0,
                   ring_x_out + i64(seq.slot) * ring_x_stride + head * (RING_ROWS * HEAD_DIM),
                   ring_dt_out + i64(seq.slot) * ring_dt_stride + head * RING_ROWS);
        read_out(products.sum(), bc, current, decays, seq, __shfl_sync(~0u, scalars.D, head - first), lane, TOKENS,
                 y + (i64(blockIdx.y) * TOKENS + g) * INNER + head * HEAD_DIM + p0 + 4 * t);
    }
}
