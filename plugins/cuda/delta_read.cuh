// The answer of a step that leaves the checkpoint alone, from the checkpoint and the ring, without touching the state twice.
//
// Unrolling the recurrence from the token of interest backwards gives its adjoint. With x = q of token t, for j = t ... 1:
//
//     c_j = beta_j (k_j . x),   o += c_j v_j,   x = exp(g_j) * (x - c_j k_j)
//
// and finally o += S0 x, where S0 is the checkpoint: one product with the state per token, raw inputs alone in the ring,
// one formula for scalar and per-channel decays, and no exponent above zero. The x and c do not depend on S0, so the
// state's tiles are requested first and arrive while the warps work out the x of their tokens, one of a head at a time. A
// block may have several heads, whose chains run side by side, so that more of the state stands behind each wait for them.
#pragma once
#include "async_copy.cuh"
#include "bulk_copy.cuh"
#include "delta_lanes.cuh"

constexpr int READ_TOKENS = TOKENS > 0 ? TOKENS : 1;
// advance folds when history + T > WINDOW, and a variant serves more than TOKENS / 2 tokens; longer histories are folded.
constexpr int READ_HISTORY = WINDOW - READ_TOKENS / 2 - 1 > 0 ? WINDOW - READ_TOKENS / 2 - 1 : 1;
constexpr int HEADS = HEADS_A_BLOCK;
constexpr int KEYS = HEADS > HEADS_PER_KEY ? HEADS / HEADS_PER_KEY : 1;  // key heads of the block
constexpr int HEAD_WARPS = WARPS / HEADS;                                 // warps for the chains of a head
constexpr int CHAINS = (READ_TOKENS + HEAD_WARPS - 1) / HEAD_WARPS;       // tokens of a warp
static_assert(WARPS % HEADS == 0 && (HEADS_PER_KEY % HEADS == 0 || HEADS % HEADS_PER_KEY == 0), "heads of a block");
// Entries that a chain takes at once: ring rows, the step's tokens.
constexpr int CHAIN_BLOCK = 4, TOKEN_BLOCK = READ_TOKENS < 4 ? READ_TOKENS : 4;
constexpr int WARP_ROWS = SLICE / WARPS > 0 ? SLICE / WARPS : 1;
constexpr int STAGES = 2;

// Everything but the state's tiles.
struct ReadInputs {
    RING_K ring_k[KEYS][READ_HISTORY][KEY_DIM];
    RING ring_v[HEADS][READ_HISTORY][SLICE];
    ACT k[KEYS][READ_TOKENS][KEY_DIM];
    ACT v[HEADS][READ_TOKENS][SLICE];
    float ring_g[HEADS][READ_HISTORY][PER_CHANNEL ? KEY_DIM : 4];
    float g[HEADS][READ_TOKENS][PER_CHANNEL ? KEY_DIM : 4];
    float x[HEADS][READ_TOKENS][KEY_PADDED];
    float c[HEADS][READ_TOKENS][READ_HISTORY + READ_TOKENS];  // history, then tokens
    float o[HEADS][READ_TOKENS][SLICE];
    float ring_beta[HEADS][READ_HISTORY], beta[HEADS][READ_TOKENS];
    u64 tile_ready[WARPS][STAGES];
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
constexpr int HEAD_TILES = WARP_ROWS / TILE_ROWS, TILES = HEADS * HEAD_TILES;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool HAS_BULK_COPY = true;
#else
constexpr bool HAS_BULK_COPY = false;
#endif
constexpr bool READS = !COPIED && HAS_BULK_COPY && TOKENS > 0 && !(TOKENS == 1 && WINDOW == 1) && WIDE && !DERIVED && VALUE_DIM % SPLIT == 0 && SLICE % 16 == 0 && TILES_FIT;

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
        const STATE* from = t.state + w.of_head(tile / HEAD_TILES).state_at(warp * WARP_ROWS + tile % HEAD_TILES * TILE_ROWS);
        stream_to_shared(shared.tiles[warp][tile % STAGES], from, BYTES, barrier);
    }

    // The ring's live rows and the step's k and v first, since the chains wait for them, then every warp's first tiles.
    __device__ void request() {
        if (lane == 0) {
            for (int s = 0; s < STAGES; ++s) init_barrier(&in.tile_ready[warp][s]);
            publish_barriers();
        }
        for (int j = warp; j < history + tokens; j += WARPS) {
            const int token = j - history, row = w.history_row(j);
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                const Work head = w.of_head(n * (HEADS / KEYS));
                if (j < history)
                    request_row<KEY_DIM>(in.ring_k[n][j], t.ring_k + head.ring_k_at(row));
                else
                    request_row<KEY_DIM>(in.k[n][token], head.k(token));
            }
#pragma unroll
            for (int n = 0; n < HEADS; ++n) {
                const Work head = w.of_head(n);
                if (j < history) {
                    request_row<SLICE>(in.ring_v[n][j], t.ring_v + head.ring_v_at(row));
                    if constexpr (PER_CHANNEL) request_row<KEY_DIM>(in.ring_g[n][j], t.ring_g + head.ring_g_at(row));
                } else {
                    request_row<SLICE>(in.v[n][token], head.v(token));
                }
            }
        }
        if (lane == 0 && w.row.folded > 0)
            for (int tile = 0; tile < min(STAGES, TILES); ++tile) request_tile(tile);
    }
    template <int N, typename T>
    __device__ void request_row(T* to, const T* from) const {
        for (int at = lane * 16 / int(sizeof(T)); at < N; at += 512 / int(sizeof(T))) copy_16_bytes(to + at, from + at);
    }

    // The step's gates, appended to the ring on the way, and the ring's scalars.
    __device__ void load_gates() {
        for (int m = threadIdx.x; m < HEADS * history; m += THREADS) {
            const int n = m % HEADS, j = m / HEADS, row = w.history_row(j);
            const Work head = w.of_head(n);
            in.ring_beta[n][j] = t.ring_beta[head.ring_beta_at(row)];
            if constexpr (!PER_CHANNEL) in.ring_g[n][j][0] = t.ring_g[head.ring_g_at(row)];
        }
        for (int m = threadIdx.x; m < HEADS * tokens; m += THREADS) {
            const int n = m % HEADS, i = m / HEADS;
            const Work head = w.of_head(n);
            const float beta = head.beta(head.beta_logit(i));
            in.beta[n][i] = beta;
            if (head.leads_head()) t.ring_beta_out[head.ring_beta_at(w.append_row(i))] = beta;
        }
        constexpr int CHANNELS_A_TOKEN = PER_CHANNEL ? KEY_DIM : 1;
        for (int m = threadIdx.x; m < HEADS * tokens * CHANNELS_A_TOKEN; m += THREADS) {
            const int channel = m % CHANNELS_A_TOKEN, n = m / CHANNELS_A_TOKEN % HEADS, i = m / (CHANNELS_A_TOKEN * HEADS);
            const Work head = w.of_head(n);
            const float g = head.log_decay(head.decay_logit(i, channel), channel);
            in.g[n][i][channel] = g;
            if (head.leads_head()) t.ring_g_out[head.ring_g_at(w.append_row(i)) + channel] = g;
        }
    }

    // ---- the adjoint chains --------------------------------------------------------------------------------------------

    // Head of the warp's chains, and their tokens.
    __device__ int chain_head() const { return warp % HEADS; }
    __device__ int chain_token(int chain) const { return warp / HEADS + chain * HEAD_WARPS; }

    // BLOCK entries back, for those of the warp's tokens that are not older. Entry m of the block is older than entry m - 1.
    // With D_nm the decays of entries n ... m - 1 (channel by channel),
    //
    //     c_m = beta_m (k_m . D_0m x - sum_{n<m} c_n k_m . D_nm k_n),    x = D_0B x - sum_n c_n D_nB k_n
    //
    // so that the sums over lanes, which take most of the time, are all formed at once instead of one behind the other.
    // `newest`: index of entry 0 among the step's tokens, below zero for the ring. `entry`: its column in c. `live` entries
    // of the block exist; the others change nothing.
    template <int BLOCK, typename T>
    __device__ void step_back(float (&x)[CHAINS][LANE_COLS], const T* keys, const float* log_decays, const float* betas,
                              int newest, int entry, int live) {
        constexpr int PAIRS_OF_KEYS = BLOCK * (BLOCK + 1) / 2;
        constexpr int COLUMNS = sizeof(in.g[0][0]) / sizeof(float);
        float k[BLOCK][LANE_COLS], decay[BLOCK][LANE_COLS];
#pragma unroll
        for (int m = 0; m < BLOCK; ++m) {
            if (m >= live) {
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) k[m][i] = 0.0f, decay[m][i] = 1.0f;
                continue;
            }
            load_columns(keys - m * KEY_DIM, lane, k[m]);
            if constexpr (PER_CHANNEL) {
                load_columns(log_decays - m * COLUMNS, lane, decay[m]);
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) decay[m][i] = expf(decay[m][i]);
            } else {
                decay[m][0] = expf(log_decays[-m * COLUMNS]);
            }
        }
        // Products of keys with older keys, then with x.
        constexpr int SUMS = PAIRS_OF_KEYS + BLOCK * CHAINS, PADDED = SUMS <= 2 ? 2 : SUMS <= 4 ? 4 : SUMS <= 8 ? 8 : SUMS <= 16 ? 16 : 32;
        static_assert(SUMS <= PADDED, "more sums than lanes");
        float sums[PADDED] = {};
#pragma unroll
        for (int n = 0; n < BLOCK; ++n) {
            float carried[LANE_COLS];
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) carried[i] = k[n][i];
#pragma unroll
            for (int m = n; m < BLOCK; ++m) {
                sums[m * (m + 1) / 2 + n] = dot(k[m], carried);
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) carried[i] *= decay[m][PER_CHANNEL ? i : 0];
            }
        }
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) {
            float carried[LANE_COLS];
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) carried[i] = x[chain][i];
#pragma unroll
            for (int m = 0; m < BLOCK; ++m) {
                sums[PAIRS_OF_KEYS + chain * BLOCK + m] = dot(k[m], carried);
                if (newest - m > chain_token(chain)) continue;
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) carried[i] *= decay[m][PER_CHANNEL ? i : 0];
            }
        }
        if constexpr (SUMS > 8) {
            sum_scattered<32>(sums, lane);
            const float mine = sums[0];
#pragma unroll
            for (int n = 0; n < SUMS; ++n) sums[n] = __shfl_sync(~0u, mine, n * COPIES<32, PADDED>);
        } else {
            sum_all<32>(sums);
        }
        float norm[BLOCK], beta[BLOCK];
#pragma unroll
        for (int m = 0; m < BLOCK; ++m) {
            norm[m] = rsqrtf(sums[m * (m + 1) / 2 + m] + NORM_EPSILON);
            beta[m] = m < live ? betas[-m] * norm[m] : 0.0f;
        }
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) {
            const int token = chain_token(chain);
            if (token >= tokens) continue;
            float along[BLOCK];  // c over the norm of k, which multiplies k as it is stored; zero for entries newer than x
#pragma unroll
            for (int m = 0; m < BLOCK; ++m) {
                float sum = sums[PAIRS_OF_KEYS + chain * BLOCK + m];
#pragma unroll
                for (int n = 0; n < m; ++n) sum = fmaf(-along[n], sums[m * (m + 1) / 2 + n], sum);
                const float c = newest - m <= token ? beta[m] * sum : 0.0f;
                along[m] = c * norm[m];
                if (lane == 0 && m < live) in.c[chain_head()][token][entry - m] = c;
            }
#pragma unroll
            for (int m = 0; m < BLOCK; ++m) {
                if (newest - m > token) continue;
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i)
                    x[chain][i] = decay[m][PER_CHANNEL ? i : 0] * fmaf(-along[m], k[m][i], x[chain][i]);
            }
        }
    }

    __device__ void load_queries(float (&x)[CHAINS][LANE_COLS]) const {
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) {
            const int token = chain_token(chain);
            if (token < tokens) {
                load_columns(w.of_head(chain_head()).q(token), lane, x[chain]);
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
        const int n = chain_head(), key = n / (HEADS / KEYS);
#pragma unroll 1
        for (int i = last; i >= 0; i -= TOKEN_BLOCK)
            step_back<TOKEN_BLOCK>(x, in.k[key][i], in.g[n][i], &in.beta[n][i], i, history + i, i + 1);
#pragma unroll 1
        for (int j = history - 1; j >= 0; j -= CHAIN_BLOCK)
            step_back<CHAIN_BLOCK>(x, in.ring_k[key][j], in.ring_g[n][j], &in.ring_beta[n][j], -1, j, j + 1);
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain)
            if (chain_token(chain) < tokens) store_columns(in.x[n][chain_token(chain)], lane, x[chain]);
    }

    // ---- the product with the checkpoint -------------------------------------------------------------------------------

    // Tokens whose x fits into registers at once, state rows whose sums are reduced together.
    static constexpr int GROUP = READ_TOKENS * LANE_COLS <= 64 ? READ_TOKENS : 64 / LANE_COLS;
    static constexpr int GROUPS = READ_TOKENS / GROUP;
    static constexpr int ROWS = TILE_ROWS * GROUP <= 32 ? TILE_ROWS : 32 / GROUP > 0 ? 32 / GROUP : 1;

    __device__ void load_x(float (&x)[GROUP][LANE_COLS], int n, int group) const {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) load_columns(in.x[n][group * GROUP + i], lane, x[i]);
    }

    // Products of ROWS rows of a tile with the x of a group of tokens, to their rows of o.
    __device__ void multiply(const STATE (*tile)[KEY_DIM], const float (&x)[GROUP][LANE_COLS], float (*o)[SLICE]) const {
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
                o[at % GROUP][at / GROUP] = sums[n];
            }
        }
    }

    __device__ void read_state() {
        float x[GROUP][LANE_COLS];
#pragma unroll 1
        for (int tile = 0; tile < TILES; ++tile) {
            const int n = tile / HEAD_TILES, first_row = warp * WARP_ROWS + tile % HEAD_TILES * TILE_ROWS;
            if (GROUPS == 1 && tile % HEAD_TILES == 0) load_x(x, n, 0);
            wait_barrier(&in.tile_ready[warp][tile % STAGES], tile / STAGES % 2);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                if constexpr (GROUPS > 1) load_x(x, n, group);
#pragma unroll
                for (int r = 0; r < TILE_ROWS; r += ROWS)
                    multiply(shared.tiles[warp][tile % STAGES] + r, x,
                             reinterpret_cast<float(*)[SLICE]>(&in.o[n][group * GROUP][first_row + r]));
            }
            __syncwarp();
            if (lane == 0 && tile + STAGES < TILES) request_tile(tile + STAGES);
        }
    }

    // ---- what does not depend on the checkpoint ------------------------------------------------------------------------

    // o += sum_j c_j v_j for the warp's value rows of head n, a lane each; appends the step's v.
    __device__ void finish(int n) {
        const Work head = w.of_head(n);
        for (int r = lane; r < WARP_ROWS; r += 32) {
            const int row = warp * WARP_ROWS + r;
            float o[READ_TOKENS];
#pragma unroll
            for (int i = 0; i < READ_TOKENS; ++i) o[i] = w.row.folded > 0 && i < tokens ? in.o[n][i][row] : 0.0f;
            for (int j = 0; j < history; ++j) {
                const float v = to_float(in.ring_v[n][j][row]);
#pragma unroll
                for (int i = 0; i < READ_TOKENS; ++i)
                    if (i < tokens) o[i] = fmaf(in.c[n][i][j], v, o[i]);
            }
            for (int j = 0; j < tokens; ++j) {
                const float v = to_float(in.v[n][j][row]);
                t.ring_v_out[head.ring_v_at(w.append_row(j)) + row] = from_float<RING>(v);
#pragma unroll
                for (int i = 0; i < READ_TOKENS; ++i)
                    if (i >= j && i < tokens) o[i] = fmaf(in.c[n][i][history + j], v, o[i]);
            }
#pragma unroll
            for (int i = 0; i < READ_TOKENS; ++i)
                if (i < tokens) head.o(i)[row] = from_float<ACT>(o[i]);
        }
    }

    __device__ void append_keys() {
#pragma unroll
        for (int key = 0; key < KEYS; ++key) {
            const Work head = w.of_head(key * (HEADS / KEYS));
            if (!head.leads_key_head()) continue;
            for (int m = threadIdx.x; m < tokens * KEY_DIM; m += THREADS) {
                const int i = m / KEY_DIM, column = m % KEY_DIM;
                t.ring_k_out[head.ring_k_at(w.append_row(i)) + column] = from_float<RING_K>(to_float(in.k[key][i][column]));
            }
        }
    }
};

__device__ __forceinline__ void read_step(const Work& w, ReadShared& shared) {
    Read read(w, shared);
    read.request();
    float x[CHAINS][LANE_COLS];
    read.load_queries(x);
    read.load_gates();
    wait_copies();
    __syncthreads();  // ring rows, gates and barriers
    if (read.chain_token(0) < read.tokens) read.run_chains(x);
    __syncthreads();  // x and c
    if (w.row.folded > 0) read.read_state();
    __syncwarp();  // o
    read.append_keys();
#pragma unroll 1
    for (int n = 0; n < HEADS; ++n) read.finish(n);
}
