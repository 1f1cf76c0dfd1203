// replayssm::mamba2 for decode and verify steps (T <= 16) with 16-bit activations. Contract: plugins/mamba2.py.
//
// A warp owns 16 rows of the state of each head of its block and needs no other warp: no shared memory, no barrier. It runs
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
    y += i64(blockIdx.y) * TOKENS * INNER;
    if (row.slot < 0) {
        for (int at = threadIdx.x; at < TOKENS * heads_per_block * HEAD_DIM; at += 32 * WARPS) {
            const int width = heads_per_block * HEAD_DIM;
            y[at / width * INNER + first * HEAD_DIM + at % width] = from_float<ACT>(0.0f);
        }
        return;
    }
    const i64 token = i64(blockIdx.y) * TOKENS;
    Sequence seq = {row,
                          row.history(),
                          row.history() + row.tokens,
                          {xbc + token * xbc_stride, dt + token * dt_stride, A_log, dt_bias, D, state + row.slot * state_stride,
                           ring_x + row.slot * ring_x_stride, ring_b + row.slot * ring_b_stride,
                           ring_dt + row.slot * ring_dt_stride, xbc_stride, dt_stride}};
    ring_x_out += row.slot * ring_x_stride;
    ring_b_out += row.slot * ring_b_stride;
    ring_dt_out += row.slot * ring_dt_stride;
    const bool appends = !row.absorbs(), has_checkpoint = row.folded > 0;
    const int entries = row.fold_entries();
    const i64 lane_row = i64(p0 + state_row(g)) * STATE_SIZE, head_size = HEAD_DIM * STATE_SIZE;
    const STATE* rows = seq.in.state + lane_row;
    STATE* rows_out = state_out + row.slot * state_stride + lane_row;

    Chunk state_rows;
    HeadInputs in;
    state_rows.load(rows + first * head_size, 0, t, has_checkpoint);
    in.load(seq, first, p0, lane);
    TokenC c;
    c.load(seq, group, lane);
    GroupProducts bc;
    group_products(bc, seq, c, group, lane, appends && p0 == 0 && first % HEADS_A_GROUP == 0, ring_b_out);

    for (int head = first; head < last; ++head) {
        Decays decays;
        decays.compute(in, seq, lane);
        StateProducts products = {};
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            c.keep();
            products.add(state_rows, c, chunk);
            if (row.folds()) {
                seq.forget_addresses();
                const Updates updates(in, decays, entries, lane);
                fold(state_rows, updates, seq, group, entries, chunk, lane, rows_out + head * head_size);
            }
            if (chunk + 1 < CHUNKS)
                state_rows.load(rows + head * head_size, chunk + 1, t, has_checkpoint);
            else if (head + 1 < last)
                state_rows.load(rows + (head + 1) * head_size, 0, t, has_checkpoint);
        }
        seq.forget_addresses();
        const HeadInputs current = in;
        if (head + 1 < last) in.load(seq, head + 1, p0, lane);
        if (appends) append(current, decays, seq, head, p0, lane, p0 == 0, ring_x_out, ring_dt_out);
        read_out(products, bc, current, decays, seq, lane, y + head * HEAD_DIM + p0);
    }
}
