// replayssm::gated_delta. Contract: plugins/gated_delta.py; macros: delta_shape.cuh.
#define PER_CHANNEL 0
#define LOWER_BOUND 0.0f
#include "delta_step.cuh"

// Compiled for compute capability 10, one token's steps beside an fp8 copy spill with the registers that two heads' five blocks leave.
constexpr bool HUNGRY = __CUDA_ARCH__ >= 1000 && READ_BITS == 8 && TOKENS == 1 && HEADS_A_BLOCK == 2;
constexpr int BLOCKS_HELD = HUNGRY && BLOCKS_AN_SM > 4 ? 4 : BLOCKS_AN_SM;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_HELD)
    gated_delta(const ACT* qkv, const ACT* a, const ACT* b, const float* A_log, const float* dt_bias, const int* step,
                const STATE* state, const RING_K* ring_k, const RING* ring_v, const float* ring_g, const float* ring_beta,
                COPY_INPUTS int tokens, int qkv_stride, int a_stride, int b_stride, int state_stride, int ring_k_stride,
                int ring_v_stride, int ring_g_stride, int ring_beta_stride, COPY_STRIDES ACT* o, STATE* state_out, RING_K* ring_k_out,
                RING* ring_v_out, float* ring_g_out, float* ring_beta_out COPY_OUTPUTS) {
    const Tensors t{qkv, a, b, A_log, dt_bias, state, ring_k, ring_v, ring_g, ring_beta, tokens, qkv_stride, a_stride,
                    b_stride, state_stride, ring_k_stride, ring_v_stride, ring_g_stride, ring_beta_stride, o, state_out,
                    ring_k_out, ring_v_out, ring_g_out, ring_beta_out, COPY_TENSORS};
    delta_step(t, step);
}
