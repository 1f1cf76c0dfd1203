// The adjoint of a step (delta_read.cuh), a warp a token: entry after entry, from the token backwards.
#pragma once
#include "delta_read_shape.cuh"
#include "ptx/async_copy.cuh"

// Entries that a chain takes at once: ring rows, the step's tokens.
constexpr int CHAIN_BLOCK = 4, TOKEN_BLOCK = READ_TOKENS < 4 ? READ_TOKENS : 4;

// A row of N elements, by a warp.
template <int N, typename T>
__device__ __forceinline__ void request_row(T* to, const T* from, int lane) {
    for (int at = lane * 16 / int(sizeof(T)); at < N; at += 512 / int(sizeof(T))) copy_16_bytes(to + at, from + at);
}

struct ChainInputs {
    RING_K ring_k[KEYS][READ_HISTORY][KEY_DIM];
    ACT k[KEYS][READ_TOKENS][KEY_DIM];
    alignas(16) float ring_g[HEADS][READ_HISTORY][PER_CHANNEL ? KEY_DIM : 4];
    alignas(16) float g[HEADS][READ_TOKENS][PER_CHANNEL ? KEY_DIM : 4];
    float ring_beta[HEADS][READ_HISTORY], beta[HEADS][READ_TOKENS];
};

struct Chains {
    const Work& w;
    ChainInputs& in;
    StepSums& c;
    const int warp, lane, history, tokens;

    __device__ Chains(const Work& work, ChainInputs& inputs, StepSums& sums)
        : w(work), in(inputs), c(sums), warp(threadIdx.x / 32), lane(threadIdx.x % 32), history(work.row.history()),
          tokens(work.row.tokens) {}

    __device__ bool appends() const { return !w.row.absorbs(); }

    // ---- inputs ------------------------------------------------------------------------------------------------------

    __device__ void request() const {
        for (int j = warp; j < history + tokens; j += WARPS) {
            const int token = j - history, row = w.history_row(j);
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                const Work head = w.of_head(n * (HEADS / KEYS));
                if (j < history)
                    request_row<KEY_DIM>(in.ring_k[n][j], w.t.ring_k + head.ring_k_at(row), lane);
                else
                    request_row<KEY_DIM>(in.k[n][token], head.k(token), lane);
            }
            if constexpr (PER_CHANNEL)
#pragma unroll
                for (int n = 0; n < HEADS; ++n)
                    if (j < history) request_row<KEY_DIM>(in.ring_g[n][j], w.t.ring_g + w.of_head(n).ring_g_at(row), lane);
        }
    }

    // The step's gates, appended to the ring on the way, and the ring's scalars.
    __device__ void load_gates() {
        for (int m = threadIdx.x; m < HEADS * history; m += THREADS) {
            const int n = m % HEADS, j = m / HEADS, row = w.history_row(j);
            const Work head = w.of_head(n);
            in.ring_beta[n][j] = w.t.ring_beta[head.ring_beta_at(row)];
            if constexpr (!PER_CHANNEL) in.ring_g[n][j][0] = w.t.ring_g[head.ring_g_at(row)];
        }
        for (int m = threadIdx.x; m < HEADS * tokens; m += THREADS) {
            const int n = m % HEADS, i = m / HEADS;
            const Work head = w.of_head(n);
            const float beta = head.beta(head.beta_logit(i));
            in.beta[n][i] = beta;
            if (head.leads_head() && appends()) w.t.ring_beta_out[head.ring_beta_at(w.append_row(i))] = beta;
        }
        constexpr int CHANNELS_A_TOKEN = PER_CHANNEL ? KEY_DIM : 1;
        for (int m = threadIdx.x; m < HEADS * tokens * CHANNELS_A_TOKEN; m += THREADS) {
            const int channel = m % CHANNELS_A_TOKEN, n = m / CHANNELS_A_TOKEN % HEADS, i = m / (CHANNELS_A_TOKEN * HEADS);
            const Work head = w.of_head(n);
            const float g = head.log_decay(head.decay_logit(i, channel), channel);
            in.g[n][i][channel] = g;
            if (head.leads_head() && appends()) w.t.ring_g_out[head.ring_g_at(w.append_row(i)) + channel] = g;
        }
    }

    // ---- chains --------------------------------------------------------------------------------------------------------

    // Head of the warp's chains, and their tokens.
    __device__ int chain_head() const { return warp % HEADS; }
    __device__ int chain_token(int chain) const { return warp / HEADS + chain * HEAD_WARPS; }
    __device__ bool has_tokens() const { return chain_token(0) < tokens; }

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
                const float value = newest - m <= token ? beta[m] * sum : 0.0f;
                along[m] = value * norm[m];
                if (lane == 0 && m < live) c[chain_head()][entry - m][token] = value;
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

    __device__ void run(float (&x)[CHAINS][LANE_COLS]) {
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
    }

    __device__ void append_keys() const {
        if (!appends()) return;
#pragma unroll
        for (int key = 0; key < KEYS; ++key) {
            const Work head = w.of_head(key * (HEADS / KEYS));
            if (!head.leads_key_head()) continue;
            for (int m = threadIdx.x; m < tokens * KEY_DIM; m += THREADS) {
                const int i = m / KEY_DIM, column = m % KEY_DIM;
                w.t.ring_k_out[head.ring_k_at(w.append_row(i)) + column] = from_float<RING_K>(to_float(in.k[key][i][column]));
            }
        }
    }
};
