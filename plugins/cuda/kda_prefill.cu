// replayssm::kda for rows of many tokens (T > 16) with bfloat16 activations. Contract: plugins/kda.py.
#define PER_CHANNEL 1
#include "delta_prefill.cuh"
#include "kda_makers.cuh"

extern "C" __global__ void HEAD_CLUSTER __launch_bounds__(BLOCK_THREADS, BLOCKS_AN_SM)
    kda_prefill(const ACT* qkv, const ACT* f, const ACT* b, const float* A_log, const float* dt_bias, const int* step,
                const STATE* state, const RING_K* ring_k, const RING* ring_v, const float* ring_g, const float* ring_beta,
                COPY_INPUTS int tokens, int qkv_stride, int f_stride, int b_stride, int state_stride, int ring_k_stride,
                int ring_v_stride, int ring_g_stride, int ring_beta_stride, COPY_STRIDES ACT* o, STATE* state_out,
                RING_K* ring_k_out, RING* ring_v_out, float* ring_g_out, float* ring_beta_out COPY_OUTPUTS) {
    __shared__ alignas(128) Shared shared;
    const Tensors t{qkv, f, b, A_log, dt_bias, state, ring_k, ring_v, ring_g, ring_beta, tokens, qkv_stride, f_stride,
                    b_stride, state_stride, ring_k_stride, ring_v_stride, ring_g_stride, ring_beta_stride, o, state_out,
                    ring_k_out, ring_v_out, ring_g_out, ring_beta_out, COPY_TENSORS};
    delta_prefill(shared, t, step, [&](const Work& w, int maker, u32 lane) {
        ChannelMaker channels;
        channels.maker = maker, channels.rate = w.decay_rate();
        channels.load(w, Chunk(w, 0), lane);
        make_chunks(w, [&](int index) {
            channels.make(shared, shared.stage[index % 2], w, Chunk(w, index), lane,
                          [&] { channels.load(w, Chunk(w, index + 1), lane); }, [] { meet(MAKERS); }, [] { meet(STATE_READ); });
        });
        meet(STATE_READ);
    });
}
