// The answer to a single token from the checkpoint and the ring (formulas: delta_read.cuh), by blocks each of whose lanes has one value
// row of a head at most.
#pragma once
#include "delta_token_product.cuh"

struct TokenShared {
    alignas(128) STATE tiles[WARPS][STAGES][TILE_ROWS][KEY_DIM];
    alignas(16) ReadInputs in;
};

// T: of the state.
template <typename T>
struct TokenRead {
    const Work& w;
    ReadInputs& in;
    Either<GRAM, Gram<ACT, FloatAdjoint>, FloatChains>::type adjoint;
    TokenProduct<T> product;
    ReadValues values;

    // Nothing else may lie where they have been: a fold takes over the rest.
    __device__ static ReadBarriers& barriers() {
        __shared__ ReadBarriers ready;
        return ready;
    }
    // Ahead of everything, while the row's plan is on its way. All threads meet before one uses them.
    __device__ static void init() {
        if (threadIdx.x) return;
        for (int warp = 0; warp < WARPS; ++warp)
            for (int stage = 0; stage < STAGES; ++stage) init_barrier(&barriers().tiles[warp][stage]);
        init_barrier(&barriers().values);
        publish_barriers();
    }

    __device__ TokenRead(const Work& work, TokenShared& memory)
        : w(work), in(memory.in), adjoint(work, memory.in.adjoint, memory.in.results), product(work, memory.tiles, barriers().tiles),
          values(work, memory.in.values, barriers().values, memory.in.results) {}

    // What threads wait for first comes first.
    __device__ void request() {
        adjoint.request();
        if (product.has_row()) values.load_own(product.row());
        __syncthreads();  // barriers
        values.request_ring();
        product.request_first();
    }

    // The token's product with the checkpoint of head n.
    __device__ float multiply(int n) const {
        float o;
        if constexpr (HALF_STATES)
            o = product.multiply(n, in.results.parts[n]);
        else
            o = product.multiply(n, in.results.x[n][0]);
        return GRAM ? o * in.results.unit[n][0] : o;
    }

    __device__ void run() {
        request();
        adjoint.template run<0>(1.0f, [] {});
        __syncthreads();  // x and c
        values.wait();
        float o[HEADS][1] = {};  // first what entries add to it, while the state is on its way
#pragma unroll
        for (int n = 0; n < HEADS; ++n)
            if (product.has_row()) values.add_updates(o[n], n, product.row());
#pragma unroll
        for (int n = 0; n < HEADS; ++n) {
            if (w.row.folded > 0) o[n][0] += multiply(n);
            if (product.has_row()) w.of_head(n).o(0)[product.row()] = from_float<ACT>(o[n][0]);
        }
    }
};
