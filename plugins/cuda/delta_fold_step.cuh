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
        float along = 0.0f;
#pragma unroll
        for (int part = 2; part >= 0; --part) along += to_float(in.adjoint.along[n][token][part][counts ? j : 0]);
        of_keys[i] = counts ? unit * along : 0.0f;
        of_queries[i] = counts && j == token ? unit * in.adjoint.whole[n][token] : 0.0f;
        of_values[i] = counts ? in.results.c[n][j][token] : 0.0f;
    });
    __syncthreads();
    for_coefficients([&](int i, int n, int token, int j) {
        to.products[n][token][j] = of_keys[i];
        to.products[n][token][STEP_COLUMNS + j] = of_queries[i];
        to.values[n][token][j] = of_values[i];
    });
    if (threadIdx.x == 0) to.tokens = w.row.tokens;
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
    for_coefficients([&](int i, int, int token, int j) {
        const bool counts = token < w.row.tokens && j <= token;
        of_values[i] = counts ? in.results.c[0][j][token] : 0.0f;
    });
#pragma unroll
    for (int token = 0; token < READ_TOKENS; ++token)
        x[token] = token < w.row.tokens ? in.results.x[0][token][threadIdx.x] * (SCALED_CHAINS ? in.results.unit[0][token] : 1.0f) : 0.0f;
    __syncthreads();
    for_coefficients([&](int i, int, int token, int j) { to.values[0][token][j] = of_values[i]; });
    if (threadIdx.x == 0) to.tokens = w.row.tokens;
}
