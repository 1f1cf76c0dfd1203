// Stage 1 of mamba2_step: where the entries of a row's sequence lie.
//
// The sequence of a row is its history (live ring rows, oldest first), then the step's tokens: entries 0 ... length - 1.
// Entry j of the history is position folded + j, kept in ring row (folded + j) % RING_ROWS; entry history + i is token i.
#pragma once
#include "mamba2_shape.cuh"
#include "rows.cuh"
#include "scalars.cuh"
#include "step.cuh"

struct Inputs {
    const ACT* xbc;
    const ACT* dt;
    const float* A_log;
    const float* dt_bias;
    const float* D;
    const STATE* state;
    const ACT* ring_x;
    const ACT* ring_b;
    const float* ring_dt;
    int xbc_stride, dt_stride;
};

// Entries of a sequence, or of a piece of one: the first `history` come from the ring, the rest are tokens of this step.
struct Extent {
    int history, length;
};

// Whether block b of 16 entries is worked on. The first always is, without a branch: entries that do not exist weigh nothing.
__device__ __forceinline__ bool is_needed(int b, int length) { return b == 0 || 16 * b < length; }

// Elements from slot to slot.
struct SlotStrides {
    int state, ring_x, ring_b, ring_dt;
};

// A row's sequence, with all addresses of the row applied.
struct Sequence : Extent {
    Row row;
    Inputs in;  // xbc and dt at the row's first token, the pools at the row's slot

    // `all`: inputs of the launch, in which the row is number `number`.
    __device__ __forceinline__ Sequence(const Row& r, int number, const Inputs& all, const SlotStrides& stride)
        : Extent{r.history(), r.history() + r.tokens}, row(r), in(all) {
        const i64 token = i64(number) * TOKENS;
        in.xbc += token * in.xbc_stride, in.dt += token * in.dt_stride;
        in.state += row.slot * stride.state;
        in.ring_x += row.slot * stride.ring_x, in.ring_b += row.slot * stride.ring_b, in.ring_dt += row.slot * stride.ring_dt;
    }
    __device__ bool is_token(int j) const { return j >= history; }
    // An entry that exists: behind the end, the last one. What is read there is finite and multiplied by zero.
    __device__ int existing(int j) const { return max(min(j, length - 1), 0); }
    __device__ int ring_row(int j) const { return (row.folded + j) % RING_ROWS; }
    __device__ const ACT* x(int j, int head) const {
        return is_token(j) ? in.xbc + i64(j - history) * in.xbc_stride + head * HEAD_DIM
                           : in.ring_x + (head * RING_ROWS + ring_row(j)) * HEAD_DIM;
    }
    // Elements from an entry's x to that of the next head.
    __device__ int x_step(int j) const { return is_token(j) ? HEAD_DIM : RING_ROWS * HEAD_DIM; }
    __device__ const ACT* b(int j, int group) const {
        return is_token(j) ? in.xbc + i64(j - history) * in.xbc_stride + INNER + group * STATE_SIZE
                           : in.ring_b + (group * RING_ROWS + ring_row(j)) * STATE_SIZE;
    }
    __device__ const ACT* c(int i, int group) const {
        return in.xbc + i64(i) * in.xbc_stride + INNER + (GROUPS + group) * STATE_SIZE;
    }
};

// The ring of the row's slot, for the tokens that it takes up; a row whose tokens are folded at once has none.
struct RingOut {
    ACT *x, *b;
    float* dt;
    bool appends;
};

// What a block works on: heads of one group.
struct Heads {
    int first, count, group;

    __device__ __forceinline__ explicit Heads(int number)
        : first(blockIdx.x * number), count(number), group(first / HEADS_A_GROUP) {}
    __device__ bool lead_group() const { return first % HEADS_A_GROUP == 0; }
};
