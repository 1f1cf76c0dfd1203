// replayssm::advance: cursors to step info, one thread a row. Contract: plugins/advance.py.
//
// Macros: WINDOW, CURSOR_WORDS. ``token_ids`` is not read: a TensorRT layer learns T from its shape.
#include "step.cuh"

constexpr int MODE_FLUSH = 1, MODE_ABSORB = 2;

extern "C" __global__ void __launch_bounds__(128)
    advance(const int* cursors, const int* slot_ids, const int* query_lens, const int* modes, const int* /*token_ids*/,
            int rows, int tokens, int* step, int* cursors_out) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const int slot = slot_ids[row];
    int4 head = {slot, 0, 0, 0};
    int query_len = 0, seed = 0;
    if (slot >= 0) {
        const i64 at = i64(slot) * CURSOR_WORDS;
        const int committed = cursors[at], folded = cursors[at + 1], history = committed - folded, mode = modes[row];
        query_len = query_lens[row], seed = cursors[at + 2];
        const bool absorb = mode == MODE_ABSORB || (tokens == 1 && history + 1 >= WINDOW);
        const bool flush = mode == MODE_FLUSH || history + tokens > WINDOW;
        const int fold_to = absorb ? committed + query_len : flush ? committed : folded;
        head = {slot, committed, folded, fold_to};
        cursors_out[at + 1] = fold_to;
    }
    int4* out = reinterpret_cast<int4*>(step + i64(row) * STEP_WORDS);
    out[0] = head;
    out[1] = {query_len, seed, 0, 0};
}
