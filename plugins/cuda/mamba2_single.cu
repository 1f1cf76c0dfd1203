// replayssm::mamba2 for steps of one token whose rows are too few to fill the device, with 16-bit activations and at most 16
// entries. Contract: plugins/mamba2.py.
//
// A warp works on 16 rows of one head's state and works out for itself what the ring contributes, for which mamba2_step has the
// warps of a block, barriers and shared memory. That is more work, but in a small batch only the way from the launch to the
// outputs counts: all that a warp reads is on its way as soon as it knows the row's plan, and what does not depend on the plan
// before. Every number is formed as in mamba2_step, whose bits these are.
//
// Macros: mamba2_shape.cuh (TOKENS and HEADS_A_BLOCK are 1), WARPS_A_BLOCK.
#include "mamba2_single.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS_A_BLOCK, WARPS_AN_SM / WARPS_A_BLOCK)
    mamba2_single(const ACT* xbc, const ACT* dt, const float* A_log, const float* dt_bias, const float* D, const int* step,
                  const STATE* state, const ACT* ring_x, const ACT* ring_b, const float* ring_dt, int /*tokens*/, int xbc_stride,
                  int dt_stride, int state_stride, int ring_x_stride, int ring_b_stride, int ring_dt_stride,
                  int /*heads_per_block*/, ACT* y, STATE* state_out, ACT* ring_x_out, ACT* ring_b_out, float* ring_dt_out) {
    const int lane = threadIdx.x % 32, number = blockIdx.y;
    const Span span(blockIdx.x * WARPS_A_BLOCK + threadIdx.x / 32);
    if (INNER / 16 % WARPS_A_BLOCK && span.channel >= INNER) return;
    const RequestedRow plan(step, number);
    const TokenScalars scalars(dt + i64(number) * dt_stride, A_log, dt_bias, D, span.head);
    const Sources from(xbc + i64(number) * xbc_stride, ring_x, ring_b, ring_dt, state, span, lane);
    Pairs c[BLOCKS];
    request_operand(c, from.token_c);
    y += i64(number) * INNER + span.channel;
    // Here and below: keeps the compiler from asking later.
    __syncwarp();

    const Row row = plan.row();
    if (row.slot < 0) {
        if (lane < 16) y[lane] = from_float<ACT>(0.0f);
        return;
    }
    const Entries entries(row, from, {state_stride, ring_x_stride, ring_b_stride, ring_dt_stride});
    const STATE* rows = from.state + row.slot * state_stride;
    StateChunk chunks[CHUNKS];
    if (row.folded > 0) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) chunks[i].load<false>(rows + i * CHUNK_COLUMNS, lane % 4);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) chunks[i].clear();
    }
    const float history_dt = entries.request_dt(lane);
    EntryX x;
    x.request(entries, lane);
    EntryB b;
    b.request(entries, lane);
    __syncwarp();

    const int token = row.history(), length = token + row.tokens;
    float step_size = 0.0f;
    // A branch that is always taken keeps the compiler from waiting for the time step between the requests.
    if (row.tokens > 0) step_size = scalars.step_size();
    const float steps[1] = {lane < token ? history_dt : lane < length ? step_size : 0.0f};
    const Decays decays(steps, scalars.rate(), lane);
    const EntryWeights weights(decays, b.products(c), token, length, scalars.D, lane);
    const Matrices entry_x = x.transposed(length, lane);
    StateProducts<STATE> products = {};
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        chunks[i].keep();
#pragma unroll
        for (int k = 0; k < BLOCKS_A_CHUNK; ++k) products.add(chunks[i].v[k], c[i * BLOCKS_A_CHUNK + k], Pairs{});
    }
    Outputs out = products.sum();
    weights.finish(out, row.folded > 0, entry_x);
    // All tokens of a product's tile are the one, so that lanes of different g may store different channels.
    if (lane < 8) {
        const u32 first = pack_pair<ACT>(out.v[0].v[0], out.v[0].v[1]), last = pack_pair<ACT>(out.v[1].v[0], out.v[1].v[1]);
        *reinterpret_cast<u32*>(y + 2 * lane) = length == token ? 0 : lane < 4 ? first : last;
    }

    if (!row.absorbs() && length > token) {
        const int at = entries.row(token);
        if (span.leads_head() && lane == 0) ring_dt_out[row.slot * ring_dt_stride + span.dt() + at] = step_size;
        x.append(ring_x_out + row.slot * ring_x_stride + span.x() + at * HEAD_DIM, token, lane);
        if (span.leads_group()) b.append(ring_b_out + row.slot * ring_b_stride + span.b() + at * STATE_SIZE, token, lane);
    }
    if (row.folds()) {
        const int folded_entries = row.absorbs() ? length : token;
        const SpanUpdates updates(decays, entry_x, folded_entries, lane);
        const RandomSource random = {step, number};
        const int element = (span.channel + lane / 4) * STATE_SIZE;
        STATE* rows_out = state_out + row.slot * state_stride + element;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
#pragma unroll
            for (int k = 0; k < BLOCKS_A_CHUNK; ++k) {
                const int block = i * BLOCKS_A_CHUNK + k;
                const FoldedB folded_b(entries, folded_entries, block, lane);
                StatePairs<STATE> folded[2];
                fold_block(folded, chunks[i].v[k], updates, folded_b, block, lane, rows_out + i * CHUNK_COLUMNS, k, random,
                           element + i * CHUNK_COLUMNS);
            }
        }
    }
}
