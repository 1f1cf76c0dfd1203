// Values of a step that answers from the checkpoint (delta_read.cuh), and what they add to its answer.
#pragma once
#include "delta_adjoint.cuh"

struct ValueInputs {
    alignas(16) RING ring[HEADS][READ_HISTORY][SLICE];
    alignas(16) ACT v[ONE_ROW_A_LANE ? 1 : HEADS][READ_TOKENS][ONE_ROW_A_LANE ? 8 : SLICE];
};

struct ReadValues {
    const Work& w;
    ValueInputs& in;
    u64& ready;
    const FloatAdjoint& adjoint;
    const int warp, lane, history, tokens;
    ACT own[HEADS];

    __device__ ReadValues(const Work& work, ValueInputs& inputs, u64& barrier, const FloatAdjoint& results)
        : w(work), in(inputs), ready(barrier), adjoint(results), warp(threadIdx.x / 32), lane(threadIdx.x % 32),
          history(work.row.history()), tokens(work.row.tokens) {}

    // The ring's come by bulk copies where they are whole rows.
    static constexpr bool WHOLE = SPLIT == 1;
    static constexpr int REQUESTING = THREADS - 64;  // the thread that initialises their barrier and requests them

    __device__ void init() const {
        if (threadIdx.x == REQUESTING) init_barrier(&ready);
    }
    __device__ void request_ring() const {
        if (WHOLE && threadIdx.x == REQUESTING) {
            expect_bytes(&ready, history * HEADS * int(sizeof(in.ring[0][0])));
#pragma unroll
            for (int n = 0; n < HEADS; ++n)
                for_ring_spans(w, [&](int entry, int row, int count) {
                    stream_to_shared(in.ring[n][entry], w.t.ring_v + w.of_head(n).ring_v_at(row), count * u32(sizeof(in.ring[0][0])),
                                     &ready);
                });
        }
        if constexpr (!WHOLE)
#pragma unroll 1
            for (int j = warp; j < history; j += WARPS)
#pragma unroll
                for (int n = 0; n < HEADS; ++n)
                    request_row<SLICE>(in.ring[n][j], w.t.ring_v + w.of_head(n).ring_v_at(w.history_row(j)), lane);
    }
    // A single token's at the lane's value row, of all heads.
    __device__ void load_own(int row) {
#pragma unroll
        for (int n = 0; n < HEADS; ++n) own[n] = w.of_head(n).v(0)[row];
    }
    __device__ void request() {
        request_ring();
        if constexpr (ONE_ROW_A_LANE) {
            if (lane < WARP_ROWS) load_own(warp * WARP_ROWS + lane);
        } else {
#pragma unroll 1
            for (int i = warp; i < tokens; i += WARPS)
#pragma unroll
                for (int n = 0; n < HEADS; ++n) request_row<SLICE>(in.v[n][i], w.of_head(n).v(i), lane);
        }
    }
    // Behind a barrier of all threads.
    __device__ void wait() const {
        if (WHOLE) wait_barrier(&ready, 0);
    }

    // o += sum_j c_j v_j at a value row of head n; appends the step's v.
    __device__ void add_updates(float (&o)[READ_TOKENS], int n, int row) const {
        const Work head = w.of_head(n);
        for (int j = 0; j < history; ++j) {
            const float v = to_float(in.ring[n][j][row]);
#pragma unroll
            for (int i = 0; i < READ_TOKENS; ++i)
                if (i < tokens) o[i] = fmaf(adjoint.c[n][j][i], v, o[i]);
        }
        for (int j = 0; j < tokens; ++j) {
            const float v = ONE_ROW_A_LANE ? late_float(own[n]) : to_float(in.v[n][j][row]);
            if (!ANSWERS_FIRST || !w.row.absorbs()) w.t.ring_v_out[head.ring_v_at(w.append_row(j)) + row] = from_float<RING>(v);
#pragma unroll
            for (int i = 0; i < READ_TOKENS; ++i)
                if (i >= j && i < tokens) o[i] = fmaf(adjoint.c[n][history + j][i], v, o[i]);
        }
    }
};
