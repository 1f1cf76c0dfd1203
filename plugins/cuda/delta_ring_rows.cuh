// The ring's live rows on their way to shared memory: neighbours but where the ring wraps, so that a copy takes many of them.
#pragma once
#include "delta_shape.cuh"
#include "ptx/bulk_copy.cuh"

// copy(entry, ring row, how many), twice if the ring wraps.
template <typename Copy>
__device__ __forceinline__ void for_ring_spans(const Work& w, Copy copy) {
    const int history = w.row.history(), first = w.history_row(0), before = min(history, RING_ROWS - first);
    if (history == 0) return;
    copy(0, first, before);
    if (before < history) copy(before, 0, history - before);
}
