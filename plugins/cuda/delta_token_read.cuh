// The answer to a single token from the checkpoint and the ring (formulas: delta_read.cuh), by blocks each of whose lanes has one value
// row of a head at most.
#pragma once
#include "delta_token_product.cuh"

// T: of the state.
template <typename T>
struct TokenRead {
    const Work& w;
    ReadShared& shared;
    ReadInputs& in;
    Either<GRAM, Gram<ACT, FloatAdjoint>, FloatChains>::type adjoint;
    TokenProduct<T> product;
    ReadValues values;

    __device__ TokenRead(const Work& work, ReadShared& memory)
        : w(work), shared(memory), in(memory.in), adjoint(work, memory.in.adjoint, memory.in.results),
          product(work, memory.tiles, memory.barriers.tiles),
          values(work, memory.in.values, memory.barriers.values, memory.in.results) {}

    // What memory has to answer for first comes first, the tiles last.
    __device__ void request() {
        adjoint.request();
        if (product.has_row()) values.load_own(product.row());
        if (product.lane == 0) {
            product.init();
            values.init();
            publish_barriers();
        }
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
