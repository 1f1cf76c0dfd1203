// The delta rule token by token for any shape, with a tile of the state in registers.
//
//     S = S diag(exp g),  u = beta (v - S k),  S = S + u k^T,  o = S q
//
// The ordinary recurrence: a token that is folded alone, as every token is with a window of 1. It also serves shapes that
// delta_chunk.cuh does not, and rings that hold u, which it adds up.
#pragma once
#include "delta_inputs.cuh"
#include "delta_read_shape.cuh"

// What a pass over a row's entries is for. With a read copy, answers come from it and folds from the checkpoint.
enum class Pass { BOTH, ANSWER, FOLD };

constexpr int LANES = 8;                  // lanes that share a state row
constexpr int COLS = KEY_PADDED / LANES;  // key columns of a thread: 4 (l + 8 m) + 0 ... 3
constexpr int TOGETHER = 8;               // entries that are staged at a time

// State rows of a thread: at most 64 values in registers, and no more rows than the slice fills.
constexpr int thread_rows(int rows) {
    return rows == 1 ? 1 : rows * COLS <= 64 && SLICE % (16 * rows) == 0 ? rows : thread_rows(rows / 2);
}
// Fewer where hardly any row recurs and the kernel needs its registers for others (delta_step.cuh: ALL_READ; KDA_VERIFIES;
// LONG_ROWS_RECUR of 16-bit states).
constexpr bool RARELY_RECURS =
    KDA_VERIFIES || (ANSWERS_FIRST && sizeof(STATE) == 2) ||
    (PER_CHANNEL && TOKENS == 1 && WINDOW > 1 && WIDE && !DERIVED && sizeof(ACT) == 2 && KEY_DIM == 32 * WARPS);
constexpr int THREAD_ROWS = thread_rows(RARELY_RECURS ? 2 : 4);
constexpr int RECURRENT_ROWS = THREADS / LANES * THREAD_ROWS;  // state rows of the block's tile

struct RecurrentShared {
    float k[TOGETHER][KEY_PADDED], q[TOGETHER][KEY_PADDED];
    float decay[TOGETHER][PER_CHANNEL ? KEY_PADDED : 4];
    float v[TOGETHER][RECURRENT_ROWS], o[TOGETHER][RECURRENT_ROWS];
    float beta[TOGETHER];
};

template <Pass PASS>
struct RecurrentTile {
    const Work& w;
    RecurrentShared& shared;
    int first;  // first state row of the tile within the slice
    float S[THREAD_ROWS][COLS];
    float largest = 0.0f;  // magnitude of what the thread has stored, for nvfp4

    __device__ int row() const { return threadIdx.x / LANES * THREAD_ROWS; }
    __device__ int column(int i) const { return 4 * (threadIdx.x % LANES + LANES * (i / 4)) + i % 4; }
    __device__ bool exists(int r) const { return first + r < SLICE && w.first_row() + first + r < VALUE_DIM; }

    __device__ void load_copy() {
        const ReadCopy copy = w.copy();
#pragma unroll 1
        for (int r = 0; r < THREAD_ROWS; ++r) {
            const bool live = w.row.folded > 0 && exists(row() + r);
#pragma unroll
            for (int i = 0; i < COLS; ++i) {
                const float x = live && column(i) < KEY_DIM ? copy_value<KEY_DIM>(copy, first + row() + r, column(i)) : 0.0f;
#pragma unroll
                for (int n = 0; n < THREAD_ROWS; ++n) S[n][i] = n == r ? x : S[n][i];
            }
        }
    }
    __device__ void load_state() {
        const STATE* from = w.t.state + w.state_at(first + row());
#pragma unroll
        for (int r = 0; r < THREAD_ROWS; ++r) {
            const bool live = w.row.folded > 0 && exists(row() + r);
#pragma unroll
            for (int i = 0; i < COLS; i += 4) {
                if constexpr (WIDE) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) S[r][i + e] = 0.0f;
                    if (live) load_vector<4>(from + r * KEY_DIM + column(i), &S[r][i]);
                } else {
#pragma unroll
                    for (int e = i; e < i + 4; ++e)
                        S[r][e] = live && column(e) < KEY_DIM ? to_float(from[r * KEY_DIM + column(e)]) : 0.0f;
                }
            }
        }
    }
    __device__ void store_state() {
        STATE* to = w.t.state_out + w.state_at(first + row());
#pragma unroll
        for (int r = 0; r < THREAD_ROWS; ++r) {
            if (!exists(row() + r)) continue;
#pragma unroll
            for (int i = 0; i < COLS; i += 4) {
                if constexpr (WIDE) {
                    store_vector<4>(to + r * KEY_DIM + column(i), &S[r][i]);
                } else {
#pragma unroll
                    for (int e = i; e < i + 4; ++e)
                        if (column(e) < KEY_DIM) to[r * KEY_DIM + column(e)] = from_float<STATE>(S[r][e]);
                }
                if constexpr (READ_BITS == 4)
#pragma unroll
                    for (int e = i; e < i + 4; ++e) largest = larger_magnitude(largest, S[r][e]);
            }
        }
    }

    __device__ void stage(int from, int count) {
        const int lane = threadIdx.x % 32, history = w.row.history();
#pragma unroll 1
        for (int at = threadIdx.x / 32; at < count; at += WARPS) {
            Entry in;
            fetch_entry(w, lane, from + at, in);
            append_key(w, lane, from + at, in, first == 0);
            shared.beta[at] = finish_beta(w, from + at, in.beta, first == 0);
            if constexpr (PER_CHANNEL) {
                store_padded(shared.decay[at], lane, in.g);
                finish_decays<1, GATES_AT_ONCE && PASS == Pass::ANSWER>(w, lane, from + at, shared.decay[at], first == 0);
            } else {
                shared.decay[at][0] = expf(finish_decay(w, from + at, 0, in.g[0], first == 0));
            }
            normalise(in, from + at >= history);
            store_padded(shared.k[at], lane, in.k);
            store_padded(shared.q[at], lane, in.q);
        }
        for (int n = threadIdx.x; n < count * RECURRENT_ROWS; n += THREADS) {
            const int at = n / RECURRENT_ROWS, r = n % RECURRENT_ROWS;
            if (!exists(r)) continue;
            const float v = fetch_value(w, from + at, first + r);
            shared.v[at][r] = v;
            if (!DERIVED) append_value(w, from + at, first + r, v);
        }
    }

    __device__ void load_keys(const float* keys, float (&to)[COLS]) const {
#pragma unroll
        for (int i = 0; i < COLS; i += 4) load_vector<4>(keys + column(i), to + i);
    }

    __device__ void take_one(int at, int index) {
        float k[COLS], u[THREAD_ROWS], sums[THREAD_ROWS];
        if constexpr (PER_CHANNEL) load_keys(shared.decay[at], k);
#pragma unroll
        for (int r = 0; r < THREAD_ROWS; ++r)
#pragma unroll
            for (int i = 0; i < COLS; ++i) S[r][i] *= PER_CHANNEL ? k[i] : shared.decay[at][0];
        load_keys(shared.k[at], k);
        load_vector<THREAD_ROWS>(&shared.v[at][row()], u);
        const bool is_token = index >= w.row.history();
        if (!DERIVED || is_token) {
#pragma unroll
            for (int r = 0; r < THREAD_ROWS; ++r) sums[r] = dot(S[r], k);
            sum_all<LANES>(sums);
#pragma unroll
            for (int r = 0; r < THREAD_ROWS; ++r) {
                u[r] = shared.beta[at] * (u[r] - sums[r]);
                if (DERIVED && threadIdx.x % LANES == 0 && exists(row() + r)) append_value(w, index, first + row() + r, u[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < THREAD_ROWS; ++r)
#pragma unroll
            for (int i = 0; i < COLS; ++i) S[r][i] = fmaf(u[r], k[i], S[r][i]);
        if (PASS == Pass::FOLD || !is_token) return;
        load_keys(shared.q[at], k);
#pragma unroll
        for (int r = 0; r < THREAD_ROWS; ++r) sums[r] = dot(S[r], k);
        sum_scattered<LANES>(sums, threadIdx.x);
        if (threadIdx.x % COPIES<LANES, THREAD_ROWS> == 0)
            shared.o[at][row() + first_kept<LANES, THREAD_ROWS>(threadIdx.x)] = sums[0];
    }

    __device__ void take(int all) {
#pragma unroll 1
        for (int from = 0; from < all; from += TOGETHER) {
            const int count = min(TOGETHER, all - from), history = w.row.history();
            __syncthreads();
            stage(from, count);
            __syncthreads();
#pragma unroll 1
            for (int at = 0; at < count; ++at) take_one(at, from + at);
            __syncthreads();
            for (int n = threadIdx.x; n < count * RECURRENT_ROWS; n += THREADS) {
                const int at = n / RECURRENT_ROWS, r = n % RECURRENT_ROWS;
                if (PASS != Pass::FOLD && from + at >= history && exists(r))
                    w.o(from + at - history)[first + r] = from_float<ACT>(shared.o[at][r]);
            }
        }
    }

    __device__ void run() {
        if constexpr (PASS == Pass::ANSWER)
            load_copy();
        else
            load_state();
        take(w.row.history() + w.row.tokens);
        if (PASS != Pass::ANSWER && w.row.folds()) store_state();
    }
};

// Returns the largest magnitude that the thread has stored, where nvfp4 asks for it.
template <Pass PASS>
__device__ __forceinline__ float recurrent_step(const Work& w, RecurrentShared& shared) {
    float largest = 0.0f;
#pragma unroll 1
    for (int first = 0; first < SLICE; first += RECURRENT_ROWS) {
        RecurrentTile<PASS> tile{w, shared, first};
        tile.run();
        largest = larger_magnitude(largest, tile.largest);
    }
    return to_float(from_float<STATE>(largest));
}
