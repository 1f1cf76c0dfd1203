// The step of a delta-rule layer: one block a batch row and some of its value heads, or a slice of one head's value rows.
#pragma once
#include "delta_chunk.cuh"
#include "delta_read.cuh"
#include "delta_recurrent.cuh"

// The recurrence token by token: with a window of 1, and for what the chunk form does not take.
constexpr bool RECURS = !CHUNKED || (TOKENS == 1 && WINDOW == 1);

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int SHARED_BYTES = larger(READS ? sizeof(ReadShared) : 0, RECURS ? sizeof(RecurrentShared) : sizeof(ChunkShared));

// All entries of a row, which the checkpoint takes up if the plan says so.
__device__ __forceinline__ void replay(const Work& block, unsigned char* memory) {
#pragma unroll 1
    for (int n = 0; n < HEADS_A_BLOCK; ++n) {
        const Work w = block.of_head(n);
        if constexpr (RECURS)
            recurrent_step(w, *reinterpret_cast<RecurrentShared*>(memory));
        else
            chunk_step(w, *reinterpret_cast<ChunkShared*>(memory));
    }
}

__device__ __forceinline__ void delta_step(const Tensors& t, const int* step) {
    static_assert(SHARED_BYTES <= SHARED_LIMIT, "the block needs too much shared memory");
    __shared__ __align__(128) unsigned char memory[SHARED_BYTES];
    Work block{t, load_row(step, blockIdx.y, t.tokens), 0};
    Row& row = block.row;
    if (row.slot < 0) row.tokens = 0;
    zero_padding(block, row.tokens);
    if (!row.tokens) return;
    // A flush folds the ring; then the tokens find an empty one.
    const int tokens = TOKENS == 1 ? 1 : row.tokens;
    if (row.folds() && !row.absorbs()) row.tokens = 0;
#pragma unroll 1
    while (true) {
        if constexpr (READS) {
            if (!row.folds() && row.history() <= READ_HISTORY && row.tokens <= TOKENS)
                return read_step(block, *reinterpret_cast<ReadShared*>(memory));
        }
        replay(block, memory);
        if (row.tokens) return;
        row.folded = row.fold_to, row.tokens = tokens;
        publish_stores();
    }
}
