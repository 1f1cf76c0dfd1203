// The delta rule token by token, with a tile of the state in registers: folds the ring's rows, then takes the step's
// tokens. Exact in float32, for any history and any number of tokens.
//
//     S = S diag(exp g),  u = beta (v - S k),  S = S + u k^T,  o = S q
//
// Decays are applied lazily within a chunk of tokens. With G the log decay summed since the chunk began,
// S = S' diag(exp G), so that
//
//     S k = S' (exp(G) k),   S' = S' + u (exp(-G) k)^T,   S q = S' (exp(G) q)
//
// and the state itself is scaled once a chunk instead of once a token. Where a channel's G falls below LAZY_LIMIT, that
// channel of S' is scaled there and then and its sum restarts: exp(-G) stays far from overflow whatever the gates are.
#pragma once
#include "delta_lanes.cuh"

constexpr int LANES = 8;                   // lanes that share a state row
constexpr int COLS = KEY_PADDED / LANES;   // key columns of a thread: 4 (l + 8 m) + 0 ... 3
constexpr int CHUNK = 8;                   // tokens that are staged at a time
constexpr int TOKENS_A_WARP = CHUNK / WARPS;
// A prefill has the next chunk on its way while one is worked on; a decode step has no registers left for that.
constexpr bool PREFETCH = TOKENS == 0;
constexpr float LAZY_LIMIT = -40.0f;

// State rows of a thread: at most 64 values in registers, and no more rows than the slice fills.
constexpr int fold_rows(int rows) {
    return rows == 1 ? 1 : rows * COLS <= 64 && SLICE % (16 * rows) == 0 ? rows : fold_rows(rows / 2);
}
constexpr int FOLD_ROWS = fold_rows(4);
constexpr int PASS = THREADS / LANES * FOLD_ROWS;  // state rows of a block at a time
constexpr bool ROWS_FIT = SLICE % PASS == 0;
constexpr int VALUES = (CHUNK * PASS + THREADS - 1) / THREADS;
constexpr int CHANNELS = PER_CHANNEL ? KEY_PADDED : 1;  // decays of a token
constexpr int KEYS = PER_CHANNEL ? KEY_PADDED : 4;      // columns of arrays that only per-channel decays need

struct FoldShared {
    float k[CHUNK][KEY_PADDED];  // normalised; times exp(G) where decays are per channel
    float q[CHUNK][KEY_PADDED];  // normalised and scaled; likewise
    float k_update[CHUNK][KEYS]; // k exp(-G), where decays are per channel
    float rescale[CHUNK][KEYS];  // first g, then what S' is multiplied by before the token: 1 or exp(G)
    float last[KEYS];            // exp(G) after the chunk, where decays are per channel
    float v[CHUNK][PASS];
    float o[CHUNK][PASS];
    float decay[CHUNK], inverse[CHUNK];  // exp(G), exp(-G), where the decay is a scalar
    float beta[CHUNK];
    int rescales[CHUNK];
};

// A chunk's inputs on their way from global to shared memory: a lane's columns of one token, and everything of a chunk.
struct TokenInputs {
    float k[LANE_COLS], q[LANE_COLS];
    float g[LANE_COLS], beta;  // logits of the step's tokens; of g the first alone where the decay is a scalar
};
struct ChunkInputs {
    TokenInputs tokens[TOKENS_A_WARP];
    float v[VALUES];
};

struct Fold {
    const Tensors& t;
    const Work& w;
    FoldShared& shared;
    int pass;  // first state row of the tile within the slice
    float S[FOLD_ROWS][COLS];

    __device__ int warp() const { return threadIdx.x / 32; }
    __device__ int lane() const { return threadIdx.x % 32; }
    __device__ int tile_row() const { return threadIdx.x / LANES * FOLD_ROWS; }
    __device__ int column(int i) const { return 4 * (threadIdx.x % LANES + LANES * (i / 4)) + i % 4; }
    __device__ bool row_exists(int row) const { return ROWS_FIT || w.first_row() + pass + row < VALUE_DIM && pass + row < SLICE; }

    // ---- the tile ----------------------------------------------------------------------------------------------------

    __device__ void load_state() {
        const STATE* from = t.state + w.state_at(pass + tile_row());
#pragma unroll
        for (int r = 0; r < FOLD_ROWS; ++r)
#pragma unroll
            for (int i = 0; i < COLS; i += 4) {
                const bool live = w.row.folded > 0 && row_exists(tile_row() + r);
                if constexpr (WIDE) {
                    S[r][i] = S[r][i + 1] = S[r][i + 2] = S[r][i + 3] = 0.0f;
                    if (live) load_vector<4>(from + i64(r) * KEY_DIM + column(i), &S[r][i]);
                } else {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int at = column(i + e);
                        S[r][i + e] = live && at < KEY_DIM ? to_float(from[i64(r) * KEY_DIM + at]) : 0.0f;
                    }
                }
            }
    }

    __device__ void store_state() const {
        STATE* to = t.state_out + w.state_at(pass + tile_row());
#pragma unroll
        for (int r = 0; r < FOLD_ROWS; ++r) {
            if (!row_exists(tile_row() + r)) continue;
#pragma unroll
            for (int i = 0; i < COLS; i += 4) {
                if constexpr (WIDE) {
                    store_vector<4>(to + i64(r) * KEY_DIM + column(i), &S[r][i]);
                } else {
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (column(i + e) < KEY_DIM) to[i64(r) * KEY_DIM + column(i + e)] = from_float<STATE>(S[r][i + e]);
                }
            }
        }
    }

    // ---- a chunk's inputs ----------------------------------------------------------------------------------------------

    template <bool HISTORY>
    __device__ void fetch_token(TokenInputs& in, int token) const {
        if constexpr (HISTORY) {
            const int row = w.history_row(token);
            load_columns(t.ring_k + w.ring_k_at(row), lane(), in.k);
            in.beta = t.ring_beta[w.ring_beta_at(row)];
            if constexpr (PER_CHANNEL)
                load_columns(t.ring_g + w.ring_g_at(row), lane(), in.g);
            else
                in.g[0] = t.ring_g[w.ring_g_at(row)];
        } else {
            load_columns(w.k(token), lane(), in.k);
            load_columns(w.q(token), lane(), in.q);
            in.beta = w.beta_logit(token);
            if constexpr (PER_CHANNEL)
                load_columns(t.gate + w.token(token) * t.gate_stride + w.gate_at(0), lane(), in.g);
            else
                in.g[0] = w.decay_logit(token, 0);
        }
    }

    template <bool HISTORY>
    __device__ void stage_token(const TokenInputs& in, int at, int token) {
        float k[LANE_COLS], q[LANE_COLS], squares[2] = {dot(in.k, in.k), HISTORY ? 0.0f : dot(in.q, in.q)};
        sum_all<32>(squares);
        const float k_scale = rsqrtf(squares[0] + NORM_EPSILON);
        const float q_scale = rsqrtf(squares[1] + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) {
            k[i] = in.k[i] * k_scale;
            q[i] = HISTORY ? 0.0f : in.q[i] * q_scale;
        }
        store_lane_columns(shared.k[at], k);
        if constexpr (!HISTORY) store_lane_columns(shared.q[at], q);
        const bool appends = !HISTORY && pass == 0 && !w.row.absorbs();
        if (appends && w.leads_key_head()) store_columns(t.ring_k_out + w.ring_k_at(w.append_row(token)), lane(), in.k);
        stage_gates<HISTORY>(in, at, token, appends && w.leads_head());
    }

    template <bool HISTORY>
    __device__ void stage_gates(const TokenInputs& in, int at, int token, bool appends) {
        float g[LANE_COLS];
#pragma unroll
        for (int i = 0; i < (PER_CHANNEL ? LANE_COLS : 1); ++i) {
            const int channel = lane_column(lane(), i);
            g[i] = HISTORY ? in.g[i] : PER_CHANNEL && channel >= KEY_DIM ? 0.0f : w.log_decay(in.g[i], channel);
        }
        const float beta = HISTORY ? in.beta : w.beta(in.beta);
        shared.beta[at] = beta;
        shared.rescales[at] = 0;
        if constexpr (PER_CHANNEL)
            store_lane_columns(shared.rescale[at], g);
        else
            shared.rescale[at][0] = g[0];
        if (!appends) return;
        const int row = w.append_row(token);
        t.ring_beta_out[w.ring_beta_at(row)] = beta;
        if constexpr (PER_CHANNEL)
            store_columns(t.ring_g_out + w.ring_g_at(row), lane(), g);
        else
            t.ring_g_out[w.ring_g_at(row)] = g[0];
    }

    // Value n of the thread, of the chunk's VALUES * THREADS: its token in the chunk and its row in the tile.
    __device__ static int value_token(int n) { return (threadIdx.x + n * THREADS) / PASS; }
    __device__ static int value_row(int n) { return (threadIdx.x + n * THREADS) % PASS; }
    __device__ bool value_exists(int n, int count) const { return value_token(n) < count && row_exists(value_row(n)); }

    template <bool HISTORY>
    __device__ float fetch_value(int n, int first) const {
        const int token = first + value_token(n), row = pass + value_row(n);
        if constexpr (HISTORY) return to_float(t.ring_v[w.ring_v_at(w.history_row(token)) + row]);
        return to_float(w.v(token)[row]);
    }
    template <bool HISTORY>
    __device__ void stage_value(int n, int first, float v) {
        shared.v[value_token(n)][value_row(n)] = v;
        if constexpr (!HISTORY && !DERIVED)
            if (!w.row.absorbs())
                t.ring_v_out[w.ring_v_at(w.append_row(first + value_token(n))) + pass + value_row(n)] = from_float<RING>(v);
    }

    template <bool HISTORY>
    __device__ void fetch(ChunkInputs& in, int first, int count) const {
#pragma unroll
        for (int n = 0; n < TOKENS_A_WARP; ++n)
            if (warp() + n * WARPS < count) fetch_token<HISTORY>(in.tokens[n], first + warp() + n * WARPS);
#pragma unroll
        for (int n = 0; n < VALUES; ++n)
            if (value_exists(n, count)) in.v[n] = fetch_value<HISTORY>(n, first);
    }
    template <bool HISTORY>
    __device__ void stage(const ChunkInputs& in, int first, int count) {
#pragma unroll
        for (int n = 0; n < TOKENS_A_WARP; ++n)
            if (warp() + n * WARPS < count)
                stage_token<HISTORY>(in.tokens[n], warp() + n * WARPS, first + warp() + n * WARPS);
#pragma unroll
        for (int n = 0; n < VALUES; ++n)
            if (value_exists(n, count)) stage_value<HISTORY>(n, first, in.v[n]);
    }
    // Both at once, for fewer registers.
    template <bool HISTORY>
    __device__ void fetch_and_stage(int first, int count) {
#pragma unroll 1
        for (int at = warp(); at < count; at += WARPS) {
            TokenInputs in;
            fetch_token<HISTORY>(in, first + at);
            stage_token<HISTORY>(in, at, first + at);
        }
#pragma unroll
        for (int n = 0; n < VALUES; ++n)
            if (value_exists(n, count)) stage_value<HISTORY>(n, first, fetch_value<HISTORY>(n, first));
    }

    __device__ void store_lane_columns(float* row, const float (&from)[LANE_COLS]) const {
#pragma unroll
        for (int i = 0; i < LANE_COLS; i += VEC) store_vector<VEC>(row + lane_column(lane(), i), from + i);
    }

    // Sums the log decays over the chunk, and moves them into the keys where they are per channel.
    template <bool HISTORY>
    __device__ void accumulate_decays(int count) {
        if constexpr (PER_CHANNEL) {
            for (int c = threadIdx.x; c < KEY_PADDED; c += THREADS) {
                float G = 0.0f, decay = 1.0f;
                for (int at = 0; at < count; ++at) {
                    G += shared.rescale[at][c];
                    decay = expf(G);
                    const bool rescale = G < LAZY_LIMIT;
                    shared.rescale[at][c] = rescale ? decay : 1.0f;
                    if (rescale) {
                        atomicOr(&shared.rescales[at], 1);
                        G = 0.0f, decay = 1.0f;
                    }
                    const float k = shared.k[at][c];
                    shared.k[at][c] = k * decay;
                    shared.k_update[at][c] = k * expf(-G);
                    if constexpr (!HISTORY) shared.q[at][c] *= decay;
                }
                shared.last[c] = decay;
            }
        } else if (threadIdx.x < count) {
            // Every token's thread runs through the sums before its own; they are few.
            float G = 0.0f, scale = 1.0f;
            for (int at = 0; at <= threadIdx.x; ++at) {
                G += shared.rescale[at][0];
                const bool rescale = G < LAZY_LIMIT;
                scale = rescale ? expf(G) : 1.0f;
                G = rescale ? 0.0f : G;
            }
            shared.decay[threadIdx.x] = expf(G);
            shared.inverse[threadIdx.x] = expf(-G);
            shared.rescales[threadIdx.x] = scale != 1.0f;
            shared.rescale[threadIdx.x][1] = scale;
        }
    }

    // ---- the recurrence ------------------------------------------------------------------------------------------------

    __device__ void load_keys(const float* row, float (&to)[COLS]) const {
#pragma unroll
        for (int i = 0; i < COLS; i += 4) load_vector<4>(row + column(i), to + i);
    }
    __device__ void scale(const float* factors) {
        float f[COLS];
        load_keys(factors, f);
#pragma unroll
        for (int r = 0; r < FOLD_ROWS; ++r)
#pragma unroll
            for (int i = 0; i < COLS; ++i) S[r][i] *= f[i];
    }
    __device__ void scale(float factor) {
#pragma unroll
        for (int r = 0; r < FOLD_ROWS; ++r)
#pragma unroll
            for (int i = 0; i < COLS; ++i) S[r][i] *= factor;
    }

    template <bool HISTORY>
    __device__ void take(int at, int first) {
        if (shared.rescales[at]) {
            if constexpr (PER_CHANNEL)
                scale(shared.rescale[at]);
            else
                scale(shared.rescale[at][1]);
        }
        const float decay = PER_CHANNEL ? 1.0f : shared.decay[at], inverse = PER_CHANNEL ? 1.0f : shared.inverse[at];
        float k[COLS], u[FOLD_ROWS], sums[FOLD_ROWS];
        load_keys(shared.k[at], k);
        load_vector<FOLD_ROWS>(&shared.v[at][tile_row()], u);
        if constexpr (!(HISTORY && DERIVED)) {
#pragma unroll
            for (int r = 0; r < FOLD_ROWS; ++r) sums[r] = dot(S[r], k);
            sum_all<LANES>(sums);
#pragma unroll
            for (int r = 0; r < FOLD_ROWS; ++r) u[r] = shared.beta[at] * (u[r] - decay * sums[r]);
        }
        if constexpr (!HISTORY && DERIVED) append_update(u, w.append_row(first + at));
        if constexpr (PER_CHANNEL) load_keys(shared.k_update[at], k);
#pragma unroll
        for (int r = 0; r < FOLD_ROWS; ++r) {
            const float scaled = u[r] * inverse;
#pragma unroll
            for (int i = 0; i < COLS; ++i) S[r][i] = fmaf(scaled, k[i], S[r][i]);
        }
        if constexpr (!HISTORY) {
            load_keys(shared.q[at], k);
#pragma unroll
            for (int r = 0; r < FOLD_ROWS; ++r) sums[r] = dot(S[r], k);
            sum_scattered<LANES>(sums, threadIdx.x);
            if (threadIdx.x % COPIES<LANES, FOLD_ROWS> == 0)
                shared.o[at][tile_row() + first_kept<LANES, FOLD_ROWS>(threadIdx.x)] = decay * sums[0];
        }
    }

    __device__ void append_update(const float (&u)[FOLD_ROWS], int row) const {
        if (w.row.absorbs() || threadIdx.x % LANES) return;
#pragma unroll
        for (int r = 0; r < FOLD_ROWS; ++r)
            if (row_exists(tile_row() + r))
                t.ring_v_out[w.ring_v_at(row) + pass + tile_row() + r] = from_float<RING>(u[r]);
    }

    __device__ void write_outputs(int first, int count) const {
        for (int n = threadIdx.x; n < count * PASS; n += THREADS)
            if (row_exists(n % PASS)) w.o(first + n / PASS)[pass + n % PASS] = from_float<ACT>(shared.o[n / PASS][n % PASS]);
    }

    // Takes `total` entries, of the ring or of the step.
    template <bool HISTORY>
    __device__ void replay(int total) {
        ChunkInputs in;
        if constexpr (PREFETCH) fetch<HISTORY>(in, 0, min(CHUNK, total));
#pragma unroll 1
        for (int first = 0; first < total; first += CHUNK) {
            const int count = min(CHUNK, total - first);
            __syncthreads();
            if constexpr (!HISTORY)
                if (first) write_outputs(first - CHUNK, CHUNK);
            if constexpr (PREFETCH)
                stage<HISTORY>(in, first, count);
            else
                fetch_and_stage<HISTORY>(first, count);
            __syncthreads();
            accumulate_decays<HISTORY>(count);
            __syncthreads();
            if constexpr (PREFETCH)
                if (first + CHUNK < total) fetch<HISTORY>(in, first + CHUNK, min(CHUNK, total - first - CHUNK));
#pragma unroll 1
            for (int at = 0; at < count; ++at) take<HISTORY>(at, first);
            if constexpr (PER_CHANNEL)
                scale(shared.last);
            else
                scale(shared.decay[count - 1]);
        }
        if constexpr (!HISTORY) {
            __syncthreads();
            const int last = (total - 1) / CHUNK * CHUNK;
            write_outputs(last, total - last);
        }
    }
};

// The whole step of a row: fold the ring, write the checkpoint if the plan says so, answer and append the tokens.
__device__ __forceinline__ void fold_step(const Tensors& t, const Work& w, FoldShared& shared) {
#pragma unroll 1
    for (int pass = 0; pass < SLICE; pass += PASS) {
        Fold fold{t, w, shared, pass};
        fold.load_state();
        if (w.row.history()) fold.replay<true>(w.row.history());
        if (w.row.folds() && !w.row.absorbs()) fold.store_state();
        fold.replay<false>(w.row.tokens);
        if (w.row.absorbs()) fold.store_state();
    }
}
