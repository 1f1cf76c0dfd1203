// replayssm::gated_delta and replayssm::kda with a window of 1: the ordinary recurrence of one token a row. Contracts:
// plugins/gated_delta.py, plugins/kda.py.
//
//     S = S diag(exp g),  u = beta (v - S k),  S = S + u k^T,  o = S q
//
// No ring is read or written: with a window of 1 every step of one token takes up its token (plugins/advance.py). A warp works
// on some rows of one value head's state and needs no other warp.
//
// Macros: ACT, STATE (element types), KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, PER_CHANNEL (1, kda: one decay per key
// channel), BETA_SCALE, and for kda LOWER_BOUND (0 for the softplus gate).
#if !PER_CHANNEL
#define LOWER_BOUND 0.0f
#endif
#include "scalars.cuh"
#include "state_rows.cuh"

constexpr int WARPS = 4;
constexpr int BLOCKS_AN_SM = sizeof(STATE) == 4 ? 7 : 8;  // at least, by which registers are divided
constexpr float NORM_EPSILON = 1e-6f;  // plugins/gated_delta.py, L2_EPSILON
typedef StateRows<STATE, VALUE_DIM, KEY_DIM> Rows;

__device__ __forceinline__ float log_decay(float rate, float biased) {
    return LOWER_BOUND == 0.0f ? -rate * softplus(biased) : LOWER_BOUND * sigmoid(rate * biased);
}

// exp(g) of a lane's columns; `gate` and `dt_bias` are the head's.
__device__ __forceinline__ void load_decays(float (&decay)[Rows::PER_LANE], const ACT* gate, const float* dt_bias, float rate,
                                            int lane) {
    if constexpr (PER_CHANNEL) {
        float bias[Rows::PER_LANE];
        Rows::load_columns(decay, gate, lane);
        Rows::load_columns(bias, dt_bias, lane);
#pragma unroll
        for (int i = 0; i < Rows::PER_LANE; ++i) decay[i] = expf(log_decay(rate, decay[i] + bias[i]));
    } else {
        const float all = expf(log_decay(rate, to_float(*gate) + *dt_bias));
#pragma unroll
        for (int i = 0; i < Rows::PER_LANE; ++i) decay[i] = all;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_AN_SM)
    delta_standard(const ACT* qkv, const ACT* gate, const ACT* b, const float* A_log, const float* dt_bias, const int* step,
                   const STATE* state, const void* /*ring_k*/, const void* /*ring_v*/, const float* /*ring_g*/,
                   const float* /*ring_beta*/, int /*tokens*/, int qkv_stride, int gate_stride, int b_stride, int state_stride,
                   int /*ring_k_stride*/, int /*ring_v_stride*/, int /*ring_g_stride*/, int /*ring_beta_stride*/, ACT* o,
                   STATE* state_out, void* /*ring_k_out*/, void* /*ring_v_out*/, float* /*ring_g_out*/,
                   float* /*ring_beta_out*/) {
    const WarpRows<Rows, WARPS> warp(step);
    const int lane = warp.lane, first = warp.first;
    if (first >= VALUE_HEADS * VALUE_DIM) return;
    o += i64(blockIdx.y) * (VALUE_HEADS * VALUE_DIM);
    float sums[Rows::HELD] = {};
    if (warp.row.slot < 0) return warp.answer(o, sums);
    const i64 at = warp.row.slot * state_stride + i64(first) * KEY_DIM;
    Rows S;
    warp.load(S, state + at);

    const int head = first / VALUE_DIM, key_head = head / (VALUE_HEADS / KEY_HEADS);
    const int gate_at = head * (PER_CHANNEL ? KEY_DIM : 1);
    const ACT* token = qkv + i64(blockIdx.y) * qkv_stride;
    float q[Rows::PER_LANE], k[Rows::PER_LANE], decay[Rows::PER_LANE], u[warp.own.COUNT];
    Rows::load_columns(q, token + key_head * KEY_DIM, lane);
    Rows::load_columns(k, token + (KEY_HEADS + key_head) * KEY_DIM, lane);
#pragma unroll
    for (int i = 0; i < warp.own.COUNT; ++i) u[i] = to_float(token[2 * KEY_HEADS * KEY_DIM + warp.held() + warp.own.first + i]);
    const float beta = BETA_SCALE * sigmoid(to_float(b[i64(blockIdx.y) * b_stride + head]));
    load_decays(decay, gate + i64(blockIdx.y) * gate_stride + gate_at, dt_bias + gate_at, expf(A_log[head]), lane);
    float squares[2] = {dot(k, k), dot(q, q)};
    sum_all<Rows::LANES>(squares);
    const float k_scale = rsqrtf(squares[0] + NORM_EPSILON);
    const float q_scale = rsqrtf(squares[1] + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
#pragma unroll
    for (int i = 0; i < Rows::PER_LANE; ++i) k[i] *= k_scale, q[i] *= q_scale;

    const auto decayed = [&](int r, float (&s)[Rows::PER_LANE]) {
        S.get(r, s);
#pragma unroll
        for (int i = 0; i < Rows::PER_LANE; ++i) s[i] *= decay[i];
    };
#pragma unroll
    for (int r = 0; r < Rows::HELD; ++r) {
        float s[Rows::PER_LANE];
        decayed(r, s);
        sums[r] = dot(s, k);
    }
    sum_scattered<Rows::LANES>(sums, lane);
#pragma unroll
    for (int i = 0; i < warp.own.COUNT; ++i) u[i] = beta * (u[i] - sums[i]);
#pragma unroll
    for (int r = 0; r < Rows::HELD; ++r) sums[r] = warp.own.of_row(u, r, lane);
#pragma unroll
    for (int r = 0; r < Rows::HELD; ++r) {
        float s[Rows::PER_LANE];
        decayed(r, s);
#pragma unroll
        for (int i = 0; i < Rows::PER_LANE; ++i) s[i] = fmaf(sums[r], k[i], s[i]);
        sums[r] = dot(s, q);
        Rows::store<false>(state_out + at, r, s, lane, RandomSource{step, int(blockIdx.y)}, 0);
    }
    sum_scattered<Rows::LANES>(sums, lane);
    warp.answer(o, sums);
}
