// The adjoint of a step (delta_read.cuh), a warp a token: a block of entries after the other, from the token backwards.
//
// Entry m of a block is older than entry m - 1. With D_nm the decays of entries n ... m - 1 (channel by channel),
//
//     c_m = beta_m (k_m . D_0m x - sum_{n<m} c_n k_m . D_nm k_n),    x = D_0B x - sum_n c_n D_nB k_n
//
// so that a block's sums over lanes are formed at once instead of one behind the other. Those that do not depend on x, products of
// keys and norms, come first, a block a warp: then a token that is alone has one warp's walk with four sums a block.
#pragma once
#include "delta_chain_blocks.cuh"
#include "delta_ring_rows.cuh"
#include "ptx/async_copy.cuh"

// A row of N elements, by a warp.
template <int N, typename T>
__device__ __forceinline__ void request_row(T* to, const T* from, int lane) {
    for (int at = lane * 16 / int(sizeof(T)); at < N; at += 512 / int(sizeof(T))) copy_16_bytes(to + at, from + at);
}

struct ChainInputs {
    RING_K ring_k[KEYS][READ_HISTORY][KEY_DIM];
    ACT k[KEYS][READ_TOKENS][KEY_DIM];
    alignas(16) float ring_g[HEADS][READ_HISTORY][DECAY_COLUMNS];
    alignas(16) float g[HEADS][READ_TOKENS][DECAY_COLUMNS];
    float ring_beta[HEADS][READ_HISTORY], beta[HEADS][READ_TOKENS];
    BlockProducts ring_blocks[HEADS][RING_BLOCKS], blocks[HEADS][TOKEN_BLOCKS];  // from the newest on
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

    // On which the ring's rows arrive. Other inputs make room for what follows, but nothing may lie where a barrier has been.
    __device__ static u64* ring_ready() {
        __shared__ u64 barrier;
        return &barrier;
    }

    // The ring by one thread, of the last warp, since the first has gates to load; the step's keys by all.
    __device__ void request() const {
        if (threadIdx.x == THREADS - 32) {
            init_barrier(ring_ready());
            publish_barriers();
            constexpr int GATE_BYTES = PER_CHANNEL ? HEADS * int(sizeof(in.ring_g[0][0])) : 0;
            expect_bytes(ring_ready(), history * (KEYS * int(sizeof(in.ring_k[0][0])) + GATE_BYTES));
#pragma unroll
            for (int n = 0; n < HEADS; ++n) {
                const Work head = w.of_head(n);
                for_ring_spans(w, [&](int entry, int row, int count) {
                    constexpr int HEADS_OF_KEY = HEADS / KEYS;
                    if (n % HEADS_OF_KEY == 0)
                        stream_to_shared(in.ring_k[n / HEADS_OF_KEY][entry], w.t.ring_k + head.ring_k_at(row),
                                         count * u32(sizeof(in.ring_k[0][0])), ring_ready());
                    if constexpr (PER_CHANNEL)
                        stream_to_shared(in.ring_g[n][entry], w.t.ring_g + head.ring_g_at(row), count * u32(sizeof(in.ring_g[0][0])),
                                         ring_ready());
                });
            }
        }
        __syncwarp();
#pragma unroll 1
        for (int token = warp; token < tokens; token += WARPS)
#pragma unroll
            for (int n = 0; n < KEYS; ++n) request_row<KEY_DIM>(in.k[n][token], w.of_head(n * (HEADS / KEYS)).k(token), lane);
    }
    // For all threads, behind a barrier of all of them.
    __device__ void wait_for_ring() const { wait_barrier(ring_ready(), 0); }

    // The step's gates, appended to the ring on the way, and the ring's scalars.
    __device__ void load_gates() {
        if constexpr (GATES_AT_ONCE) return load_all_gates();
#pragma unroll 1
        for (int m = threadIdx.x; m < HEADS * history; m += THREADS) {
            const int n = m % HEADS, j = m / HEADS, row = w.history_row(j);
            const Work head = w.of_head(n);
            in.ring_beta[n][j] = w.t.ring_beta[head.ring_beta_at(row)];
            if constexpr (!PER_CHANNEL) in.ring_g[n][j][0] = w.t.ring_g[head.ring_g_at(row)];
        }
#pragma unroll 1
        for (int m = threadIdx.x; m < HEADS * tokens; m += THREADS) {
            const int n = m % HEADS, i = m / HEADS;
            const Work head = w.of_head(n);
            const float beta = head.beta(head.beta_logit(i));
            in.beta[n][i] = beta;
            if (head.leads_head() && appends()) w.t.ring_beta_out[head.ring_beta_at(w.append_row(i))] = beta;
        }
        constexpr int CHANNELS_A_TOKEN = PER_CHANNEL ? KEY_DIM : 1;
#pragma unroll 1
        for (int m = threadIdx.x; m < HEADS * tokens * CHANNELS_A_TOKEN; m += THREADS) {
            const int channel = m % CHANNELS_A_TOKEN, n = m / CHANNELS_A_TOKEN % HEADS, i = m / (CHANNELS_A_TOKEN * HEADS);
            const Work head = w.of_head(n);
            const float g = head.log_decay(head.decay_logit(i, channel), channel);
            in.g[n][i][channel] = g;
            if (head.leads_head() && appends()) w.t.ring_g_out[head.ring_g_at(w.append_row(i)) + channel] = g;
        }
    }

    // The same, where nothing waits for anything but memory, once.
    __device__ void load_all_gates() {
        const int channel = threadIdx.x;
        ACT logits[READ_TOKENS], beta_logit = {};
        float ring_beta = 0.0f;
        const ACT* gate = opaque(w.t.gate + w.token(0) * w.t.gate_stride + w.gate_at(channel));
#pragma unroll
        for (int i = 0; i < READ_TOKENS; ++i)
            if (i < tokens) logits[i] = gate[i * w.t.gate_stride];
        if (channel < tokens) beta_logit = w.t.beta[w.token(channel) * w.t.beta_stride + w.head()];
        if (channel < history) ring_beta = w.t.ring_beta[w.ring_beta_at(w.history_row(channel))];
        const float bias = w.t.dt_bias[w.gate_at(channel)], rate = w.decay_rate();
        if (channel < history) in.ring_beta[0][channel] = ring_beta;
        const bool kept = w.leads_head() && appends();
        if (channel < tokens) {
            const float beta = w.beta(to_float(beta_logit));
            in.beta[0][channel] = beta;
            if (kept) w.t.ring_beta_out[w.ring_beta_at(w.append_row(channel))] = beta;
        }
#pragma unroll
        for (int i = 0; i < READ_TOKENS; ++i) {
            if (i >= tokens) continue;
            const float g = Work::short_log_decay(rate, to_float(logits[i]) + bias);
            in.g[0][i][channel] = g;
            if (kept) w.t.ring_g_out[w.ring_g_at(w.append_row(i)) + channel] = g;
        }
    }

    // ---- chains --------------------------------------------------------------------------------------------------------

    // Head of the warp's chains, and their tokens.
    __device__ int chain_head() const { return warp % HEADS; }
    __device__ int chain_token(int chain) const { return warp / HEADS + chain * HEAD_WARPS; }
    __device__ bool has_tokens() const { return chain_token(0) < tokens; }

    // Of all blocks, by all warps. Those of tokens are the first warps', those of the ring from the last warp on.
    __device__ void multiply_keys() const {
#pragma unroll 1
        for (int m = warp; m < HEADS * TOKEN_BLOCKS; m += WARPS) {
            const int n = m % HEADS, key = n / (HEADS / KEYS), block = m / HEADS, i = tokens - 1 - block * TOKEN_BLOCK;
            if (i >= 0) multiply_block<TOKEN_BLOCK>(in.blocks[n][block], lane, in.k[key][i], in.g[n][i], &in.beta[n][i], i + 1);
        }
#pragma unroll 1
        for (int m = WARPS - 1 - warp; m < HEADS * RING_BLOCKS; m += WARPS) {
            const int n = m % HEADS, key = n / (HEADS / KEYS), block = m / HEADS, j = history - 1 - block * CHAIN_BLOCK;
            if (j >= 0)
                multiply_block<CHAIN_BLOCK>(in.ring_blocks[n][block], lane, in.ring_k[key][j], in.ring_g[n][j], &in.ring_beta[n][j], j + 1);
        }
    }

    // BLOCK entries back, for those of the warp's tokens that are not older. `newest`: index of entry 0 among the step's tokens, below
    // zero for the ring. `entry`: its column in c. `live` entries of the block exist; the others change nothing. Chains before FIRST are of
    // tokens older than all entries.
    template <int BLOCK, int FIRST, typename T>
    __device__ void step_back(float (&x)[CHAINS][LANE_COLS], const BlockProducts& products, const T* keys, const float* decays,
                              int newest, int entry, int live) {
        constexpr int SUMS = BLOCK * (CHAINS - FIRST), PADDED = SUMS <= 2 ? 2 : SUMS <= 4 ? 4 : SUMS <= 8 ? 8 : SUMS <= 16 ? 16 : 32;
        static_assert(SUMS <= PADDED, "more sums than lanes");
        float k[BLOCK][LANE_COLS], decay[BLOCK][LANE_COLS];
#pragma unroll
        for (int m = 0; m < BLOCK; ++m) {
            if (m >= live) {
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) k[m][i] = 0.0f, decay[m][i] = 1.0f;
                continue;
            }
            load_columns(keys - m * KEY_DIM, lane, k[m]);
            if constexpr (PER_CHANNEL)
                load_columns(decays - m * DECAY_COLUMNS, lane, decay[m]);
            else
                decay[m][0] = decays[-m * DECAY_COLUMNS];
        }
        float sums[PADDED] = {};
#pragma unroll
        for (int chain = FIRST; chain < CHAINS; ++chain) {
            float carried[LANE_COLS];
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) carried[i] = x[chain][i];
#pragma unroll
            for (int m = 0; m < BLOCK; ++m) {
                sums[(chain - FIRST) * BLOCK + m] = dot(k[m], carried);
                if (newest - m > chain_token(chain)) continue;
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) carried[i] *= decay[m][PER_CHANNEL ? i : 0];
            }
        }
        if constexpr (SUMS > 4) {
            sum_scattered<32>(sums, lane);
            const float mine = sums[0];
#pragma unroll
            for (int n = 0; n < SUMS; ++n) sums[n] = __shfl_sync(~0u, mine, n * COPIES<32, PADDED>);
        } else {
            sum_all<32>(sums);
        }
#pragma unroll
        for (int chain = FIRST; chain < CHAINS; ++chain) {
            const int token = chain_token(chain);
            if (token >= tokens) continue;
            float along[BLOCK];  // c over the norm of k, which multiplies k as it is stored; zero for entries newer than x
#pragma unroll
            for (int m = 0; m < BLOCK; ++m) {
                float sum = sums[(chain - FIRST) * BLOCK + m];
#pragma unroll
                for (int n = 0; n < m; ++n) sum = fmaf(-along[n], products.pairs[BlockProducts::pair(m, n)], sum);
                if (newest - m > token) sum = 0.0f;
                along[m] = products.gain[m] * sum;
                if (lane == 0 && m < live) c[chain_head()][entry - m][token] = products.norm_gain[m] * sum;
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

    // The block of the step's tokens of which `newest` is the last one.
    template <int FIRST>
    __device__ void step_over_tokens(float (&x)[CHAINS][LANE_COLS], int block, int newest) {
        const int n = chain_head(), key = n / (HEADS / KEYS);
        step_back<TOKEN_BLOCK, FIRST>(x, in.blocks[n][block], in.k[key][newest], in.g[n][newest], newest, history + newest, newest + 1);
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
        const int n = chain_head(), key = n / (HEADS / KEYS);
#pragma unroll 1
        for (int block = 0; block < TOKEN_BLOCKS; ++block) {
            const int newest = tokens - 1 - block * TOKEN_BLOCK;
            // Blocks behind the warp's last token concern none of its tokens.
            if (newest < 0 || newest - TOKEN_BLOCK >= chain_token(CHAINS - 1)) continue;
            // Half of a warp's tokens are often older than the step's last ones.
            if (GATES_AT_ONCE && CHAINS > 1 && newest - TOKEN_BLOCK >= chain_token(CHAINS / 2 - 1))
                step_over_tokens<CHAINS / 2>(x, block, newest);
            else
                step_over_tokens<0>(x, block, newest);
        }
#pragma unroll 1
        for (int j = history - 1, block = 0; j >= 0; j -= CHAIN_BLOCK, ++block)
            step_back<CHAIN_BLOCK, 0>(x, in.ring_blocks[n][block], in.ring_k[key][j], in.ring_g[n][j], -1, j, j + 1);
    }

    __device__ void append_keys() const {
        if (!appends()) return;
#pragma unroll
        for (int key = 0; key < KEYS; ++key) {
            const Work head = w.of_head(key * (HEADS / KEYS));
            if (!head.leads_key_head()) continue;
            if constexpr (NARROW_INPUTS && WIDE) {
                constexpr int UNITS = KEY_DIM / 8;  // of 16 bytes
#pragma unroll 1
                for (int m = threadIdx.x; m < tokens * UNITS; m += THREADS) {
                    const int i = m / UNITS, column = m % UNITS * 8;
                    *reinterpret_cast<uint4*>(w.t.ring_k_out + head.ring_k_at(w.append_row(i)) + column) =
                        *reinterpret_cast<const uint4*>(&in.k[key][i][column]);
                }
            } else {
#pragma unroll 1
                for (int m = threadIdx.x; m < tokens * KEY_DIM; m += THREADS) {
                    const int i = m / KEY_DIM, column = m % KEY_DIM;
                    w.t.ring_k_out[head.ring_k_at(w.append_row(i)) + column] = from_float<RING_K>(to_float(in.k[key][i][column]));
                }
            }
        }
    }
};
