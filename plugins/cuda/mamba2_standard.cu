// replayssm::mamba2 with a window of 1: the ordinary recurrence of one token a row. Contract: plugins/mamba2.py.
//
//     S = exp(A dt) S + dt x B^T,   y = S C + D x
//
// No ring is read or written: with a window of 1 every step of one token takes up its token (plugins/advance.py). A warp works
// on some rows of one head's state and needs no other warp.
//
// Macros: ACT, STATE (element types), HEADS, HEAD_DIM, STATE_SIZE, GROUPS, DT_MIN, DT_MAX, STOCHASTIC (1: a 16-bit state is
// rounded at random).
#include "scalars.cuh"
#include "state_rows.cuh"

constexpr int INNER = HEADS * HEAD_DIM, WARPS = 4;
constexpr int BLOCKS_AN_SM = sizeof(STATE) == 4 ? 7 : 8;  // at least, by which registers are divided
typedef StateRows<STATE, HEAD_DIM, STATE_SIZE> Rows;

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_AN_SM)
    mamba2_standard(const ACT* xbc, const ACT* dt, const float* A_log, const float* dt_bias, const float* D, const int* step,
                    const STATE* state, const ACT* /*ring_x*/, const ACT* /*ring_b*/, const float* /*ring_dt*/, int /*tokens*/,
                    int xbc_stride, int dt_stride, int state_stride, int /*ring_x_stride*/, int /*ring_b_stride*/,
                    int /*ring_dt_stride*/, int /*heads_per_block*/, ACT* y, STATE* state_out, ACT* /*ring_x_out*/,
                    ACT* /*ring_b_out*/, float* /*ring_dt_out*/) {
    const WarpRows<Rows, WARPS> warp(step);
    const int lane = warp.lane, first = warp.first;
    if (first >= INNER) return;
    y += i64(blockIdx.y) * INNER;
    float sums[Rows::HELD] = {};
    if (warp.row.slot < 0) return warp.answer(y, sums);
    const i64 at = warp.row.slot * state_stride + i64(first) * STATE_SIZE;
    Rows S;
    warp.load(S, state + at);

    const int head = first / HEAD_DIM, group = head / (HEADS / GROUPS);
    const ACT* token = xbc + i64(blockIdx.y) * xbc_stride;
    float b[Rows::PER_LANE], c[Rows::PER_LANE], x[Rows::HELD];
    Rows::load_columns(b, token + INNER + group * STATE_SIZE, lane);
    Rows::load_columns(c, token + INNER + (GROUPS + group) * STATE_SIZE, lane);
    load_vector<Rows::HELD>(token + warp.held(), x);
    const float raw = softplus(to_float(dt[i64(blockIdx.y) * dt_stride + head]) + dt_bias[head]);
    const float step_size = clamped(raw, DT_MIN, DT_MAX), decay = expf(-expf(A_log[head]) * step_size);
    const float skip = lane % Rows::LANES == 0 ? D[head] : 0.0f;
    const RandomSource random = {step, int(blockIdx.y)};
#pragma unroll
    for (int r = 0; r < Rows::HELD; ++r) {
        float s[Rows::PER_LANE];
        S.get(r, s);
        const float scaled = step_size * x[r];
        sums[r] = skip * x[r];
#pragma unroll
        for (int i = 0; i < Rows::PER_LANE; ++i) {
            s[i] = fmaf(decay, s[i], scaled * b[i]);
            sums[r] = fmaf(s[i], c[i], sums[r]);
        }
        Rows::store<STOCHASTIC>(state_out + at, r, s, lane, random, first * STATE_SIZE);
    }
    sum_scattered<Rows::LANES>(sums, lane);
    warp.answer(y, sums);
}
