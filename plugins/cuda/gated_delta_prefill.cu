// replayssm::gated_delta for rows of many tokens (T > 16) with 16-bit activations. Contract: plugins/gated_delta.py.
#define PER_CHANNEL 0
#define LOWER_BOUND 0.0f
#include "delta_prefill.cuh"
#include "gated_delta_makers.cuh"

__device__ __forceinline__ void make_keys(Shared& shared, const Work& w, u32 lane) {
    KeyMaker maker;
    maker.rate = w.decay_rate(), maker.bias = w.t.dt_bias[w.head()];
    maker.load(w, Chunk(w, 0), lane);
    make_chunks(w, [&](int index) {
        maker.make(shared, shared.stage[index % 2], w, Chunk(w, index), lane, [] { pass(MAKERS); },
                   [&] { maker.load(w, Chunk(w, index + 1), lane); });
    });
}

__device__ __forceinline__ void make_queries(Shared& shared, const Work& w, u32 lane) {
    QueryMaker maker;
    maker.load(w, Chunk(w, 0), lane);
    make_chunks(w, [&](int index) {
        maker.make(shared, shared.stage[index % 2], Chunk(w, index), lane, [] { meet(MAKERS); },
                   [&] { maker.load(w, Chunk(w, index + 1), lane); });
    });
}

extern "C" __global__ void HEAD_CLUSTER __launch_bounds__(BLOCK_THREADS, BLOCKS_AN_SM)
    gated_delta_prefill(const ACT* qkv, const ACT* a, const ACT* b, const float* A_log, const float* dt_bias, const int* step,
                  const STATE* state, const RING_K* ring_k, const RING* ring_v, const float* ring_g, const float* ring_beta,
                  COPY_INPUTS int tokens, int qkv_stride, int a_stride, int b_stride, int state_stride, int ring_k_stride,
                  int ring_v_stride, int ring_g_stride, int ring_beta_stride, COPY_STRIDES ACT* o, STATE* state_out,
                  RING_K* ring_k_out, RING* ring_v_out, float* ring_g_out, float* ring_beta_out COPY_OUTPUTS) {
    __shared__ alignas(128) Shared shared;
    const Tensors t{qkv, a, b, A_log, dt_bias, state, ring_k, ring_v, ring_g, ring_beta, tokens, qkv_stride, a_stride,
                    b_stride, state_stride, ring_k_stride, ring_v_stride, ring_g_stride, ring_beta_stride, o, state_out,
                    ring_k_out, ring_v_out, ring_g_out, ring_beta_out, COPY_TENSORS};
    delta_prefill(shared, t, step, [&](const Work& w, int maker, u32 lane) {
        if (maker == 0)
            make_keys(shared, w, lane);
        else
            make_queries(shared, w, lane);
    });
}
