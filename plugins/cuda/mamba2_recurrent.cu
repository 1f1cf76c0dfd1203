// replayssm::mamba2 for any shape and element type: the recurrence token by token, one warp a row of the state.
// Contract: plugins/mamba2.py.
//
//     S = exp(A dt) S + dt x B^T,   y = S C + D x
//
// A warp owns state row p of one head: lane l holds S[p][l + 32 r]. It runs over the ring's live entries, then over the
// step's tokens, and never needs another warp. Slower than the other kernels of this layer, and exact in float32. With a read
// copy a block owns a head, whose rows its warps take in turn. Where outputs come from the copy, a row that folds is run over
// once more, from its checkpoint.
//
// Macros: ACT, STATE, RING (element types), HEADS, HEAD_DIM, STATE_SIZE, GROUPS, RING_ROWS, DT_MIN, DT_MAX,
// STOCHASTIC (1: a 16-bit state is rounded at random), READ_BITS (read_copy.cuh), FROM_COPY (1: outputs come from the copy).
#include "read_copy.cuh"
#include "rounding.cuh"
#include "scalars.cuh"
#include "step.cuh"

constexpr int PER_LANE = (STATE_SIZE + 31) / 32;
constexpr int INNER = HEADS * HEAD_DIM;
constexpr int WARPS = 4;
// 0 leaves it to the compiler. For outputs from a copy, of two runs, it would choose more than it has registers for, and spill.
constexpr int BLOCKS_AN_SM = FROM_COPY ? 8 : 0;

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_AN_SM)
    mamba2_recurrent(const ACT* xbc, const ACT* dt, const float* A_log, const float* dt_bias, const float* D, const int* step,
                     const STATE* state, const RING* ring_x, const RING* ring_b, const float* ring_dt, COPY_INPUTS int tokens,
                     int xbc_stride, int dt_stride, int state_stride, int ring_x_stride, int ring_b_stride,
                     int ring_dt_stride, COPY_STRIDES int /*heads_per_block*/, ACT* y, STATE* state_out, RING* ring_x_out,
                     RING* ring_b_out, float* ring_dt_out COPY_OUTPUTS) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Row row = load_row(step, blockIdx.y, tokens);
    const int valid = row.slot < 0 ? 0 : row.tokens;

    // Row `unit` of all heads' rows: outputs where `answers`, the checkpoint where `folds`.
    const auto run = [&](int unit, bool from_copy, bool answers, bool folds) {
        const int head = unit / HEAD_DIM, p = unit % HEAD_DIM, group = head / (HEADS / GROUPS);
        ACT* y_row = y + i64(blockIdx.y) * tokens * INNER + unit;
        if (answers)
            for (int i = valid + lane; i < tokens; i += 32) y_row[i64(i) * INNER] = from_float<ACT>(0.0f);
        if (row.slot < 0) return;

        const i64 x_base = row.slot * ring_x_stride + i64(head) * RING_ROWS * HEAD_DIM + p;
        const i64 b_base = row.slot * ring_b_stride + i64(group) * RING_ROWS * STATE_SIZE;
        const i64 dt_base = row.slot * ring_dt_stride + i64(head) * RING_ROWS;
        const i64 state_base = row.slot * state_stride + i64(unit) * STATE_SIZE;
        const bool appends = answers && !row.absorbs(), appends_b = appends && p == 0 && head % (HEADS / GROUPS) == 0;
        const float A = -expf(A_log[head]), bias = dt_bias[head], skip = D[head];

        float S[PER_LANE];
#pragma unroll
        for (int r = 0; r < PER_LANE; ++r) {
            const int n = lane + 32 * r;
            S[r] = 0.0f;
            if (row.folded == 0 || n >= STATE_SIZE) continue;
            if constexpr (FROM_COPY) {
                if (from_copy) {
                    S[r] = copy_value<STATE_SIZE>(COPY_OF_SLOT(row.slot).of_head(head, HEAD_DIM, STATE_SIZE), p, n);
                    continue;
                }
            }
            S[r] = to_float(state[state_base + n]);
        }
        const auto fold = [&] {
#pragma unroll
            for (int r = 0; r < PER_LANE; ++r) {
                const int n = lane + 32 * r;
                if (n >= STATE_SIZE) continue;
                if constexpr (STOCHASTIC) {
                    const RandomSource random = {step, int(blockIdx.y)};
                    state_out[state_base + n] = round_at_random<STATE>(S[r], random.bits_of(unit * STATE_SIZE + n));
                } else {
                    state_out[state_base + n] = from_float<STATE>(S[r]);
                }
            }
        };

        for (int j = 0; j < row.history(); ++j) {
            const int at = (row.folded + j) % RING_ROWS;
            const float step_size = ring_dt[dt_base + at], decay = expf(A * step_size);
            const float scaled = step_size * to_float(ring_x[x_base + i64(at) * HEAD_DIM]);
#pragma unroll
            for (int r = 0; r < PER_LANE; ++r) {
                const int n = lane + 32 * r;
                if (n < STATE_SIZE) S[r] = decay * S[r] + scaled * to_float(ring_b[b_base + i64(at) * STATE_SIZE + n]);
            }
        }
        if (folds && !row.absorbs()) {
            fold();
            if (!answers) return;
        }

        for (int i = 0; i < valid; ++i) {
            const i64 token = i64(blockIdx.y) * tokens + i;
            const ACT* x_token = xbc + token * xbc_stride;
            const ACT* b_token = x_token + INNER + group * STATE_SIZE;
            const float raw = softplus(to_float(dt[token * dt_stride + head]) + bias);
            const float step_size = clamped(raw, DT_MIN, DT_MAX), decay = expf(A * step_size);
            const float x = to_float(x_token[unit]), scaled = step_size * x;
            const int at = (row.committed + i) % RING_ROWS;
            float sum = 0.0f;
#pragma unroll
            for (int r = 0; r < PER_LANE; ++r) {
                const int n = lane + 32 * r;
                if (n >= STATE_SIZE) continue;
                const float b = to_float(b_token[n]);
                S[r] = decay * S[r] + scaled * b;
                sum += S[r] * to_float(b_token[GROUPS * STATE_SIZE + n]);
                if (appends_b) ring_b_out[b_base + i64(at) * STATE_SIZE + n] = from_float<RING>(b);
            }
            sum = warp_sum(sum);
            if (lane != 0 || !answers) continue;
            y_row[i64(i) * INNER] = from_float<ACT>(sum + skip * x);
            if (!appends) continue;
            ring_x_out[x_base + i64(at) * HEAD_DIM] = from_float<RING>(x);
            if (p == 0) ring_dt_out[dt_base + at] = step_size;
        }
        if (folds && row.absorbs()) fold();
    };

    if constexpr (READ_BITS == 0) {
        const int unit = blockIdx.x * WARPS + warp;
        if (unit < INNER) run(unit, false, true, row.folds());
    } else {
        const int head = blockIdx.x;
        for (int p = warp; p < HEAD_DIM; p += WARPS) run(head * HEAD_DIM + p, FROM_COPY, true, row.folds() && !FROM_COPY);
        if (row.slot < 0 || !row.folds()) return;
        if constexpr (FROM_COPY)
            for (int p = warp; p < HEAD_DIM; p += WARPS) run(head * HEAD_DIM + p, false, false, true);
        write_copy<HEAD_DIM, STATE_SIZE, 32 * WARPS>(state_out + row.slot * state_stride + i64(head) * HEAD_DIM * STATE_SIZE,
                                                     COPY_OF_SLOT(row.slot).of_head(head, HEAD_DIM, STATE_SIZE));
    }
}
