// The step of a delta-rule layer: one block a batch row, value head and slice of value rows.
#pragma once
#include "delta_chunk.cuh"
#include "delta_read.cuh"
#include "delta_recurrent.cuh"

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int SHARED_BYTES = larger(READS ? sizeof(ReadShared) : 0, CHUNKED ? sizeof(ChunkShared) : sizeof(RecurrentShared));

__device__ __forceinline__ void delta_step(const Tensors& t, const int* step) {
    static_assert(SHARED_BYTES <= SHARED_LIMIT, "the block needs too much shared memory");
    __shared__ __align__(128) unsigned char memory[SHARED_BYTES];
    const Work w{t, load_row(step, blockIdx.y, t.tokens)};
    const int valid = w.row.slot < 0 ? 0 : w.row.tokens;
    zero_padding(w, valid);
    if (!valid) return;
    if constexpr (READS) {
        if (!w.row.folds() && w.row.history() <= READ_HISTORY && w.row.tokens <= TOKENS) {
            read_step(w, *reinterpret_cast<ReadShared*>(memory));
            return;
        }
    }
    if constexpr (CHUNKED)
        chunk_step(w, *reinterpret_cast<ChunkShared*>(memory));
    else
        recurrent_step(w, *reinterpret_cast<RecurrentShared*>(memory));
}
