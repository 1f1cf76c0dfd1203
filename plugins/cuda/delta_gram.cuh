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
// x is passed on as two float16 parts of x times a power of two that keeps them from vanishing: |x| <= exp(G_L) K^-1/2.
#pragma once
#include "async_copy.cuh"
#include "delta_lanes.cuh"
#include "delta_read.cuh"
#include "mma.cuh"

// Ring rows that a step may find.
constexpr int GRAM_HISTORY = RING_ROWS > WINDOW ? WINDOW : WINDOW - 1;
constexpr int GRAM_ROWS = GRAM_HISTORY + READ_TOKENS, ENTRIES = (GRAM_ROWS + 15) / 16 * 16;
constexpr bool GRAM = TOKENS > 0 && WIDE && !PER_CHANNEL && !DERIVED && KEY_DIM % 64 == 0 && KEY_DIM <= 128 && ENTRIES <= 32 &&
                      sizeof(ACT) == 2 && same_type<ACT, RING_K>::value && same_type<ACT, RING>::value;
// Elements from row to row, by which a warp's accesses spread over the banks.
constexpr int GRAM_PITCH = KEY_DIM + (READ_TOKENS > 8 ? 8 : 16), PRODUCT_PITCH = ENTRIES + 1;

// Dead once x is known.
struct GramInputs {
    ACT k[KEYS][ENTRIES][GRAM_PITCH];  // ring rows, then tokens; what is behind them counts for nothing
    ACT q[KEYS][READ_TOKENS][GRAM_PITCH];
    float kk[KEYS][ENTRIES][PRODUCT_PITCH];      // [i][j], i >= j
    float qk[KEYS][READ_TOKENS][PRODUCT_PITCH];  // [token][j]
    alignas(16) float along[HEADS][ENTRIES][READ_TOKENS];  // what x loses of key j
    float whole[HEADS][READ_TOKENS];             // what it has of q
};

// What the adjoint leaves behind.
struct GramResults {
    fp16 x[HEADS][READ_TOKENS][2][KEY_DIM];  // upper and lower parts, in the order of x_place
    float c[HEADS][READ_TOKENS][ENTRIES];
    float unit[HEADS][READ_TOKENS];  // by which products with x are to be multiplied
};

// T: of keys, queries and values.
template <typename T>
struct Gram {
    const Work& w;
    GramInputs& in;
    GramResults& out;
    const int warp, lane, history, tokens;
    float g, beta;  // of the lane's entry, in the head of the warp

    __device__ Gram(const Work& work, GramInputs& inputs, GramResults& results)
        : w(work), in(inputs), out(results), warp(threadIdx.x / 32), lane(threadIdx.x % 32), history(work.row.history()),
          tokens(work.row.tokens), g(0.0f), beta(0.0f) {}

    __device__ bool appends() const { return !w.row.absorbs(); }
    __device__ int warp_head() const { return warp % HEADS; }

    // ---- inputs ------------------------------------------------------------------------------------------------------

    __device__ void request() const {
        constexpr int UNITS = KEY_DIM / 8;  // of 16 bytes
        for (int at = threadIdx.x; at < KEYS * (history + 2 * tokens) * UNITS; at += THREADS) {
            const int column = at % UNITS * 8, row = at / UNITS % (history + 2 * tokens), key = at / UNITS / (history + 2 * tokens);
            const Work head = w.of_head(key * (HEADS / KEYS));
            if (row < history)
                copy_16_bytes(&in.k[key][row][column], w.t.ring_k + head.ring_k_at(w.history_row(row)) + column);
            else if (row < history + tokens)
                copy_16_bytes(&in.k[key][row][column], head.k(row - history) + column);
            else
                copy_16_bytes(&in.q[key][row - history - tokens][column], head.q(row - history - tokens) + column);
        }
    }

    // Gates of the warp's head; those of tokens are appended to the ring on the way.
    __device__ void load_gates() {
        const Work head = w.of_head(warp_head());
        const int token = lane - history;
        if (token < 0) {
            const int row = w.history_row(lane);
            beta = w.t.ring_beta[head.ring_beta_at(row)];
            g = w.t.ring_g[head.ring_g_at(row)];
        } else if (token < tokens) {
            beta = head.beta(head.beta_logit(token));
            g = head.log_decay(head.decay_logit(token, 0), 0);
            if (warp < HEADS && head.leads_head() && appends()) {
                const int row = w.append_row(token);
                w.t.ring_beta_out[head.ring_beta_at(row)] = beta;
                w.t.ring_g_out[head.ring_g_at(row)] = g;
            }
        }
    }

    __device__ void append_keys() const {
        if (!appends()) return;
        constexpr int UNITS = KEY_DIM / 8;
        for (int at = threadIdx.x; at < KEYS * tokens * UNITS; at += THREADS) {
            const int column = at % UNITS * 8, token = at / UNITS % tokens, key = at / UNITS / tokens;
            const Work head = w.of_head(key * (HEADS / KEYS));
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

    // Of the warp's tokens: tokens of one head are divided among its warps.
    __device__ void solve(float unit) const {
        const int n = warp_head(), key = n / (HEADS / KEYS), entries = history + tokens, entry = lane % ENTRIES;
        const float squares = in.kk[key][entry][entry];
        const float norm = lane < entries ? rsqrtf(squares + NORM_EPSILON) : 0.0f;
        float pairs[ENTRIES];  // [i]: exp(G_i - G_lane) k_i . k_lane
        float since = 0.0f, from_start = 0.0f;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            const float step = __shfl_sync(~0u, g, i);
            if (i > lane) since += step;
            if (i <= lane) from_start += step;
            const float decay = __expf(since);
            pairs[i] = i > lane && i < entries ? decay * in.kk[key][i][entry] : 0.0f;
            // The decays up to a token, for later.
            const int token = i - history;
            if (token >= warp / HEADS && token < tokens && (token - warp / HEADS) % HEAD_WARPS == 0 && lane < ENTRIES)
                out.c[n][token][lane] = decay;
        }
        const float gain = lane < entries ? beta * norm * norm : 0.0f, key_decay = __expf(from_start);
#pragma unroll 1
        for (int token = warp / HEADS; token < tokens; token += HEAD_WARPS) {
            const int last = history + token;
            float q_squares = 0.0f;
#pragma unroll
            for (int c = 2 * lane; c < KEY_DIM; c += 64) {
                float q[2];
                load_vector<2>(&in.q[key][token][c], q);
                q_squares += q[0] * q[0] + q[1] * q[1];
            }
            const float q_norm = rsqrtf(warp_sum(q_squares) + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
            float y = lane <= last ? q_norm * in.qk[key][token][entry] * out.c[n][token][entry] : 0.0f;
#pragma unroll
            for (int i = ENTRIES - 1; i > 0; --i)
                if (i <= last) y = fmaf(-pairs[i], __shfl_sync(~0u, gain * y, i), y);
            // The power of two that makes exp(G_L) at least 2^8, unless it is next to nothing.
            const float whole = __expf(__shfl_sync(~0u, from_start, last));
            const u32 exponent = __float_as_uint(whole) >> 23;
            const float up = __uint_as_float((exponent > 16 ? 262 - exponent : 127) << 23);
            if (lane < ENTRIES) {
                out.c[n][token][lane] = lane <= last ? beta * norm * y : 0.0f;
                in.along[n][lane][token] = lane <= last ? -(gain * y * key_decay) * up : 0.0f;
            }
            if (lane == 0) {
                in.whole[n][token] = q_norm * whole * up;
                out.unit[n][token] = unit * __uint_as_float((exponent > 16 ? exponent - 8 : 127) << 23);
            }
        }
    }

    // ---- x -------------------------------------------------------------------------------------------------------------

    // A thread has two neighbouring columns of some tokens. `place`: where a column of x belongs.
    template <typename Place>
    __device__ void combine(Place place) const {
        constexpr int GROUP = READ_TOKENS < 4 ? READ_TOKENS : 4, GROUPS = READ_TOKENS / GROUP, COLUMN_PAIRS = KEY_DIM / 2;
#pragma unroll 1
        for (int m = threadIdx.x; m < HEADS * GROUPS * COLUMN_PAIRS; m += THREADS) {
            const int column = m % COLUMN_PAIRS * 2, first = m / COLUMN_PAIRS % GROUPS * GROUP, n = m / (COLUMN_PAIRS * GROUPS);
            const int key = n / (HEADS / KEYS);
            float x[GROUP][2];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                load_vector<2>(&in.q[key][first + i][column], x[i]);
                x[i][0] *= in.whole[n][first + i], x[i][1] *= in.whole[n][first + i];
            }
            const int entries = history + min(tokens, first + GROUP);
#pragma unroll 4
            for (int j = 0; j < entries; ++j) {
                float k[2], along[GROUP];
                load_vector<2>(&in.k[key][j][column], k);
                load_vector<GROUP>(&in.along[n][j][first], along);
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    if (READ_TOKENS > 1 && j > history + first + i) continue;
                    x[i][0] = fmaf(along[i], k[0], x[i][0]), x[i][1] = fmaf(along[i], k[1], x[i][1]);
                }
            }
#pragma unroll
            for (int i = 0; i < GROUP; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const fp16 upper = from_float<fp16>(x[i][e]);
                    out.x[n][first + i][0][place(column + e)] = upper;
                    out.x[n][first + i][1][place(column + e)] = from_float<fp16>(x[i][e] - to_float(upper));
                }
        }
    }
};
