// A verify step that takes up the ring: its tokens are answered by the new checkpoint on its way to memory (delta_step_answer.cuh,
// kda_step_answer.cuh). What it needs before it folds, of a row that is to find the ring empty already: the tokens are appended to it.
#pragma once
#include "delta_fold.cuh"
#include "delta_read_tiles.cuh"

__device__ __forceinline__ void append_values(const Work& w) {
    constexpr int VECTORS = SLICE / 8;  // of a head's
#pragma unroll 1
    for (int at = threadIdx.x; at < HEADS * w.row.tokens * VECTORS; at += THREADS) {
        const int token = at / (HEADS * VECTORS), row = at % VECTORS * 8;
        const Work head = w.of_head(at / VECTORS % HEADS);
        *reinterpret_cast<uint4*>(w.t.ring_v_out + head.ring_v_at(w.append_row(token)) + row) =
            *reinterpret_cast<const uint4*>(head.v(token) + row);
    }
}

// The thread's share of coefficients: body(number, head, token, column).
constexpr int STEP_COUNT = HEADS * READ_TOKENS * STEP_COLUMNS, STEP_SHARE = (STEP_COUNT + THREADS - 1) / THREADS;
template <typename Body>
__device__ __forceinline__ void for_coefficients(Body body) {
#pragma unroll
    for (int i = 0; i < STEP_SHARE; ++i) {
        const int at = threadIdx.x + i * THREADS;
        if (at < STEP_COUNT) body(i, at / (READ_TOKENS * STEP_COLUMNS), at / STEP_COLUMNS % READ_TOKENS, at % STEP_COLUMNS);
    }
}

__device__ __forceinline__ void take_values(const Work& w, const FloatAdjoint& results, float (&c)[STEP_SHARE]) {
    for_coefficients([&](int i, int n, int token, int j) {
        const bool counts = token < w.row.tokens && j <= token;
        c[i] = counts ? results.c[n][j][token] : 0.0f;
    });
}
__device__ __forceinline__ void store_values(const Work& w, const float (&c)[STEP_SHARE], ValueCoefficients& to) {
    for_coefficients([&](int i, int n, int token, int j) { to.values[n][token][j] = c[i]; });
    if (threadIdx.x == 0) to.tokens = w.row.tokens;
}

// Both in the same memory. Inputs: ReadInputs of a layer whose adjoint is Gram.
template <typename Inputs>
__device__ __forceinline__ void prepare_step(const Work& w, Inputs& in, StepCoefficients& to) {
    Gram<ACT, FloatAdjoint> adjoint(w, in.adjoint, in.results);
    adjoint.request();
    append_values(w);
    adjoint.template find_coefficients<0>(1.0f, [] {});
    float of_keys[STEP_SHARE], of_queries[STEP_SHARE], of_values[STEP_SHARE];
    for_coefficients([&](int i, int n, int token, int j) {
        const bool counts = token < w.row.tokens && j <= token;
        const float unit = in.results.unit[n][token];
        of_keys[i] = counts ? unit * adjoint.along(n, token, counts ? j : 0) : 0.0f;
        of_queries[i] = counts ? unit * in.adjoint.whole[n][token] : 0.0f;
    });
    take_values(w, in.results, of_values);
    __syncthreads();
    for_coefficients([&](int i, int n, int token, int j) {
        to.keys[n][token][j] = of_keys[i];
        if (j == 0) to.queries[n][token] = of_queries[i];
    });
    store_values(w, of_values, to);
}

// The same of Kimi Delta Attention, which is to keep x meanwhile.
template <typename Inputs>
__device__ __forceinline__ void prepare_step(const Work& w, Inputs& in, ValueCoefficients& to, float (&x)[READ_TOKENS]) {
    FloatChains adjoint(w, in.adjoint, in.results);
    adjoint.request();
    append_values(w);
    adjoint.template run<0>(1.0f, [] {});
    __syncthreads();  // x and c
    float of_values[STEP_SHARE];
    take_values(w, in.results, of_values);
#pragma unroll
    for (int token = 0; token < READ_TOKENS; ++token)
        x[token] = token < w.row.tokens ? in.results.x[0][token][threadIdx.x] * (SCALED_CHAINS ? in.results.unit[0][token] : 1.0f) : 0.0f;
    __syncthreads();
    store_values(w, of_values, to);
}
