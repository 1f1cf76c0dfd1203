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
constexpr int BLOCKS_AN_SM = sizeof(STATE) == 4 ? 7 : 4;  // at least, by which registers are divided
typedef StateRows<STATE, HEAD_DIM, STATE_SIZE> Rows;

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_AN_SM)
    mamba2_standard(const ACT* xbc, const ACT* dt, const float* A_log, const float* dt_bias, const float* D, const int* step,
                    const STATE* state, const ACT* /*ring_x*/, const ACT* /*ring_b*/, const float* /*ring_dt*/, int /*tokens*/,
                    int xbc_stride, int dt_stride, int state_stride, int /*ring_x_stride*/, int /*ring_b_stride*/,
                    int /*ring_dt_stride*/, int /*heads_per_block*/, ACT* y, STATE* state_out, ACT* /*ring_x_out*/,
                    ACT* /*ring_b_out*/, float* /*ring_dt_out*/) {
    const int lane = threadIdx.x % 32, first = (blockIdx.x * WARPS + threadIdx.x / 32) * Rows::WARP_ROWS;
    if (first >= INNER) return;
    const Row row = load_row(step, blockIdx.y, 1);
    const OwnedRows<Rows> own(lane);
    const int channel = first + Rows::row(lane);
    ACT* outputs = y + i64(blockIdx.y) * INNER + channel + own.first;
    if (row.slot < 0) {
#pragma unroll
        for (int i = 0; i < own.COUNT; ++i) outputs[i] = from_float<ACT>(0.0f);
        return;
    }
    const i64 at = row.slot * state_stride + i64(first) * STATE_SIZE;
    Rows S;
    if (row.folded > 0)
        S.load(state + at, lane);
    else
        S.clear();

    const int head = first / HEAD_DIM, group = head / (HEADS / GROUPS);
    const ACT* token = xbc + i64(blockIdx.y) * xbc_stride;
    float b[Rows::PER_LANE], c[Rows::PER_LANE], x[Rows::HELD], sums[Rows::HELD];
    Rows::load_columns(b, token + INNER + group * STATE_SIZE, lane);
    Rows::load_columns(c, token + INNER + (GROUPS + group) * STATE_SIZE, lane);
    load_vector<Rows::HELD>(token + channel, x);
    const float raw = softplus(to_float(dt[i64(blockIdx.y) * dt_stride + head]) + dt_bias[head]);
    const float step_size = fminf(fmaxf(raw, DT_MIN), DT_MAX), decay = expf(-expf(A_log[head]) * step_size);
    const float skip = lane % Rows::LANES == 0 ? D[head] : 0.0f;
#pragma unroll
    for (int r = 0; r < Rows::HELD; ++r) {
        const float scaled = step_size * x[r];
        sums[r] = skip * x[r];
#pragma unroll
        for (int i = 0; i < Rows::PER_LANE; ++i) {
            S.v[r][i] = fmaf(decay, S.v[r][i], scaled * b[i]);
            sums[r] = fmaf(S.v[r][i], c[i], sums[r]);
        }
    }
    S.store<STOCHASTIC>(state_out + at, lane, RandomSource{step, int(blockIdx.y)}, first * STATE_SIZE);
    sum_scattered<Rows::LANES>(sums, lane);
    if (!own.owns) return;
#pragma unroll
    for (int i = 0; i < own.COUNT; ++i) outputs[i] = from_float<ACT>(sums[i]);
}
