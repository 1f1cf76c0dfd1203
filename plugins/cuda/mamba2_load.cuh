// Stage 1 of mamba2_step: where the entries of a row's sequence lie, and a head's share of them.
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

// A row's sequence, with all addresses of the row applied.
struct Sequence : Extent {
    Row row;
    int slot;
    Inputs in;  // xbc and dt at the row's first token, the pools at the row's slot

    // Makes addresses of entries be computed anew instead of being kept in registers from head to head.
    __device__ __forceinline__ void forget_addresses() { asm volatile("" : "+r"(row.folded), "+r"(history), "+r"(slot)); }
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
    // Elements from b_base(j) to B_j: half the registers of an address.
    __device__ int b_offset(int j, int group) const {
        return is_token(j) ? (j - history) * in.xbc_stride + INNER + group * STATE_SIZE
                           : (group * RING_ROWS + ring_row(j)) * STATE_SIZE;
    }
    __device__ const ACT* b_base(int j) const { return is_token(j) ? in.xbc : in.ring_b; }
    __device__ const ACT* b(int j, int group) const { return b_base(j) + b_offset(j, group); }
    __device__ const ACT* c(int i, int group) const {
        return in.xbc + i64(i) * in.xbc_stride + INNER + (GROUPS + group) * STATE_SIZE;
    }
};

// A warp's part of the state: 16 rows and BLOCKS_A_CHUNK blocks of columns. Row g of the products is state row state_row(g).
struct Chunk {
    StatePairs<STATE> v[BLOCKS_A_CHUNK][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; k < BLOCKS_A_CHUNK; ++k) v[k][0].clear(), v[k][1].clear();
    }
    // Keeps the compiler from preparing operands where the chunk is loaded: it would wait for memory there.
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (int k = 0; k < BLOCKS_A_CHUNK; ++k) v[k][0].keep(), v[k][1].keep();
    }
    // `rows`: this lane's first row, at the chunk's first block.
    __device__ __forceinline__ void load(const STATE* rows, int t) {
        // One register pair and constant offsets, instead of an address for every access.
        asm volatile("" : "+l"(rows));
#pragma unroll
        for (int k = 0; k < BLOCKS_A_CHUNK; ++k) v[k][0].load(rows, k, t), v[k][1].load(rows + 2 * STATE_SIZE, k, t);
    }
};

// Row g of a warp's 16 is p = 4 (g / 2) + g % 2 and row g + 8 the one two behind: then four adjacent channels of x, read with
// one access, are what two transposed 8 x 8 matrices need.
__device__ __forceinline__ int state_row(int g) { return 4 * (g / 2) + g % 2; }

// Scalars of the block's heads: lane l holds those of head first + l.
struct HeadScalars {
    float rate, D;  // rate = log2(e) A: 2^(rate * sum of dt) is the decay

    __device__ __forceinline__ void load(const Inputs& in, int first, int heads, int lane) {
        const int head = first + min(lane, heads - 1);
        rate = -LOG2_E * expf(in.A_log[head]);
        D = in.D[head];
    }
};

// Time steps of the step's tokens for all heads of the block: lane l of word w holds number 32 w + l = (head - first) TOKENS + i.
struct TokenSteps {
    static constexpr int WORDS = (HEADS_A_BLOCK * TOKENS + 31) / 32;
    float v[WORDS];

    __device__ __forceinline__ void load(const Inputs& in, int first, int heads, int tokens, int lane) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const int head = first + (32 * w + lane) / TOKENS, i = (32 * w + lane) % TOKENS;
            v[w] = 0.0f;
            if (head >= first + heads || i >= tokens) continue;
            const float raw = to_float(in.dt[i64(i) * in.dt_stride + head]) + in.dt_bias[head];
            v[w] = fminf(fmaxf(softplus(raw), DT_MIN), DT_MAX);
        }
    }
    __device__ __forceinline__ float get(int number) const {
        float found = __shfl_sync(~0u, v[0], number & 31);
#pragma unroll
        for (int w = 1; w < WORDS; ++w) {
            const float other = __shfl_sync(~0u, v[w], number & 31);
            if (number >= 32 * w) found = other;
        }
        return found;
    }
};

// A head's share of the sequence. x: entries 16 b + 8 s + g, channels 4t ... 4t + 3 of the warp's 16. dt: entries lane + 32 b
// of the history.
struct HeadInputs {
    uint2 x[ENTRY_BLOCKS][2];
    float dt[ENTRY_LANES];
};

// Where the next head's share lies; moves from head to head.
struct HeadCursor {
    const ACT* x[ENTRY_BLOCKS][2];
    const float* dt;
    int dt_row[ENTRY_LANES];

    __device__ __forceinline__ HeadCursor(const Sequence& seq, int head, int p0, int lane) {
        dt = seq.in.ring_dt + head * RING_ROWS;
#pragma unroll
        for (int b = 0; b < ENTRY_LANES; ++b) dt_row[b] = seq.ring_row(lane + 32 * b);
#pragma unroll
        for (int b = 0; b < ENTRY_BLOCKS; ++b)
#pragma unroll
            for (int s = 0; s < 2; ++s) x[b][s] = seq.x(seq.existing(16 * b + 8 * s + lane / 4), head) + p0 + 4 * (lane % 4);
    }
    __device__ __forceinline__ void take(HeadInputs& out, const Sequence& seq, int lane) {
#pragma unroll
        for (int b = 0; b < ENTRY_LANES; ++b) out.dt[b] = lane + 32 * b < seq.history ? dt[dt_row[b]] : 0.0f;
        dt += RING_ROWS;
#pragma unroll
        for (int b = 0; b < ENTRY_BLOCKS; ++b)
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                if (is_needed(b, seq.length)) out.x[b][s] = load_8_bytes(x[b][s]);
                x[b][s] += seq.x_step(seq.existing(16 * b + 8 * s + lane / 4));
            }
    }
};
