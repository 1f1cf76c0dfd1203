// replayssm::mamba2 for rows of many tokens (T > 16) with 16-bit activations. Contract: plugins/mamba2.py.
//
// The row's sequence is cut into pieces of 16 entries, the history apart from the tokens. A warp keeps 16 rows of one head's
// state in registers, in float32, and takes piece after piece with the stages of mamba2_step.cu: outputs from the state before
// the piece and from the piece's own entries, then the piece folded into the state. A block holds WARPS_A_BLOCK such warps of
// one head; B, C and x of the next piece travel to shared memory while the current one is computed.
//
// Macros: mamba2_shape.cuh with TOKENS = ENTRIES = 16, and WARPS_A_BLOCK, which divides HEAD_DIM / 16.
#include "async_copy.cuh"
#include "mamba2_fold.cuh"

constexpr int PIECE = 16;
constexpr int CHANNELS = 16 * WARPS_A_BLOCK;
// Eight elements more than a row needs put equal columns of successive rows into different banks.
constexpr int N_PITCH = STATE_SIZE + 8, X_PITCH = CHANNELS + 8;
// Pieces in shared memory: the one at hand and those on their way, in 48 KB.
constexpr int STAGES = STATE_SIZE > 128 || WARPS_A_BLOCK > 4 ? 2 : 3;
// What bfloat16 keeps of outputs and of a state leaves no trace of tf32's rounding.
constexpr bool SPLIT_READ = !same_type<ACT, bf16>::value, SPLIT_FOLD = !same_type<STATE, bf16>::value;

struct Stage {
    ACT b[PIECE][N_PITCH], c[PIECE][N_PITCH], x[PIECE][X_PITCH];
};

// A piece: entries first ... first + count - 1 of the history, or tokens of this step.
struct Piece {
    bool tokens;
    int first, count;

    __device__ Piece(const Sequence& seq, int index) {
        const int of_history = (seq.history + PIECE - 1) / PIECE;
        tokens = index >= of_history;
        first = PIECE * (tokens ? index - of_history : index);
        count = min(PIECE, (tokens ? seq.length - seq.history : seq.history) - first);
    }
    __device__ int entry(const Sequence& seq, int i) const { return first + i + (tokens ? seq.history : 0); }
};

// Starts the copies of a piece; rows behind its end become zero.
__device__ __forceinline__ void request(Stage& stage, const Piece& piece, const Sequence& seq, int head, int p0) {
    constexpr int UNIT = 8, THREADS = 32 * WARPS_A_BLOCK, N_UNITS = STATE_SIZE / UNIT, X_UNITS = CHANNELS / UNIT;
    constexpr int N_ROWS = THREADS / N_UNITS, X_ROWS = THREADS / X_UNITS;
    // Addresses are computed anew for every piece instead of being kept in registers.
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    const int group = head / HEADS_A_GROUP, column = thread % N_UNITS * UNIT, channel = thread % X_UNITS * UNIT;
#pragma unroll
    for (int from = 0; from < PIECE; from += N_ROWS) {
        const int i = from + thread / N_UNITS;
        if (thread >= N_ROWS * N_UNITS || i >= PIECE) break;
        const bool present = i < piece.count;
        if (piece.tokens) {
            const ACT* row = seq.c(piece.first + i, group) + column;
            copy_16_bytes(&stage.c[i][column], row, present);
            copy_16_bytes(&stage.b[i][column], row - GROUPS * STATE_SIZE, present);
        } else {
            copy_16_bytes(&stage.b[i][column], seq.b(piece.first + i, group) + column, present);
        }
    }
#pragma unroll
    for (int from = 0; from < PIECE; from += X_ROWS) {
        const int i = from + thread / X_UNITS;
        if (thread >= X_ROWS * X_UNITS || i >= PIECE) break;
        const ACT* row = piece.tokens ? seq.in.xbc + i64(piece.first + i) * seq.in.xbc_stride + head * HEAD_DIM
                                      : seq.x(piece.first + i, head);
        copy_16_bytes(&stage.x[i][channel], row + p0 + channel, i < piece.count);
    }
}

// The time step of a lane's entry as it is stored: finished in the ring, raw in the step's tokens.
__device__ __forceinline__ float request_dt(const Piece& piece, const Sequence& seq, int head, int lane) {
    if (lane >= piece.count) return 0.0f;
    return piece.tokens ? to_float(seq.in.dt[i64(piece.first + lane) * seq.in.dt_stride + head])
                        : seq.in.ring_dt[head * RING_ROWS + seq.ring_row(piece.first + lane)];
}

// A warp's 16 rows of the state.
struct State {
    StatePairs<float> v[BLOCKS][2];

    __device__ __forceinline__ void load(const STATE* rows, int t, bool present) {
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                StatePairs<STATE> stored;
                stored.clear();
                if (present) stored.load(rows + 2 * r * STATE_SIZE, k, t);
#pragma unroll
                for (int m = 0; m < 4; ++m) v[k][r].set(m, stored.get(m, 0), stored.get(m, 1));
            }
    }
    // `rows`: this lane's first row, which begins at element `element` of the slot's state.
    __device__ __forceinline__ void store(STATE* rows, int t, const RandomSource& random, int element) const {
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                StatePairs<STATE> stored;
                PairBits bits;
                bits.draw(random, element + 2 * r * STATE_SIZE + 32 * k + 8 * t);
#pragma unroll
                for (int m = 0; m < 4; ++m) set_pair(stored, m, v[k][r].get(m, 0), v[k][r].get(m, 1), bits);
                stored.store_half(rows + 2 * r * STATE_SIZE, k, 0, t);
                stored.store_half(rows + 2 * r * STATE_SIZE, k, 1, t);
            }
    }
    // S C of a piece's tokens.
    __device__ __forceinline__ Outputs multiply(const Stage& stage, int lane) {
        const int g = lane / 4, t = lane % 4;
        StateProducts<float, SPLIT_READ> products = {};
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            v[k][0].keep(), v[k][1].keep();
            products.add(v[k], load_pairs<WIDE_STATE>(stage.c[g], k, t), load_pairs<WIDE_STATE>(stage.c[g + 8], k, t));
        }
        return products.sum();
    }
    __device__ __forceinline__ void fold_piece(const Stage& stage, Updates& updates, int count, int lane) {
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Accumulator sum[2] = {};
                sum_updates<SPLIT_FOLD>(sum, updates, count, k, half, lane,
                            [&](int, int s, int e) { return stage.b[8 * s + 2 * (lane % 4) + e]; });
#pragma unroll
                for (int r = 0; r < 2; ++r) add_updates(v[k][r], v[k][r], updates.decay, sum, half, r);
            }
    }
};

// B . C of a piece's entries and tokens.
__device__ __forceinline__ void piece_products(GroupProducts& out, const Stage& stage, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) {
        const Pairs low = load_pairs<WIDE_STATE>(stage.c[g], k, t), high = load_pairs<WIDE_STATE>(stage.c[g + 8], k, t);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const Pairs b = load_pairs<WIDE_STATE>(stage.b[8 * n + g], k, t);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 a[4] = {low.v[2 * half], high.v[2 * half], low.v[2 * half + 1], high.v[2 * half + 1]};
                mma_16bit<ACT>(out.v[n], a, b.v[2 * half], b.v[2 * half + 1]);
            }
        }
    }
}

// Stores the tokens of a piece in the ring; `ring_*` are the slot's. Only rows that do not absorb get here.
__device__ __forceinline__ void append_piece(const Stage& stage, const Piece& piece, const Sequence& seq, const Decays& decays,
                                             int head, int p0, int lane, ACT* ring_x, ACT* ring_b, float* ring_dt) {
    const int warp = threadIdx.x / 32, group = head / HEADS_A_GROUP;
    const bool first_block = p0 == 0;
    for (int i = 0; i < piece.count; ++i) {
        const int at = seq.ring_row(piece.entry(seq, i));
        if (lane < 16) ring_x[(head * RING_ROWS + at) * HEAD_DIM + p0 + 16 * warp + lane] = stage.x[i][16 * warp + lane];
        if (first_block && head % HEADS_A_GROUP == 0)
            for (int n = threadIdx.x; n < STATE_SIZE; n += 32 * WARPS_A_BLOCK)
                ring_b[(group * RING_ROWS + at) * STATE_SIZE + n] = stage.b[i][n];
        if (first_block && warp == 0 && lane == i) ring_dt[head * RING_ROWS + at] = decays.dt[0];
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS_A_BLOCK, WARPS_AN_SM / WARPS_A_BLOCK)
    mamba2_prefill(const ACT* xbc, const ACT* dt, const float* A_log, const float* dt_bias, const float* D, const int* step,
                   const STATE* state, const ACT* ring_x, const ACT* ring_b, const float* ring_dt, int tokens, int xbc_stride,
                   int dt_stride, int state_stride, int ring_x_stride, int ring_b_stride, int ring_dt_stride,
                   int /*heads_per_block*/, ACT* y, STATE* state_out, ACT* ring_x_out, ACT* ring_b_out, float* ring_dt_out) {
    __shared__ alignas(16) Stage stages[STAGES];
    constexpr int BLOCKS_A_HEAD = HEAD_DIM / CHANNELS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.x / BLOCKS_A_HEAD, p0 = blockIdx.x % BLOCKS_A_HEAD * CHANNELS;
    const Row row = load_row(step, blockIdx.y, tokens);
    const i64 first_token = i64(blockIdx.y) * tokens;
    y += first_token * INNER + head * HEAD_DIM + p0;
    const int valid = row.slot < 0 ? 0 : row.tokens;
    for (int at = threadIdx.x; at < (tokens - valid) * CHANNELS; at += 32 * WARPS_A_BLOCK)
        y[i64(valid + at / CHANNELS) * INNER + at % CHANNELS] = from_float<ACT>(0.0f);
    if (row.slot < 0) return;

    const Sequence seq = {{row.history(), row.history() + row.tokens},
                          row,
                          int(row.slot),
                          {xbc + first_token * xbc_stride, dt + first_token * dt_stride, A_log, dt_bias, D,
                           state + row.slot * state_stride, ring_x + row.slot * ring_x_stride,
                           ring_b + row.slot * ring_b_stride, ring_dt + row.slot * ring_dt_stride, xbc_stride, dt_stride}};
    const int lane_row = head * HEAD_SIZE + (p0 + 16 * warp + state_row(g)) * STATE_SIZE;
    STATE* rows_out = state_out + row.slot * state_stride + lane_row;
    const int of_history = (seq.history + PIECE - 1) / PIECE, pieces = of_history + (row.tokens + PIECE - 1) / PIECE;
    const float rate = -LOG2_E * expf(A_log[head]);

    const auto request_piece = [&](int index) {
        if (index < pieces) request(stages[index % STAGES], Piece(seq, index), seq, head, p0);
        end_copies();
    };
#pragma unroll
    for (int index = 0; index + 1 < STAGES; ++index) request_piece(index);
    float next_dt = request_dt(Piece(seq, 0), seq, head, lane);
    State s;
    s.load(seq.in.state + lane_row, t, row.folded > 0);

    for (int index = 0; index < pieces; ++index) {
        const Piece piece(seq, index);
        const Stage& stage = stages[index % STAGES];
        float step_size = next_dt;
        if (piece.tokens && lane < piece.count) step_size = fminf(fmaxf(softplus(step_size + dt_bias[head]), DT_MIN), DT_MAX);
        // Behind the barrier this piece has arrived for all warps, and all have left the piece before it, whose stage is free.
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        request_piece(index + STAGES - 1);
        if (index + 1 < pieces) next_dt = request_dt(Piece(seq, index + 1), seq, head, lane);

        const Decays decays(step_size, rate, lane);
        HeadInputs in;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            in.x[0][half] = *reinterpret_cast<const uint2*>(&stage.x[8 * half + g][16 * warp + 4 * t]);
        if (piece.tokens) {
            GroupProducts bc = {};
            piece_products(bc, stage, lane);
            const Outputs products = s.multiply(stage, lane);
            read_out(products, bc, in, decays, Extent{0, piece.count}, D[head], lane, piece.count,
                     y + i64(piece.first + g) * INNER + 16 * warp + 4 * t);
            if (!row.absorbs())
                append_piece(stage, piece, seq, decays, head, p0, lane, ring_x_out + row.slot * ring_x_stride,
                             ring_b_out + row.slot * ring_b_stride, ring_dt_out + row.slot * ring_dt_stride);
        }
        Updates updates(in, decays, piece.count, lane);
        if constexpr (!SPLIT_FOLD) updates.round();
        s.fold_piece(stage, updates, piece.count, lane);
        if (row.folds() && index + 1 == (row.absorbs() ? pieces : of_history)) s.store(rows_out, t, RandomSource{step, int(blockIdx.y)}, lane_row);
    }
}
