// replayssm::mamba2 for decode and verify steps (T <= 16) of layers with a read copy, with 16-bit activations. Contract:
// plugins/mamba2.py.
//
// The block's warps first work out together what the sequence contributes to its heads (mamba2_weights.cuh). Then every warp
// reads whole heads of the copy and answers from them, on its own. Where the row folds, the block's warps at last fold head by
// head, 16 rows of the checkpoint each.
//
// Stages: mamba2_load.cuh, mamba2_replay.cuh, mamba2_weights.cuh, mamba2_copy_read.cuh, mamba2_copy_fold.cuh. Macros:
// mamba2_shape.cuh, READ_BITS (read_copy.cuh).
#include "mamba2_copy_fold.cuh"
#include "mamba2_copy_read.cuh"

// Compiled for compute capability 10, steps spill with the registers that WARPS_AN_SM leaves on 9.0.
#if __CUDA_ARCH__ >= 1000
constexpr int WARPS_HELD = WARPS_AN_SM < 8 ? WARPS_AN_SM : 8;
#else
constexpr int WARPS_HELD = WARPS_AN_SM;
#endif

// What is in shared memory.
struct Shared {
    BlockWeights weights;
    CopyC c;
    SharedB b;
    WarpMagnitudes magnitudes;
};
static_assert(sizeof(Shared) <= 48 * 1024, "the block needs too much shared memory");

extern "C" __global__ void __launch_bounds__(32 * WARPS, WARPS_HELD < WARPS ? 1 : WARPS_HELD / WARPS)
    mamba2_copy_step(const ACT* xbc, const ACT* dt, const float* A_log, const float* dt_bias, const float* D, const int* step,
                     const STATE* state, const ACT* ring_x, const ACT* ring_b, const float* ring_dt, COPY_INPUTS int /*tokens*/,
                     int xbc_stride, int dt_stride, int state_stride, int ring_x_stride, int ring_b_stride, int ring_dt_stride,
                     COPY_STRIDES int heads_per_block, ACT* y, STATE* state_out, ACT* ring_x_out, ACT* ring_b_out,
                     float* ring_dt_out COPY_OUTPUTS) {
    __shared__ Shared shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Heads heads(heads_per_block);
    const RowInTurn row = load_row_in_turn(step, blockIdx.y, TOKENS);
    y += i64(row.number) * TOKENS * INNER + heads.first * HEAD_DIM;
    if (row.slot < 0) {
        const HeadOutputs none = {};
        for (int h = warp; h < heads.count; h += WARPS) store_outputs(none, 0, lane, y + h * HEAD_DIM);
        return;
    }
    const ReadCopy copy = COPY_OF_SLOT(row.slot);
    const bool has_checkpoint = row.folded > 0;
    // Without a checkpoint the codes stay zero: nothing is ever loaded into them.
    CopyRows rows(copy, heads.first + warp, lane);
    CopyTile tiles[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        tiles[i].clear();
        if (has_checkpoint && warp < heads.count) tiles[i].load(rows, i);
    }
    const Sequence seq(row, row.number, {xbc, dt, A_log, dt_bias, D, state, ring_x, ring_b, ring_dt, xbc_stride, dt_stride},
                       {state_stride, ring_x_stride, ring_b_stride, ring_dt_stride});
    const RingOut ring = {ring_x_out + row.slot * ring_x_stride, ring_b_out + row.slot * ring_b_stride,
                          ring_dt_out + row.slot * ring_dt_stride, !row.absorbs()};
    weigh_sequence(shared.weights, seq, heads, ring, warp, lane, [&](const TokenC&) {
        for (int n = WARPS - 1 - warp; n < TOKEN_TILES; n += WARPS) shared.c.fill(n, seq, heads.group, row.tokens, lane);
        if (row.folds()) shared.b.fill(seq, heads.group, row.fold_entries());
    });

    for (int h = warp; h < heads.count; h += WARPS) {
        const float head_scale = READ_BITS == 4 && has_checkpoint ? copy.head_scale[heads.first + h] : 1.0f;
        HeadOutputs out;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            tiles[i % SLOTS].keep();
            multiply_tile(out.v[i], tiles[i % SLOTS], shared.c);
            if (i + SLOTS == TILES) rows.advance(WARPS);
            if (has_checkpoint && (i + SLOTS < TILES || h + WARPS < heads.count))
                tiles[i % SLOTS].load(rows, (i + SLOTS) % TILES);
        }
        finish(out, shared.c, shared.weights, seq, head_scale, h, lane);
        store_outputs(out, row.tokens, lane, y + h * HEAD_DIM);
    }
    if (!row.folds()) return;
    // No warp reads codes any more that another is about to replace.
    __syncthreads();
    fold_heads(row, shared.weights, heads, state_out + row.slot * state_stride, copy, RandomSource{step, row.number},
               shared.magnitudes, shared.b);
}
