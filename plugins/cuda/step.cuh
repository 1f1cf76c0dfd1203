// A row's plan (plugins/cursors.py, Step) and what every recurrence derives from it.
#pragma once
#include "types.cuh"

constexpr int STEP_WORDS = 8, TURN_WORD = 6;

struct Row {
    i64 slot;       // -1 for a padding row
    int committed;  // tokens that are final before the step
    int folded;     // tokens that the checkpoint holds; 0: it must not be read
    int fold_to;    // tokens that it holds after the step
    int tokens;     // valid tokens of this step

    __device__ int history() const { return committed - folded; }
    __device__ bool folds() const { return fold_to > folded; }
    __device__ bool absorbs() const { return fold_to > committed; }
    // Entries of the sequence history, then tokens, that the checkpoint takes up in this step.
    __device__ int fold_entries() const { return !folds() ? 0 : absorbs() ? history() + tokens : history(); }
};

__device__ __forceinline__ Row load_row(const int* step, int row, int max_tokens) {
    const int4 head = *reinterpret_cast<const int4*>(step + i64(row) * STEP_WORDS);
    const int query_len = step[i64(row) * STEP_WORDS + 4];
    return {head.x, head.y, head.z, head.w, min(query_len, max_tokens)};
}

// The row that is number `turn` of the plan's order, and its number: rows that fold, which takes longer, come first. meanwhile(): called
// while its plan is on its way.
struct RowInTurn : Row {
    int number;
};

template <typename Meanwhile>
__device__ __forceinline__ RowInTurn load_row_in_turn(const int* step, int turn, int max_tokens, Meanwhile meanwhile) {
    const int4* rows = reinterpret_cast<const int4*>(step);
    constexpr int VECTORS = STEP_WORDS / 4;
    int4 head = rows[turn * VECTORS], rest = rows[turn * VECTORS + 1];
    static_assert(TURN_WORD == 6, "rest.z");
    meanwhile();
    const int number = turn + rest.z;
    // Most steps fold all rows or none, and then a row is taken up in its own turn: its plan is there already.
    if (number != turn) head = rows[number * VECTORS], rest = rows[number * VECTORS + 1];
    return {{head.x, head.y, head.z, head.w, min(rest.x, max_tokens)}, number};
}
__device__ __forceinline__ RowInTurn load_row_in_turn(const int* step, int turn, int max_tokens) {
    return load_row_in_turn(step, turn, max_tokens, [] {});
}
