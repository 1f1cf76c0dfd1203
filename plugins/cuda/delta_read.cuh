// The answer of a step that leaves the checkpoint alone, from the checkpoint and the ring, without touching the state twice.
//
// Unrolling the recurrence from the token of interest backwards gives its adjoint. With x = q of token t, for j = t ... 1:
//
//     c_j = beta_j (k_j . x),   o += c_j v_j,   x = exp(g_j) * (x - c_j k_j)
//
// and finally o += S0 x, where S0 is the checkpoint: one product with the state per token, raw inputs alone in the ring,
// one formula for scalar and per-channel decays, and no exponent above zero. The x and c do not depend on S0, so the
// state's tiles are requested first and arrive while the warps work out the x of their tokens (one token a warp).
#pragma once
#include "bulk_copy.cuh"
#include "delta_lanes.cuh"

constexpr int READ_TOKENS = TOKENS > 0 ? TOKENS : 1;
// advance folds when history + T > WINDOW, and a variant serves more than TOKENS / 2 tokens; longer histories are folded.
constexpr int READ_HISTORY = WINDOW - READ_TOKENS / 2 - 1 > 0 ? WINDOW - READ_TOKENS / 2 - 1 : 1;
constexpr int CHAINS = (READ_TOKENS + WARPS - 1) / WARPS;  // tokens of a warp
constexpr int WARP_ROWS = SLICE / WARPS > 0 ? SLICE / WARPS : 1;
constexpr int STAGES = 2;

// Everything but the state's tiles.
struct ReadInputs {
    RING ring_k[READ_HISTORY][KEY_DIM];
    RING ring_v[READ_HISTORY][SLICE];
    ACT k[READ_TOKENS][KEY_DIM];
    ACT v[READ_TOKENS][SLICE];
    float ring_g[READ_HISTORY][PER_CHANNEL ? KEY_DIM : 4];
    float g[READ_TOKENS][PER_CHANNEL ? KEY_DIM : 4];
    float x[READ_TOKENS][KEY_PADDED];
    float c[READ_TOKENS][READ_HISTORY + READ_TOKENS];  // history, then tokens
    float o[READ_TOKENS][SLICE];
    float ring_beta[READ_HISTORY], beta[READ_TOKENS];
    u64 inputs_ready, tile_ready[WARPS][STAGES];
};

// State rows of a tile: as many as shared memory holds, 4 KB at most.
constexpr int ROW_BYTES = KEY_DIM * int(sizeof(STATE));
constexpr int tile_rows(int rows) {
    return rows == 0 ? 0
           : WARP_ROWS % rows == 0 && rows * ROW_BYTES <= 4096 &&
                   WARPS * STAGES * rows * ROW_BYTES + int(sizeof(ReadInputs)) + 256 <= SHARED_LIMIT
               ? rows
               : tile_rows(rows / 2);
}
constexpr bool TILES_FIT = tile_rows(32) > 0;
constexpr int TILE_ROWS = TILES_FIT ? tile_rows(32) : 1;
constexpr int TILES = WARP_ROWS / TILE_ROWS;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool HAS_BULK_COPY = true;
#else
constexpr bool HAS_BULK_COPY = false;
#endif
constexpr bool READS = HAS_BULK_COPY && TOKENS > 0 && WIDE && !DERIVED && VALUE_DIM % SPLIT == 0 && SLICE % 16 == 0 && TILES_FIT;

struct ReadShared {
    alignas(128) STATE tiles[WARPS][STAGES][TILE_ROWS][KEY_DIM];
    alignas(16) ReadInputs in;
};

struct Read {
    const Tensors& t;
    const Work& w;
    ReadShared& shared;
    ReadInputs& in;
    const int warp, lane, history, tokens;

    __device__ Read(const Work& work, ReadShared& memory)
        : t(work.t), w(work), shared(memory), in(memory.in), warp(threadIdx.x / 32), lane(threadIdx.x % 32),
          history(work.row.history()), tokens(work.row.tokens) {}

    // ---- requests ------------------------------------------------------------------------------------------------------

    __device__ void request_tile(int tile) {
        u64* barrier = &in.tile_ready[warp][tile % STAGES];
        constexpr u32 BYTES = TILE_ROWS * ROW_BYTES;
        expect_bytes(barrier, BYTES);
        const STATE* from = t.state + w.state_at(warp * WARP_ROWS + tile * TILE_ROWS);
        stream_to_shared(shared.tiles[warp][tile % STAGES], from, BYTES, barrier);
    }

    // Every warp asks for its own first tiles; warp 0 for the ring rows and the step's k and v as well.
    __device__ void request() {
        if (lane == 0) {
            for (int s = 0; s < STAGES; ++s) init_barrier(&in.tile_ready[warp][s]);
            if (warp == 0) init_barrier(&in.inputs_ready);
            publish_barriers();
            if (w.row.folded > 0)
                for (int tile = 0; tile < min(STAGES, TILES); ++tile) request_tile(tile);
        }
        if (warp != 0) return;
        constexpr u32 RING_K_BYTES = KEY_DIM * sizeof(RING), RING_V_BYTES = SLICE * sizeof(RING);
        constexpr u32 RING_G_BYTES = PER_CHANNEL ? KEY_DIM * sizeof(float) : 0;
        constexpr u32 K_BYTES = KEY_DIM * sizeof(ACT), V_BYTES = SLICE * sizeof(ACT);
        u64* barrier = &in.inputs_ready;
        if (lane == 0)
            expect_bytes(barrier, history * (RING_K_BYTES + RING_V_BYTES + RING_G_BYTES) + tokens * (K_BYTES + V_BYTES));
        __syncwarp();
        for (int j = lane; j < history; j += 32) {
            const int row = w.history_row(j);
            copy_to_shared(in.ring_k[j], t.ring_k + w.ring_k_at(row), RING_K_BYTES, barrier);
            copy_to_shared(in.ring_v[j], t.ring_v + w.ring_v_at(row), RING_V_BYTES, barrier);
            if constexpr (PER_CHANNEL)
                copy_to_shared(in.ring_g[j], t.ring_g + w.ring_g_at(row), RING_G_BYTES, barrier);
        }
        if (lane < tokens) {
            copy_to_shared(in.k[lane], w.k(lane), K_BYTES, barrier);
            copy_to_shared(in.v[lane], w.v(lane), V_BYTES, barrier);
        }
    }

    // The step's gates, appended to the ring on the way, and the ring's scalars.
    __device__ void load_gates() {
        for (int j = threadIdx.x; j < history; j += THREADS) {
            const int row = w.history_row(j);
            in.ring_beta[j] = t.ring_beta[w.ring_beta_at(row)];
            if constexpr (!PER_CHANNEL) in.ring_g[j][0] = t.ring_g[w.ring_g_at(row)];
        }
        for (int i = threadIdx.x; i < tokens; i += THREADS) {
            const float beta = w.beta(w.beta_logit(i));
            in.beta[i] = beta;
            if (w.leads_head()) t.ring_beta_out[w.ring_beta_at(w.append_row(i))] = beta;
        }
        constexpr int CHANNELS_A_TOKEN = PER_CHANNEL ? KEY_DIM : 1;
        for (int n = threadIdx.x; n < tokens * CHANNELS_A_TOKEN; n += THREADS) {
            const int i = n / CHANNELS_A_TOKEN, channel = n % CHANNELS_A_TOKEN;
            const float g = w.log_decay(w.decay_logit(i, channel), channel);
            in.g[i][channel] = g;
            if (w.leads_head()) t.ring_g_out[w.ring_g_at(w.append_row(i)) + channel] = g;
        }
    }

    // ---- the adjoint chains --------------------------------------------------------------------------------------------

    __device__ int chain_token(int chain) const { return warp + chain * WARPS; }

    // One entry of the sequence, for the warp's tokens not older than it. `newest`: index of the entry among the step's
    // tokens, below zero for the ring.
    template <typename T>
    __device__ void step_back(float (&x)[CHAINS][LANE_COLS], const T* k_row, const float* g, float beta, int newest, int entry) {
        float k[LANE_COLS], sums[CHAINS + 1];
        load_columns(k_row, lane, k);
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) sums[chain] = dot(k, x[chain]);
        sums[CHAINS] = dot(k, k);
        sum_all<32>(sums);
        const float norm = rsqrtf(sums[CHAINS] + NORM_EPSILON);
        float decay[LANE_COLS];
        if constexpr (PER_CHANNEL) {
            load_columns(g, lane, decay);
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) decay[i] = expf(decay[i]);
        } else {
            decay[0] = expf(g[0]);
        }
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) {
            const int token = chain_token(chain);
            if (token < newest || token >= tokens) continue;
            const float c = beta * norm * sums[chain], along = c * norm;
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i)
                x[chain][i] = decay[PER_CHANNEL ? i : 0] * fmaf(-along, k[i], x[chain][i]);
            if (lane == 0) in.c[token][entry] = c;
        }
    }

    __device__ void load_queries(float (&x)[CHAINS][LANE_COLS]) const {
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) {
            const int token = chain_token(chain);
            if (token < tokens) {
                load_columns(w.q(token), lane, x[chain]);
            } else {
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) x[chain][i] = 0.0f;
            }
        }
    }

    __device__ void run_chains(float (&x)[CHAINS][LANE_COLS]) {
        float squares[CHAINS];
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) squares[chain] = dot(x[chain], x[chain]);
        sum_all<32>(squares);
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) {
            const float scale = rsqrtf(squares[chain] + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) x[chain][i] *= scale;
        }
        const int last = min(tokens - 1, chain_token(CHAINS - 1));  // entries behind it concern none of the warp's tokens
        for (int i = last; i >= 0; --i) step_back(x, in.k[i], in.g[i], in.beta[i], i, history + i);
#pragma unroll 4
        for (int j = history - 1; j >= 0; --j) step_back(x, in.ring_k[j], in.ring_g[j], in.ring_beta[j], -1, j);
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain)
            if (chain_token(chain) < tokens) store_columns(in.x[chain_token(chain)], lane, x[chain]);
    }

    // ---- the product with the checkpoint -------------------------------------------------------------------------------

    // Tokens whose x fits into registers at once, state rows whose sums are reduced together.
    static constexpr int GROUP = READ_TOKENS * LANE_COLS <= 64 ? READ_TOKENS : 64 / LANE_COLS;
    static constexpr int GROUPS = READ_TOKENS / GROUP;
    static constexpr int ROWS = TILE_ROWS * GROUP <= 32 ? TILE_ROWS : 32 / GROUP > 0 ? 32 / GROUP : 1;

    __device__ void load_x(float (&x)[GROUP][LANE_COLS], int group) const {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) load_columns(in.x[group * GROUP + i], lane, x[i]);
    }

    __device__ void multiply(const STATE (*tile)[KEY_DIM], const float (&x)[GROUP][LANE_COLS], int first_row, int group) {
        constexpr int SUMS = ROWS * GROUP;
        float sums[SUMS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float s[LANE_COLS];
            load_columns(tile[r], lane, s);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) sums[r * GROUP + i] = dot(s, x[i]);
        }
        sum_scattered<32>(sums, lane);
        if (lane % COPIES<32, SUMS> == 0) {
#pragma unroll
            for (int n = 0; n < KEPT<32, SUMS>; ++n) {
                const int at = first_kept<32, SUMS>(lane) + n;
                in.o[group * GROUP + at % GROUP][first_row + at / GROUP] = sums[n];
            }
        }
    }

    __device__ void read_state() {
        float x[GROUP][LANE_COLS];
        if constexpr (GROUPS == 1) load_x(x, 0);
        for (int tile = 0; tile < TILES; ++tile) {
            wait_barrier(&in.tile_ready[warp][tile % STAGES], tile / STAGES % 2);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                if constexpr (GROUPS > 1) load_x(x, group);
#pragma unroll
                for (int r = 0; r < TILE_ROWS; r += ROWS)
                    multiply(shared.tiles[warp][tile % STAGES] + r, x, warp * WARP_ROWS + tile * TILE_ROWS + r, group);
            }
            __syncwarp();
            if (lane == 0 && tile + STAGES < TILES) request_tile(tile + STAGES);
        }
    }

    // ---- what does not depend on the checkpoint ------------------------------------------------------------------------

    // o += sum_j c_j v_j for the warp's value rows, a lane each; appends the step's v.
    __device__ void finish() {
        for (int r = lane; r < WARP_ROWS; r += 32) {
            const int row = warp * WARP_ROWS + r;
            float o[READ_TOKENS];
#pragma unroll
            for (int i = 0; i < READ_TOKENS; ++i) o[i] = w.row.folded > 0 && i < tokens ? in.o[i][row] : 0.0f;
            for (int j = 0; j < history; ++j) {
                const float v = to_float(in.ring_v[j][row]);
#pragma unroll
                for (int i = 0; i < READ_TOKENS; ++i)
                    if (i < tokens) o[i] = fmaf(in.c[i][j], v, o[i]);
            }
            for (int j = 0; j < tokens; ++j) {
                const float v = to_float(in.v[j][row]);
                t.ring_v_out[w.ring_v_at(w.append_row(j)) + row] = from_float<RING>(v);
#pragma unroll
                for (int i = 0; i < READ_TOKENS; ++i)
                    if (i >= j && i < tokens) o[i] = fmaf(in.c[i][history + j], v, o[i]);
            }
#pragma unroll
            for (int i = 0; i < READ_TOKENS; ++i)
                if (i < tokens) w.o(i)[row] = from_float<ACT>(o[i]);
        }
    }

    __device__ void append_keys() {
        if (!w.leads_key_head()) return;
        for (int n = threadIdx.x; n < tokens * KEY_DIM; n += THREADS) {
            const int i = n / KEY_DIM, column = n % KEY_DIM;
            t.ring_k_out[w.ring_k_at(w.append_row(i)) + column] = from_float<RING_K>(to_float(in.k[i][column]));
        }
    }
};

__device__ __forceinline__ void read_step(const Work& w, ReadShared& shared) {
    Read read(w, shared);
    read.request();
    float x[CHAINS][LANE_COLS];
    read.load_queries(x);
    read.load_gates();
    __syncthreads();  // gates and barriers
    wait_barrier(&shared.in.inputs_ready, 0);
    if (read.warp < read.tokens) read.run_chains(x);
    __syncthreads();  // x and c
    if (w.row.folded > 0) read.read_state();
    __syncwarp();  // o
    read.append_keys();
    read.finish();
}
