// A verify step that takes up the ring: its tokens are answered by the new checkpoint on its way to memory (delta_step_answer.cuh).
#pragma once
#include "delta_fold.cuh"
#include "delta_read_tiles.cuh"

// What such a step needs before it folds, of a row that is to find the ring empty already: the tokens are appended to it.
// Inputs, Shared: ReadInputs and FoldShared of layers that have it, in the same memory.
template <typename Inputs, typename Shared>
struct FoldStep {
    const Work& w;
    Inputs& in;
    Shared& shared;

    // b, a and c, to where the fold finds them.
    __device__ void prepare() const {
        Gram<ACT, FloatAdjoint> adjoint(w, in.adjoint, in.results);
        adjoint.request();
        append_values();
        adjoint.template find_coefficients<0>(1.0f, [] {});
        constexpr int COUNT = HEADS * READ_TOKENS * STEP_COLUMNS, SHARE = (COUNT + THREADS - 1) / THREADS;
        float of_keys[SHARE], of_queries[SHARE], of_values[SHARE];
        for_coefficients<COUNT, SHARE>([&](int i, int n, int token, int j) {
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
        StepCoefficients& to = *shared.chunk.step;
        for_coefficients<COUNT, SHARE>([&](int i, int n, int token, int j) {
            to.products[n][token][j] = of_keys[i];
            to.products[n][token][STEP_COLUMNS + j] = of_queries[i];
            to.values[n][token][j] = of_values[i];
        });
        if (threadIdx.x == 0) to.tokens = w.row.tokens;
    }

private:
    __device__ void append_values() const {
        constexpr int VECTORS = SLICE / 8;  // of a head's
#pragma unroll 1
        for (int at = threadIdx.x; at < HEADS * w.row.tokens * VECTORS; at += THREADS) {
            const int token = at / (HEADS * VECTORS), row = at % VECTORS * 8;
            const Work head = w.of_head(at / VECTORS % HEADS);
            *reinterpret_cast<uint4*>(w.t.ring_v_out + head.ring_v_at(w.append_row(token)) + row) =
                *reinterpret_cast<const uint4*>(head.v(token) + row);
        }
    }

    // The thread's share of them: body(number, head, token, column).
    template <int COUNT, int SHARE, typename Body>
    __device__ static void for_coefficients(Body body) {
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const int at = threadIdx.x + i * THREADS;
            if (at < COUNT) body(i, at / (READ_TOKENS * STEP_COLUMNS), at / STEP_COLUMNS % READ_TOKENS, at % STEP_COLUMNS);
        }
    }
};
