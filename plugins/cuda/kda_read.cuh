// The answer to one token of Kimi Delta Attention from the checkpoint and the ring (formulas: delta_read.cuh).
#pragma once
#include "delta_token_product.cuh"
#include "kda_read_adjoint.cuh"

struct KdaTokenShared {
    alignas(128) STATE tiles[WARPS][STAGES][TILE_ROWS][KEY_DIM];
    KdaAdjointInputs adjoint;
    alignas(16) RING ring_v[READ_HISTORY][SLICE];
    union {
        alignas(16) float x[KEY_DIM];
        alignas(16) STATE parts[HALF_STATES ? 2 : 1][KEY_DIM];  // of x times a power of two
    };
    float unit;
    u64 keys_ready, values_ready, tiles_ready[WARPS][STAGES];
};

template <typename T>
struct KdaTokenRead : KdaAdjoint {
    KdaTokenShared& shared;
    TokenProduct<T> product;
    ACT value;  // of the lane's row

    __device__ KdaTokenRead(const Work& work, KdaTokenShared& memory)
        : KdaAdjoint(work, memory.adjoint, memory.keys_ready), shared(memory), product(work, memory.tiles, memory.tiles_ready) {}

    // ---- requests ------------------------------------------------------------------------------------------------------

    static constexpr bool WHOLE = SPLIT == 1;         // value rows of the ring
    static constexpr int VALUES_FROM = THREADS - 64;  // the thread that requests the ring's values

    // Behind it, all threads meet before one waits.
    __device__ void init() const {
        if (lane) return;
        product.init();
        if (threadIdx.x == KEYS_FROM) init_barrier(&keys_ready);
        if (threadIdx.x == VALUES_FROM) init_barrier(&shared.values_ready);
        publish_barriers();
    }

    __device__ void request() {
        own.request(w);
        request_beta();
        if (product.has_row()) value = w.v(0)[product.row()];
        request_ring();
        if (WHOLE && threadIdx.x == VALUES_FROM) {
            expect_bytes(&shared.values_ready, history * int(sizeof(shared.ring_v[0])));
            for_ring_spans(w, [&](int to, int row, int count) {
                stream_to_shared(shared.ring_v[to], w.t.ring_v + w.ring_v_at(row), count * u32(sizeof(shared.ring_v[0])),
                                 &shared.values_ready);
            });
        }
        if constexpr (!WHOLE)
#pragma unroll 1
            for (int j = warp; j < history; j += WARPS)
                request_row<SLICE>(shared.ring_v[j], w.t.ring_v + w.ring_v_at(w.history_row(j)), lane);
    }

    // ---- the answer ----------------------------------------------------------------------------------------------------

    // By the first warp, behind its walk.
    __device__ void store(float (&x)[LANE_COLS]) const {
        if constexpr (!HALF_STATES) {
            store_columns(shared.x, lane, x);
        } else {
            if constexpr (same_type<STATE, fp16>::value) {
                const Rescaling to = rescaling(x);
#pragma unroll
                for (float& column : x) column *= to.factor;
                if (lane == 0) shared.unit = to.inverse;
            }
            float rest[LANE_COLS];
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) rest[i] = x[i] - to_float(from_float<STATE>(x[i]));
            store_columns(shared.parts[0], lane, x);
            store_columns(shared.parts[1], lane, rest);
        }
    }

    // sum_j c_j v_j of the lane's row; appends the token's v.
    __device__ float updates() const {
        if (!product.has_row()) return 0.0f;
        const int row = product.row();
        const float v = to_float(value);
        w.t.ring_v_out[w.ring_v_at(w.append_row(0)) + row] = from_float<RING>(v);
        float sum = in.c[history] * v;
        for (int j = 0; j < history; ++j) sum = fmaf(in.c[j], to_float(shared.ring_v[j][row]), sum);
        return sum;
    }

    __device__ void run() {
        init();
        request();
        product.request_first();
        __syncthreads();  // barriers
        float x[LANE_COLS];
        begin(x);
        multiply_keys();
        if constexpr (!WHOLE) wait_copies();
        __syncthreads();
        if (warp == 0) walk(x), store(x);
        __syncthreads();
        if (WHOLE) wait_barrier(&shared.values_ready, 0);
        float o = updates();
        if (w.row.folded > 0) {
            if constexpr (HALF_STATES)
                o += product.multiply(0, shared.parts) * (same_type<T, fp16>::value ? shared.unit : 1.0f);
            else
                o += product.multiply(0, shared.x);
        }
        if (product.has_row()) w.o(0)[product.row()] = from_float<ACT>(o);
    }
};
