// The course of the delta rule's prefill: one block a batch row and some value rows of one head.
//
// A block takes the row's sequence, history and tokens, in chunks. ROW_WARPS warps hold 16 value rows of the state each and take
// up a chunk, while the others, the makers, make of the next one what does not depend on the state. All meet once a chunk.
//
// Stages: delta_prefill_chunk.cuh (inputs), gated_delta_makers.cuh or kda_makers.cuh, delta_prefill_rows.cuh.
#pragma once
#include "delta_prefill_rows.cuh"
#include "ptx/barriers.cuh"

constexpr int ALL_WARPS = 1, MAKERS = 2, STATE_READ = 3;  // named barriers

__device__ __forceinline__ int threads_of(int barrier) { return barrier == MAKERS ? 32 * MAKER_WARPS : BLOCK_THREADS; }
// Waits until all threads of the barrier are here.
__device__ __forceinline__ void meet(int barrier) { sync_threads(barrier, threads_of(barrier)); }
// Lets them go on, without waiting for them.
__device__ __forceinline__ void pass(int barrier) { arrive_threads(barrier, threads_of(barrier)); }

// The zeros that the contract promises for tokens that do not exist.
__device__ __forceinline__ void zero_tokens(const Work& w, int valid) {
    constexpr int UNITS = SLICE / UNIT;
#pragma unroll 1
    for (int at = threadIdx.x; at < (w.t.tokens - valid) * UNITS; at += BLOCK_THREADS)
        *reinterpret_cast<uint4*>(w.o(valid + at / UNITS) + UNIT * (at % UNITS)) = {0, 0, 0, 0};
}

template <typename Make>
__device__ __forceinline__ void make_chunks(const Work& w, Make make) {
#pragma unroll 1
    for (int index = 0, chunks = chunk_count(w.row); index < chunks; ++index) {
        make(index);
        meet(ALL_WARPS);
    }
}

// Where keys and queries of two chunks do not fit beside each other, makers wait until the state has answered those of the
// chunk before.
__device__ __forceinline__ void release_reads() {
    if (PER_CHANNEL) pass(STATE_READ);
}

// `work()`: the block's, read again where it is needed, so that no register holds it while the state answers.
template <typename Load>
__device__ __forceinline__ void take_chunks(const Shared& shared, u32 lane, Load work) {
    RowState state;
    LoadedValues values;
    const Work first = work();
    values.load(first, Chunk(first, 0), lane);
    state.load(first, lane);
    release_reads();
#pragma unroll 1
    for (int index = 0;; ++index) {
        const u32 own = opaque(lane);
        meet(ALL_WARPS);
        const Stage& stage = shared.stage[index % 2];
        Entries x, outputs;
        state.answer(x, outputs, values, shared, stage, own, release_reads);
        const Work w = work();
        const Chunk chunk(w, index);
        if (chunk.tokens) outputs.store(w, chunk, own);
        if (chunk.appends(w)) values.append(w, chunk, own);
        values.load(w, Chunk(w, index + 1), own);
        state.update(x, stage, own);
        if (index + 1 == folded_chunks(w.row)) state.store(w, own);
        if (index + 1 == chunk_count(w.row)) break;
    }
}

// An nvfp4 copy has a scale of the whole head, which its blocks find together.
#if READ_BITS == 4 && SPLIT > 1
#define HEAD_CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define HEAD_CLUSTER
#endif

// `make`: the work of a maker.
template <typename Make>
__device__ __forceinline__ void delta_prefill(Shared& shared, const Tensors& t, const int* step, Make make) {
    const auto work = [&] {
        const int row = opaque(int(blockIdx.y));
        return Work{t, {load_row(step, row, t.tokens), row}, 0};
    };
    const Work w = work();
    const int valid = w.row.slot < 0 ? 0 : w.row.tokens;
    zero_tokens(w, valid);
    if (valid == 0) return;

    const u32 lane = threadIdx.x % 32;
    const int warp = warp_index();
    if (warp < ROW_WARPS)
        take_chunks(shared, lane, work);
    else
        make(w, warp - ROW_WARPS, lane);

    if constexpr (READ_BITS > 0) {
        const Work written = work();
        if (written.row.folds())
            write_copy<SLICE, KEY_DIM, BLOCK_THREADS, SPLIT>(t.state_out + written.state_at(0), written.copy());
    }
}
