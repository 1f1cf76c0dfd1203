// replayssm::kda. Contract: plugins/kda.py; macros: delta_shape.cuh.
#define PER_CHANNEL 1
#include "delta_step.cuh"

// Folds that spill with the registers that four blocks leave.
#if __CUDA_ARCH__ >= 1000
constexpr bool HUNGRY = KDA_VERIFIES || (COPIED ? SPLIT > 1 || (sizeof(STATE) == 4 && READ_BITS == 8) : sizeof(STATE) == 2);
#else
constexpr bool HUNGRY = SPLIT > 1 ? COPIED || (KDA_VERIFIES ? SPLIT > 4 : sizeof(STATE) == 2)
                                  : sizeof(STATE) == 4 && (READ_BITS == 4 || (COPIED && KDA_VERIFIES));
#endif
// Folds of narrow slices have all of their loads on the way at once.
constexpr int BLOCKS_OF_HUNGRY = KDA_VERIFIES && SPLIT > 4 ? 2 : 3;
constexpr int BLOCKS_HELD =
    HUNGRY && (ONE_CHUNK || KDA_VERIFIES) && KDA_FOLDS && BLOCKS_AN_SM > BLOCKS_OF_HUNGRY ? BLOCKS_OF_HUNGRY : BLOCKS_AN_SM;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_HELD)
    kda(const ACT* qkv, const ACT* f, const ACT* b, const float* A_log, const float* dt_bias, const int* step,
        const STATE* state, const RING_K* ring_k, const RING* ring_v, const float* ring_g, const float* ring_beta, COPY_INPUTS int tokens,
        int qkv_stride, int f_stride, int b_stride, int state_stride, int ring_k_stride, int ring_v_stride, int ring_g_stride,
        int ring_beta_stride, COPY_STRIDES ACT* o, STATE* state_out, RING_K* ring_k_out, RING* ring_v_out, float* ring_g_out,
        float* ring_beta_out COPY_OUTPUTS) {
    const Tensors t{qkv, f, b, A_log, dt_bias, state, ring_k, ring_v, ring_g, ring_beta, tokens, qkv_stride, f_stride,
                    b_stride, state_stride, ring_k_stride, ring_v_stride, ring_g_stride, ring_beta_stride, o, state_out,
                    ring_k_out, ring_v_out, ring_g_out, ring_beta_out, COPY_TENSORS};
    delta_step(t, step);
}
