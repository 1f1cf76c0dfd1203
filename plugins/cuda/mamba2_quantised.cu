// replayssm::mamba2 with a checkpoint of 8-bit codes and a scale for each row. Contracts: plugins/mamba2.py and
// plugins/quantised_state.py.
//
// A block has one head of one batch row, a warp eight rows of its state, in float32 in registers. The sequence of live ring
// entries and tokens is taken in pieces, in shared memory. With c_j the sum of A dt up to entry j of a piece, and S the state
// before the piece:
//
//     y_t = exp(c_t) S C_t + sum_{j <= t} exp(c_t - c_j) dt_j (B_j . C_t) x_j + D x_t
//     S   = exp(c_n) S     + sum_j        exp(c_n - c_j) dt_j x_j B_j^T
//
// The second line is left out where nothing follows that needs it: a decode or verify step that folds nothing has one piece,
// mostly, and reads its state once.
//
// Macros: ACT, RING (element types), FP8 (1: codes are E4M3, else integers), HEADS, HEAD_DIM, STATE_SIZE, GROUPS, RING_ROWS,
// DT_MIN, DT_MAX, PIECE (entries of a piece, at most 32).
#define READ_BITS 0
#include "read_copy.cuh"
#include "scalars.cuh"
#include "step.cuh"

constexpr int INNER = HEADS * HEAD_DIM;
constexpr int HEADS_A_GROUP = HEADS / GROUPS;
constexpr int ROWS_A_WARP = 8;
constexpr int WARPS = (HEAD_DIM + ROWS_A_WARP - 1) / ROWS_A_WARP, THREADS = 32 * WARPS;
constexpr int PER_LANE = (STATE_SIZE + 31) / 32;
// Resident threads to compile for, by which registers are divided: as many as fit without spilling.
constexpr int THREADS_AN_SM = PER_LANE > 4 ? 512 : 768;
constexpr float LARGEST = FP8 ? E4M3_MAX : 127.0f;
// A lane has four neighbouring columns of every 128, where rows are that long.
constexpr bool IN_FOURS = STATE_SIZE % 128 == 0;

__device__ __forceinline__ int column(int lane, int r) { return IN_FOURS ? r / 4 * 128 + 4 * lane + r % 4 : lane + 32 * r; }

// Entries of a piece. `log_decay` is summed up, from the piece's first entry on; `weight` holds the factors of x_j in y_t.
struct alignas(16) Piece {
    float B[PIECE][STATE_SIZE], C[PIECE][STATE_SIZE], x[PIECE][HEAD_DIM];
    float log_decay[PIECE], step_size[PIECE], weight[PIECE][PIECE];
};

__device__ __forceinline__ float value_of(u8 code) {
    if constexpr (FP8) return from_e4m3(code);
    return float(static_cast<signed char>(code));
}
__device__ __forceinline__ u8 code_of(float x) {
    if constexpr (FP8) return u8(to_e4m3(x));
    return u8(static_cast<signed char>(max(-127, min(127, __float2int_rn(x)))));
}

// A row of codes, spread over the warp; columns that do not exist are zero.
struct alignas(IN_FOURS ? 4 : 1) Codes {
    u8 v[PER_LANE];

    __device__ __forceinline__ void load(const u8* row, int lane) {
#pragma unroll
        for (int r = 0; r < PER_LANE; ++r) {
            if constexpr (IN_FOURS) {
                if (r % 4 == 0) word(r) = *reinterpret_cast<const u32*>(row + column(lane, r));
            } else {
                v[r] = column(lane, r) < STATE_SIZE ? row[column(lane, r)] : u8(0);
            }
        }
    }
    __device__ __forceinline__ void store(u8* row, int lane) {
#pragma unroll
        for (int r = 0; r < PER_LANE; ++r) {
            if constexpr (IN_FOURS) {
                if (r % 4 == 0) *reinterpret_cast<u32*>(row + column(lane, r)) = word(r);
            } else {
                if (column(lane, r) < STATE_SIZE) row[column(lane, r)] = v[r];
            }
        }
    }
    __device__ __forceinline__ u32& word(int r) { return reinterpret_cast<u32*>(v)[r / 4]; }
};

extern "C" __global__ void __launch_bounds__(THREADS, THREADS_AN_SM / THREADS)
    mamba2_quantised(const ACT* xbc, const ACT* dt, const float* A_log, const float* dt_bias, const float* D, const int* step,
                     const u8* state, const RING* ring_x, const RING* ring_b, const float* ring_dt, const float* state_scale,
                     int tokens, int xbc_stride, int dt_stride, int state_stride, int ring_x_stride, int ring_b_stride,
                     int ring_dt_stride, int scale_stride, ACT* y, u8* state_out, RING* ring_x_out, RING* ring_b_out,
                     float* ring_dt_out, float* scale_out) {
    __shared__ Piece piece;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x, group = head / HEADS_A_GROUP;
    const Row row = load_row(step, blockIdx.y, tokens);
    const int valid = row.slot < 0 ? 0 : row.tokens;
    ACT* y_row = y + i64(blockIdx.y) * tokens * INNER + head * HEAD_DIM;
    for (int i = threadIdx.x; i < (tokens - valid) * HEAD_DIM; i += THREADS)
        y_row[i64(valid + i / HEAD_DIM) * INNER + i % HEAD_DIM] = from_float<ACT>(0.0f);
    if (row.slot < 0) return;

    const i64 x_base = row.slot * ring_x_stride + i64(head) * RING_ROWS * HEAD_DIM;
    const i64 b_base = row.slot * ring_b_stride + i64(group) * RING_ROWS * STATE_SIZE;
    const i64 dt_base = row.slot * ring_dt_stride + i64(head) * RING_ROWS;
    const i64 state_base = row.slot * state_stride + i64(head) * HEAD_DIM * STATE_SIZE;
    const i64 scale_base = row.slot * scale_stride + i64(head) * HEAD_DIM;
    const bool appends = !row.absorbs(), appends_b = appends && head % HEADS_A_GROUP == 0;
    const float A = -expf(A_log[head]), bias = dt_bias[head], skip = D[head];

    // Row p = warp + WARPS k, and `column` of the lane.
    float S[ROWS_A_WARP][PER_LANE];
#pragma unroll
    for (int k = 0; k < ROWS_A_WARP; ++k) {
        const int p = warp + WARPS * k;
        const bool read = row.folded > 0 && p < HEAD_DIM;
        const float scale = read ? state_scale[scale_base + p] : 0.0f;
        Codes codes = {};
        if (read) codes.load(state + state_base + p * STATE_SIZE, lane);
#pragma unroll
        for (int r = 0; r < PER_LANE; ++r) S[k][r] = __fmul_rn(value_of(codes.v[r]), scale);
    }

    const int history = row.history(), total = history + valid, fold_at = row.fold_entries();
    for (int first = 0; first < total;) {
        const int end = min(first + PIECE, first < fold_at ? fold_at : total), count = end - first;
        __syncthreads();
        // ---- the piece's entries, of which the step's tokens are appended to the ring
        for (int i = threadIdx.x; i < count * HEAD_DIM; i += THREADS) {
            const int j = i / HEAD_DIM, p = i % HEAD_DIM, token = first + j - history;
            if (token < 0) {
                const int at = (row.folded + first + j) % RING_ROWS;
                piece.x[j][p] = to_float(ring_x[x_base + at * HEAD_DIM + p]);
            } else {
                const float x = to_float(xbc[(i64(blockIdx.y) * tokens + token) * xbc_stride + head * HEAD_DIM + p]);
                piece.x[j][p] = x;
                const int at = (row.committed + token) % RING_ROWS;
                if (appends) ring_x_out[x_base + at * HEAD_DIM + p] = from_float<RING>(x);
            }
        }
        for (int i = threadIdx.x; i < count * STATE_SIZE; i += THREADS) {
            const int j = i / STATE_SIZE, n = i % STATE_SIZE, token = first + j - history;
            if (token < 0) {
                const int at = (row.folded + first + j) % RING_ROWS;
                piece.B[j][n] = to_float(ring_b[b_base + at * STATE_SIZE + n]);
            } else {
                const ACT* b = xbc + (i64(blockIdx.y) * tokens + token) * xbc_stride + INNER + group * STATE_SIZE + n;
                piece.B[j][n] = to_float(*b), piece.C[j][n] = to_float(b[GROUPS * STATE_SIZE]);
                const int at = (row.committed + token) % RING_ROWS;
                if (appends_b) ring_b_out[b_base + at * STATE_SIZE + n] = from_float<RING>(piece.B[j][n]);
            }
        }
        if (warp == 0) {
            float step_size = 0.0f;
            const int token = first + lane - history;
            if (lane < count) {
                if (token < 0) {
                    step_size = ring_dt[dt_base + (row.folded + first + lane) % RING_ROWS];
                } else {
                    const float raw = softplus(to_float(dt[(i64(blockIdx.y) * tokens + token) * dt_stride + head]) + bias);
                    step_size = clamped(raw, DT_MIN, DT_MAX);
                    if (appends) ring_dt_out[dt_base + (row.committed + token) % RING_ROWS] = step_size;
                }
            }
            float sum = A * step_size;
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const float before = __shfl_up_sync(~0u, sum, offset);
                if (lane >= offset) sum += before;
            }
            if (lane < count) piece.log_decay[lane] = sum, piece.step_size[lane] = step_size;
        }
        __syncthreads();
        // ---- outputs of the piece's tokens
        const int first_token = max(history - first, 0);
        for (int pair = warp; pair < (count - first_token) * count; pair += WARPS) {
            const int t = first_token + pair / count, j = pair % count;
            float sum = 0.0f;
            if (j <= t)
                for (int n = lane; n < STATE_SIZE; n += 32) sum += piece.B[j][n] * piece.C[t][n];
            sum = warp_sum(sum);
            const float decay = expf(piece.log_decay[t] - piece.log_decay[j]);
            if (lane == 0) piece.weight[t][j] = j <= t ? decay * piece.step_size[j] * sum : 0.0f;
        }
        __syncthreads();
        for (int t = first_token; t < count; ++t) {
            const float decay = expf(piece.log_decay[t]), weight = lane < count ? piece.weight[t][lane] : 0.0f;
            ACT* y_token = y_row + i64(first + t - history) * INNER;
#pragma unroll
            for (int k = 0; k < ROWS_A_WARP; ++k) {
                const int p = warp + WARPS * k;
                if (p >= HEAD_DIM) continue;
                float sum = 0.0f;
#pragma unroll
                for (int r = 0; r < PER_LANE; ++r)
                    if (column(lane, r) < STATE_SIZE) sum += S[k][r] * piece.C[t][column(lane, r)];
                sum = warp_sum(decay * sum + (lane < count ? weight * piece.x[lane][p] : 0.0f));
                if (lane == 0) y_token[p] = from_float<ACT>(sum + skip * piece.x[t][p]);
            }
        }
        // ---- the state behind the piece
        if (end < total || end == fold_at) {
            const float last = piece.log_decay[count - 1], kept = expf(last);
#pragma unroll
            for (int k = 0; k < ROWS_A_WARP; ++k)
#pragma unroll
                for (int r = 0; r < PER_LANE; ++r) S[k][r] *= kept;
            for (int j = 0; j < count; ++j) {
                const float weight = expf(last - piece.log_decay[j]) * piece.step_size[j];
                float b[PER_LANE];
#pragma unroll
                for (int r = 0; r < PER_LANE; ++r)
                    b[r] = column(lane, r) < STATE_SIZE ? weight * piece.B[j][column(lane, r)] : 0.0f;
#pragma unroll
                for (int k = 0; k < ROWS_A_WARP; ++k) {
                    const float x = warp + WARPS * k < HEAD_DIM ? piece.x[j][warp + WARPS * k] : 0.0f;
#pragma unroll
                    for (int r = 0; r < PER_LANE; ++r) S[k][r] += x * b[r];
                }
            }
        }
        if (end == fold_at) {
#pragma unroll
            for (int k = 0; k < ROWS_A_WARP; ++k) {
                const int p = warp + WARPS * k;
                if (p >= HEAD_DIM) continue;
                float largest = 0.0f;
#pragma unroll
                for (int r = 0; r < PER_LANE; ++r) largest = larger_magnitude(largest, S[k][r]);
                const float scale = __fdiv_rn(warp_magnitude(largest), LARGEST), divisor = scale == 0.0f ? 1.0f : scale;
                if (lane == 0) scale_out[scale_base + p] = scale;
                Codes codes;
#pragma unroll
                for (int r = 0; r < PER_LANE; ++r) codes.v[r] = code_of(__fdiv_rn(S[k][r], divisor));
                codes.store(state_out + state_base + p * STATE_SIZE, lane);
            }
        }
        first = end;
    }
}
