// The step of a delta-rule layer: one block a batch row, value head and slice of value rows.
#pragma once
#include "delta_fold.cuh"
#include "delta_read.cuh"

__device__ __forceinline__ void delta_step(const Tensors& t, const int* step) {
    constexpr int BYTES = READS && sizeof(ReadShared) > sizeof(FoldShared) ? sizeof(ReadShared) : sizeof(FoldShared);
    static_assert(BYTES <= SHARED_LIMIT, "the block needs too much shared memory");
    __shared__ __align__(128) unsigned char memory[BYTES];
    const Work w{t, load_row(step, blockIdx.y, t.tokens)};
    const int valid = w.row.slot < 0 ? 0 : w.row.tokens;
    zero_padding(w, valid);
    if (!valid) return;
    if constexpr (READS) {
        if (!w.row.folds() && w.row.history() <= READ_HISTORY && w.row.tokens <= TOKENS) {
            read_step(t, w, *reinterpret_cast<ReadShared*>(memory));
            return;
        }
    }
    fold_step(t, w, *reinterpret_cast<FoldShared*>(memory));
}
