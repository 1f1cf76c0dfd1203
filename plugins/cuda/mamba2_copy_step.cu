// replayssm::mamba2 for decode and verify steps (T <= 16) of layers with a read copy, with 16-bit activations. Contract:
// plugins/mamba2.py.
//
// First every warp reads whole heads of the copy and works out their outputs, on its own but for B . C of the group, which
// the block's warps share. Then, where the row folds, the block's warps fold head by head, 16 rows of the checkpoint each.
//
// Stages: mamba2_load.cuh, mamba2_replay.cuh, mamba2_copy_read.cuh, mamba2_copy_fold.cuh. Macros: mamba2_shape.cuh, READ_BITS
// (read_copy.cuh).
#include "mamba2_copy_fold.cuh"
#include "mamba2_copy_read.cuh"

// Compiled for compute capability 10, steps spill with the registers that WARPS_AN_SM leaves on 9.0.
#if __CUDA_ARCH__ >= 1000
constexpr int WARPS_HELD = WARPS_AN_SM < 8 ? WARPS_AN_SM : 8;
#else
constexpr int WARPS_HELD = WARPS_AN_SM;
#endif

// Entry tiles whose x is requested with the codes; further ones are read where they are needed.
constexpr int AHEAD = ENTRY_TILES <= 4 ? ENTRY_TILES : 0;

// A head's share of the sequence, on its way while the head before is computed.
struct ReadInputs {
    LaneX x[AHEAD > 0 ? AHEAD : 1][2];
    float dt[ENTRY_LANES];
};

// An entry that exists: number 8 s + 2 t + e of the lane, or the last one.
__device__ __forceinline__ int lane_entry(const Sequence& seq, int s, int e, int lane) { return seq.existing(8 * s + 2 * (lane % 4) + e); }

// The lane's channels of x of such an entry.
__device__ __forceinline__ const ACT* lane_x(const Sequence& seq, int head, int j, int lane) {
    const int from_token = (j - seq.history) * seq.in.xbc_stride + head * HEAD_DIM;
    const int from_ring = (head * RING_ROWS + seq.ring_row(j)) * HEAD_DIM;
    return (seq.is_token(j) ? seq.in.xbc : seq.in.ring_x) + (seq.is_token(j) ? from_token : from_ring) + LANE_ROWS * (lane / 4);
}

// Requests a head's share. Its addresses are worked out anew instead of being kept from head to head: registers are short.
__device__ __forceinline__ void request(ReadInputs& in, const Sequence& seq, int head, int lane) {
#pragma unroll
    for (int b = 0; b < ENTRY_LANES; ++b)
        in.dt[b] = lane + 32 * b < seq.history ? seq.in.ring_dt[head * RING_ROWS + seq.ring_row(lane + 32 * b)] : 0.0f;
#pragma unroll
    for (int s = 0; s < AHEAD; ++s)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (s == 0 || 8 * s < seq.length) in.x[s][e].load(lane_x(seq, head, lane_entry(seq, s, e, lane), lane));
}

// B . C of a group, tile by tile of 8 entries. Where `append` says so, the tokens' B rows go into the ring.
__device__ __forceinline__ void share_products(KeptProducts& out, const Sequence& seq, int group, int warp, int lane, bool append,
                                               ACT* ring_b_out) {
    if (warp >= ENTRY_TILES) return;
    TokenC c;
    c.load(seq, group, seq.row.tokens, lane);
    for (int n = warp; n < ENTRY_TILES; n += WARPS)
        if (n == 0 || 8 * n < seq.length) tile_products(out, n, seq, c, group, lane, append, ring_b_out);
}

// Stores the tokens' x and time steps in the ring, of all heads of the block; `ring_x` and `ring_dt` are the slot's.
__device__ __forceinline__ void append(const Sequence& seq, const SharedScalars& scalars, int first, int heads, ACT* ring_x,
                                       float* ring_dt) {
    constexpr int UNITS = HEAD_DIM / 8;
    const int tokens = seq.row.tokens;
    for (int at = threadIdx.x; at < tokens * heads * UNITS; at += 32 * WARPS) {
        const int i = at / (heads * UNITS), unit = at % (heads * UNITS), head = first + unit / UNITS;
        const uint4 x = *reinterpret_cast<const uint4*>(seq.in.xbc + i64(i) * seq.in.xbc_stride + first * HEAD_DIM + 8 * unit);
        const int row = head * RING_ROWS + seq.ring_row(seq.history + i);
        *reinterpret_cast<uint4*>(ring_x + row * HEAD_DIM + 8 * (unit % UNITS)) = x;
        if (unit % UNITS == 0) ring_dt[row] = scalars.dt[head - first][i];
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, WARPS_HELD < WARPS ? 1 : WARPS_HELD / WARPS)
    mamba2_copy_step(const ACT* xbc, const ACT* dt, const float* A_log, const float* dt_bias, const float* D, const int* step,
                     const STATE* state, const ACT* ring_x, const ACT* ring_b, const float* ring_dt, COPY_INPUTS int /*tokens*/,
                     int xbc_stride, int dt_stride, int state_stride, int ring_x_stride, int ring_b_stride, int ring_dt_stride,
                     COPY_STRIDES int heads_per_block, ACT* y, STATE* state_out, ACT* ring_x_out, ACT* ring_b_out,
                     float* ring_dt_out COPY_OUTPUTS) {
    __shared__ KeptProducts bc;
    __shared__ CopyC c;
    __shared__ SharedScalars scalars;
    __shared__ WarpMagnitudes magnitudes;
    __shared__ SharedB b;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.x * heads_per_block, last = first + heads_per_block, group = first / HEADS_A_GROUP;
    // Each stage asks for the row's sequence itself, so that nothing of it is kept in registers in between.
    const auto sequence = [&] {
        int at = blockIdx.y;
        asm volatile("" : "+r"(at));
        const Row row = load_row(step, at, TOKENS);
        const i64 token = i64(at) * TOKENS;
        return Sequence{{row.history(), row.history() + row.tokens},
                        row,
                        int(row.slot),
                        {xbc + token * xbc_stride, dt + token * dt_stride, A_log, dt_bias, D, state + row.slot * state_stride,
                         ring_x + row.slot * ring_x_stride, ring_b + row.slot * ring_b_stride,
                         ring_dt + row.slot * ring_dt_stride, xbc_stride, dt_stride}};
    };
    y += i64(blockIdx.y) * TOKENS * INNER + LANE_ROWS * g;
    {
        Sequence seq = sequence();
        const Row& row = seq.row;
        if (row.slot < 0) {
            const HeadOutputs none = {};
            for (int head = first + warp; head < last; head += WARPS) store_outputs(none, 0, t, y + head * HEAD_DIM);
            return;
        }
        const ReadCopy copy = COPY_OF_SLOT(row.slot);
        const bool has_checkpoint = row.folded > 0;

        // Without a checkpoint the codes stay zero: nothing is ever loaded into them.
        CopyRows rows(copy, first + warp, lane);
        CopyTile tiles[SLOTS];
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            tiles[i].clear();
            if (has_checkpoint && first + warp < last) tiles[i].load(rows, i);
        }
        ReadInputs in;
        if (first + warp < last) request(in, seq, first + warp, lane);
        scalars.fill(seq, copy, first, heads_per_block);
        share_products(bc, seq, group, warp, lane, !row.absorbs() && first % HEADS_A_GROUP == 0, ring_b_out + row.slot * ring_b_stride);
        for (int n = WARPS - 1 - warp; n < TOKEN_TILES; n += WARPS) c.fill(n, seq, group, row.tokens, lane);
        __syncthreads();

        for (int head = first + warp; head < last; head += WARPS) {
            // What follows from the lane is worked out anew for every head, too.
            int own = lane;
            asm volatile("" : "+r"(own));
            const Decays decays = scalars.decays(in.dt, seq, head - first, own);
            HeadOutputs out;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                tiles[i % SLOTS].keep();
                multiply_tile(out.v[i], tiles[i % SLOTS], c);
                if (i + SLOTS == TILES) rows.advance(WARPS);
                if (has_checkpoint && (i + SLOTS < TILES || head + WARPS < last))
                    tiles[i % SLOTS].load(rows, (i + SLOTS) % TILES);
            }
            seq.forget_addresses();
            const auto x = [&](int s, int e) {
                if constexpr (AHEAD > 0) return in.x[s][e];
                LaneX later;
                later.load(lane_x(seq, head, lane_entry(seq, s, e, own), own));
                return later;
            };
            finish(out, c, bc, decays, seq, scalars.copy_scale[head - first], scalars.D[head - first], own, x);
            seq.forget_addresses();
            if (head + WARPS < last) request(in, seq, head + WARPS, own);
            store_outputs(out, row.tokens, own % 4, y + head * HEAD_DIM);
        }
    }
    const Sequence seq = sequence();
    if (!seq.row.absorbs())
        append(seq, scalars, first, heads_per_block, ring_x_out + seq.row.slot * ring_x_stride,
               ring_dt_out + seq.row.slot * ring_dt_stride);
    if (!seq.row.folds()) return;
    // No warp reads codes any more that another is about to replace.
    __syncthreads();
    fold_heads(seq, scalars, first, heads_per_block, state_out + seq.row.slot * state_stride, COPY_OF_SLOT(seq.row.slot),
               RandomSource{step, int(blockIdx.y)}, magnitudes, b);
}
