// replayssm::advance: cursors to step info, by one block. Contract: plugins/advance.py.
//
// Macros: WINDOW, CURSOR_WORDS, THREADS. ``token_ids`` is not read: a TensorRT layer learns T from its shape.
#include "step.cuh"

constexpr int MODE_FLUSH = 1, MODE_ABSORB = 2;

struct Cursors {
    const int *cursors, *slot_ids, *query_lens, *modes;
    int rows, tokens;

    // The plan of a row; of a padding row, and of one that does not exist, one that folds nothing.
    __device__ Row plan(int row) const {
        const int slot = row < rows ? slot_ids[row] : -1;
        if (slot < 0) return {slot, 0, 0, 0, 0};
        const i64 at = i64(slot) * CURSOR_WORDS;
        const int committed = cursors[at], folded = cursors[at + 1], history = committed - folded, mode = modes[row];
        const bool absorb = mode == MODE_ABSORB || (tokens == 1 && history + 1 >= WINDOW);
        const bool flush = mode == MODE_FLUSH || history + tokens > WINDOW;
        const int query_len = query_lens[row];
        return {slot, committed, folded, absorb ? committed + query_len : flush ? committed : folded, query_len};
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    advance(const int* cursors, const int* slot_ids, const int* query_lens, const int* modes, const int* /*token_ids*/,
            int rows, int tokens, int* step, int* cursors_out) {
    __shared__ int folding[THREADS / 32];
    const Cursors read = {cursors, slot_ids, query_lens, modes, rows, tokens};
    const int thread = threadIdx.x, lane = thread % 32;
    int others = 0;  // turn of the next row that does not fold: behind all that do
    for (int first = 0; first < rows; first += THREADS) others += __syncthreads_count(read.plan(first + thread).folds());
    int turn = 0;  // of the next row that folds
    for (int first = 0; first < rows; first += THREADS) {
        const int row = first + thread;
        const Row plan = read.plan(row);
        const u32 votes = __ballot_sync(~0u, plan.folds());
        if (lane == 0) folding[thread / 32] = __popc(votes);
        __syncthreads();
        int before = __popc(votes & ((1u << lane) - 1)), all = 0;
        for (int w = 0; w < THREADS / 32; ++w) {
            if (w < thread / 32) before += folding[w];
            all += folding[w];
        }
        __syncthreads();
        if (row < rows) {
            const i64 at = plan.slot * CURSOR_WORDS;
            int* out = step + i64(row) * STEP_WORDS;
            *reinterpret_cast<int4*>(out) = {int(plan.slot), plan.committed, plan.folded, plan.fold_to};
            *reinterpret_cast<int2*>(out + 4) = {plan.tokens, plan.slot < 0 ? 0 : cursors[at + 2]};
            out[7] = 0;
            const int own = plan.folds() ? turn + before : others + thread - before;
            step[i64(own) * STEP_WORDS + TURN_WORD] = row - own;
            if (plan.slot >= 0) cursors_out[at + 1] = plan.fold_to;
        }
        turn += all, others += THREADS - all;
    }
}
