// The adjoint of a step (delta_read.cuh) where decays are scalars and inputs have one 16-bit type: from the products of all
// keys with each other and with the queries, which tensor cores form.
//
// With entries 0 ... L of the ring and the step, L the token at hand, G the log decays summed from the checkpoint on and unit
// vectors k and q, unrolling the recurrence from the token backwards gives
//
//     y_j = exp(G_L - G_j) q . k_j - sum_{j<i<=L} exp(G_i - G_j) (k_i . k_j) c_i,   c_j = beta_j y_j
//     o = sum_j c_j v_j + S0 x,                                                     x = exp(G_L) q - sum_j exp(G_j) c_j k_j
//
// A lane has an entry; the triangular system is solved from the last entry down. Keys stay as they are stored: their norms
// go into the coefficients.
//
// |x| <= exp(G_L) K^-1/2, which says what it can be multiplied by.
#pragma once
#include "delta_adjoint.cuh"
#include "mma.cuh"
#include "ptx/arithmetic.cuh"

// Elements from row to row, by which a warp's accesses spread over the banks.
constexpr int GRAM_PITCH = KEY_DIM + (READ_TOKENS > 8 ? 8 : 16), PRODUCT_PITCH = ENTRIES + 1;

constexpr int KEY_HEADS_HERE = HEADS / KEYS;  // value heads of the block that share a key head

// Dead once x is known.
struct GramInputs {
    ACT k[KEYS][ENTRIES][GRAM_PITCH];  // ring rows, then tokens; what is behind them counts for nothing
    ACT q[KEYS][READ_TOKENS][GRAM_PITCH];
    float kk[KEYS][ENTRIES][PRODUCT_PITCH];      // [i][j], i >= j
    float qk[KEYS][READ_TOKENS][PRODUCT_PITCH];  // [token][j]
    alignas(16) float along[KEYS][ENTRIES][KEY_HEADS_HERE][READ_TOKENS];  // what x loses of key j
    float whole[HEADS][READ_TOKENS];             // what it has of q
};

// Tokens that a warp solves at once, one beside the other.
constexpr int SOLVED_TOKENS = READ_TOKENS < 4 ? READ_TOKENS : READ_TOKENS > 4 * HEAD_WARPS ? READ_TOKENS / HEAD_WARPS : 4;

// T: of keys, queries and values. Results: Adjoint<T> or FloatAdjoint.
template <typename T, typename Results>
struct Gram {
    const Work& w;
    GramInputs& in;
    Results& out;
    const int warp, lane, history, tokens;
    float g, beta;  // of the lane's entry, in the head of the warp

    __device__ Gram(const Work& work, GramInputs& inputs, Results& results)
        : w(work), in(inputs), out(results), warp(threadIdx.x / 32), lane(threadIdx.x % 32), history(work.row.history()),
          tokens(work.row.tokens), g(0.0f), beta(0.0f) {}

    __device__ bool appends() const { return !w.row.absorbs(); }
    // Head and first token of a warp while the triangular system is solved.
    __device__ int warp_head() const { return warp % HEADS; }
    __device__ int first_token() const { return warp / HEADS * SOLVED_TOKENS; }
    __device__ bool solves() const { return first_token() < READ_TOKENS; }

    // ---- inputs ------------------------------------------------------------------------------------------------------

    // Keys of every entry and the tokens' queries, 16 bytes a lane.
    static constexpr int ROW_LANES = KEY_DIM / 8;
    // By which threads are moved on for the tokens, so that other warps take them if they are few: whole rows, for a thread keeps
    // its column.
    static constexpr int OTHER_WARPS = THREADS / 2 % ROW_LANES == 0 ? THREADS / 2 : 0;
    __device__ void request() const {
        const int column = threadIdx.x % ROW_LANES * 8;
#pragma unroll
        for (int key = 0; key < KEYS; ++key) {
            const Work head = w.of_head(key * KEY_HEADS_HERE);
            const T* ring = opaque(reinterpret_cast<const T*>(w.t.ring_k) + head.ring_k_at(0) + column);
#pragma unroll 1
            for (int j = threadIdx.x / ROW_LANES; j < history; j += THREADS / ROW_LANES)
                copy_16_bytes(&in.k[key][j][column], ring + w.history_row(j) * KEY_DIM);
            const T* q = opaque(head.q(0) + column);
#pragma unroll 1
            for (int i = (threadIdx.x + OTHER_WARPS) % THREADS / ROW_LANES; i < tokens; i += THREADS / ROW_LANES) {
                const T* token = q + i * w.t.qkv_stride;
                copy_16_bytes(&in.q[key][i][column], token);
                copy_16_bytes(&in.k[key][history + i][column], token + KEY_HEADS * KEY_DIM);
            }
        }
    }

    // Gates of the warp's head; those of tokens are appended to the ring on the way.
    __device__ void load_gates() {
        if (!solves()) return;
        const Work head = w.of_head(warp_head());
        const int token = lane - history;
        if (token < 0) {
            const int row = w.history_row(lane);
            beta = w.t.ring_beta[head.ring_beta_at(row)];
            g = w.t.ring_g[head.ring_g_at(row)];
        } else if (token < tokens) {
            beta = head.beta(head.beta_logit(token));
            g = head.log_decay(head.decay_logit(token, 0), 0);
            if (first_token() == 0 && head.leads_head() && appends()) {
                const int row = w.append_row(token);
                w.t.ring_beta_out[head.ring_beta_at(row)] = beta;
                w.t.ring_g_out[head.ring_g_at(row)] = g;
            }
        }
    }

    __device__ void append_keys() const {
        if (!appends()) return;
        const int column = threadIdx.x % ROW_LANES * 8;
#pragma unroll 1
        for (int token = threadIdx.x / ROW_LANES; token < tokens; token += THREADS / ROW_LANES)
#pragma unroll
            for (int key = 0; key < KEYS; ++key) {
                const Work head = w.of_head(key * KEY_HEADS_HERE);
                if (!head.leads_key_head()) continue;
                *reinterpret_cast<uint4*>(w.t.ring_k_out + head.ring_k_at(w.append_row(token)) + column) =
                    *reinterpret_cast<const uint4*>(&in.k[key][history + token][column]);
            }
    }

    // ---- products ----------------------------------------------------------------------------------------------------

    // A warp takes 16 rows i of keys and 8 columns at a time, of keys j <= i or of queries.
    __device__ void multiply() const {
        constexpr int QUERY_BLOCKS = (READ_TOKENS + 7) / 8, COLUMN_BLOCKS = ENTRIES / 8 + QUERY_BLOCKS;
        const int entries = history + tokens, group = lane / 4, t = lane % 4;
#pragma unroll 1
        for (int task = warp; task < KEYS * (ENTRIES / 16) * COLUMN_BLOCKS; task += WARPS) {
            const int block = task % COLUMN_BLOCKS, rows = task / COLUMN_BLOCKS % (ENTRIES / 16) * 16;
            const int key = task / (COLUMN_BLOCKS * (ENTRIES / 16));
            const bool queries = block >= ENTRIES / 8;
            const int column = queries ? (block - ENTRIES / 8) * 8 : block * 8;
            if (rows >= entries || column >= (queries ? tokens : min(entries, rows + 16))) continue;
            const ACT* upper = in.k[key][rows + group];
            const ACT* other = queries ? in.q[key][min(column + group, READ_TOKENS - 1)] : in.k[key][column + group];
            Accumulator sums[2] = {};
#pragma unroll
            for (int p = 0; p < KEY_DIM / 16; ++p) {
                const auto pairs = [p, t](const ACT* row) { return *reinterpret_cast<const uint2*>(row + 16 * p + 4 * t); };
                const uint2 a = pairs(upper), b = pairs(upper + 8 * GRAM_PITCH), x = pairs(other);
                mma_16bit<T>(sums[p % 2], {a.x, b.x, a.y, b.y}, x.x, x.y);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = rows + group + e / 2 * 8, j = column + 2 * t + e % 2;
                const float product = sums[0].v[e] + sums[1].v[e];
                if (!queries)
                    in.kk[key][i][j] = product;
                else if (j < tokens)
                    in.qk[key][j][i] = product;
            }
        }
    }

    // ---- the triangular system -----------------------------------------------------------------------------------------

    __device__ static float of_lane(float x, int from) { return __shfl_sync(~0u, x, from); }

    // Of the warp's head and tokens. `unit` becomes part of what products are multiplied by.
    __device__ void solve(float unit) const {
        if (!solves()) return;
        const int n = warp_head(), key = n / KEY_HEADS_HERE, own = lane, entry = own % ENTRIES;
        const int entries = history + tokens, first_last = history + first_token();
        const float squares = in.kk[key][entry][entry];
        const float norm = own < entries ? rsqrtf(squares + NORM_EPSILON) : 0.0f, log2_g = g * LOG2_E;
        const float gain = own < entries ? beta * norm * norm : 0.0f;
        float(&along)[READ_TOKENS] = in.along[key][entry][n % KEY_HEADS_HERE];
        float pairs[ENTRIES];  // [i]: -exp(G_i - G_own) k_i . k_own
        float since = 0.0f, from_start = 0.0f;
#pragma unroll
        for (int first = 0; first < ENTRIES; first += 8) {
            // Those above 8 are often none.
            if (first >= entries) {
#pragma unroll
                for (int i = first; i < first + 8; ++i) pairs[i] = 0.0f;
                continue;
            }
#pragma unroll
            for (int i = first; i < first + 8; ++i) {
                const float step = of_lane(log2_g, i);
                if (i > own)
                    since += step;
                else
                    from_start += step;
                const float decay = power_of_2(since);
                pairs[i] = i > own && i < entries ? -decay * in.kk[key][i][entry] : 0.0f;
                // The decays up to a token, for later; those of a single one remain at hand.
                if (READ_TOKENS > 1 && u32(i - first_last) < SOLVED_TOKENS && own < ENTRIES) along[i - history] = decay;
            }
        }
        const float key_decay = power_of_2(from_start);
        float norms[SOLVED_TOKENS] = {}, y[SOLVED_TOKENS];
#pragma unroll
        for (int k = 0; k < SOLVED_TOKENS; ++k)
#pragma unroll
            for (int c = 2 * lane; c < KEY_DIM; c += 64) {
                float q[2];
                load_vector<2>(&in.q[key][first_token() + k][c], q);
                norms[k] += q[0] * q[0] + q[1] * q[1];
            }
        sum_all<32>(norms);
#pragma unroll
        for (int k = 0; k < SOLVED_TOKENS; ++k) {
            const int token = first_token() + k;
            norms[k] = rsqrtf(norms[k] + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
            const float decay = READ_TOKENS > 1 ? along[token] : power_of_2(since);
            y[k] = own <= history + token ? norms[k] * in.qk[key][token][entry] * decay : 0.0f;
        }
        // Four entries at once, from the last down: what they take of each other is known before, so that one exchange serves all
        // four. Entries behind a token have no y.
#pragma unroll
        for (int first = ENTRIES - 4; first >= 0; first -= 4) {
            if (first >= entries) continue;
            float within[4][4];  // [m][n]: what entry first + m takes of first + n, n > m
#pragma unroll
            for (int n = 1; n < 4; ++n)
#pragma unroll
                for (int m = 0; m < n; ++m) within[m][n] = of_lane(gain * pairs[first + n], first + m);
#pragma unroll
            for (int k = 0; k < SOLVED_TOKENS; ++k) {
                float c[4];
#pragma unroll
                for (int m = 3; m >= 0; --m) {
                    c[m] = of_lane(gain * y[k], first + m);
#pragma unroll
                    for (int n = 3; n > m; --n) c[m] = fmaf(within[m][n], c[n], c[m]);
                }
#pragma unroll
                for (int m = 3; m >= 0; --m) y[k] = fmaf(pairs[first + m], c[m], y[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < SOLVED_TOKENS; ++k) {
            const int token = first_token() + k, last = history + token;
            const float whole = power_of_2(of_lane(from_start, last));
            const Rescaling to(whole, 8);
            if (own < ENTRIES) {
                out.store_sum(n, token, own, own <= last ? beta * norm * y[k] : 0.0f);
                along[token] = own <= last ? -(gain * y[k] * key_decay) * to.factor : 0.0f;
            }
            if (own == 0) {
                in.whole[n][token] = norms[k] * whole * to.factor;
                out.unit[n][token] = unit * to.inverse;
            }
        }
    }

    // ---- x -------------------------------------------------------------------------------------------------------------

    // A thread has two neighbouring columns of some tokens, or one if there are threads enough, for the heads that share a key head.
    __device__ void combine() const {
        constexpr int GROUP = READ_TOKENS < 4 ? READ_TOKENS : 4, GROUPS = READ_TOKENS / GROUP;
        constexpr int COLUMNS = KEYS * GROUPS * KEY_DIM <= THREADS ? 1 : 2, PARTS = KEY_DIM / COLUMNS;
#pragma unroll 1
        for (int m = threadIdx.x; m < KEYS * GROUPS * PARTS; m += THREADS) {
            const int column = m % PARTS * COLUMNS, first = m / PARTS % GROUPS * GROUP, key = m / (PARTS * GROUPS);
            float x[KEY_HEADS_HERE][GROUP][COLUMNS];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                float q[COLUMNS];
                load_vector<COLUMNS>(&in.q[key][first + i][column], q);
#pragma unroll
                for (int n = 0; n < KEY_HEADS_HERE; ++n) {
                    const float whole = in.whole[key * KEY_HEADS_HERE + n][first + i];
#pragma unroll
                    for (int e = 0; e < COLUMNS; ++e) x[n][i][e] = whole * q[e];
                }
            }
            const int entries = history + min(tokens, first + GROUP);
#pragma unroll 4
            for (int j = 0; j < entries; ++j) {
                float k[COLUMNS];
                load_vector<COLUMNS>(&in.k[key][j][column], k);
#pragma unroll
                for (int n = 0; n < KEY_HEADS_HERE; ++n) {
                    float along[GROUP];
                    load_vector<GROUP>(&in.along[key][j][n][first], along);
#pragma unroll
                    for (int i = 0; i < GROUP; ++i)
#pragma unroll
                        for (int e = 0; e < COLUMNS; ++e) x[n][i][e] = fmaf(along[i], k[e], x[n][i][e]);
                }
            }
#pragma unroll
            for (int n = 0; n < KEY_HEADS_HERE; ++n)
#pragma unroll
                for (int i = 0; i < GROUP; ++i)
#pragma unroll
                    for (int e = 0; e < COLUMNS; ++e) out.store(key * KEY_HEADS_HERE + n, first + i, column + e, x[n][i][e]);
        }
    }

    // All of it, once the inputs are there; for all threads.
    __device__ void run(float unit) const {
        append_keys();
        multiply();
        __syncthreads();
        solve(unit);
        __syncthreads();
        combine();
    }
};
