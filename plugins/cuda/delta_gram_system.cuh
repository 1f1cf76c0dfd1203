// The triangular system of delta_gram.cuh: its coefficients, from the gates and the products of keys, and its solution.
#pragma once
#include "delta_gram_keys.cuh"
#include "ptx/arithmetic.cuh"

// T: of keys, queries and values. Results: Adjoint<T> or FloatAdjoint.
template <typename T, typename Results>
struct GramSystem : GramKeys<T> {
    typedef GramKeys<T> Keys;
    using Keys::appends, Keys::history, Keys::in, Keys::lane, Keys::tokens, Keys::w, Keys::warp;
    Results& out;
    const int width, own;  // lanes that have the entries of a triangular system while it is solved, and the lane's entry

    __device__ GramSystem(const Work& work, GramInputs& inputs, Results& results)
        : Keys(work, inputs), out(results), width(HALVES && history + tokens <= 16 ? 16 : HEAD_LANES), own(lane & (width - 1)) {}

    // Head of a lane and first token of a warp while the triangular system is solved.
    __device__ int solver() const { return warp - (WARPS - SOLVING_WARPS); }
    __device__ bool solves() const { return SOLVING_WARPS == WARPS || solver() >= 0; }
    __device__ int solved_head() const { return solver() % (HEADS / SOLVED_HEADS) * SOLVED_HEADS + lane / HEAD_LANES; }
    __device__ int first_token() const { return solver() / (HEADS / SOLVED_HEADS) * SOLVED_TOKENS; }

    // ---- gates -------------------------------------------------------------------------------------------------------

    // What memory has of the gates of the lane's entry. Nobody waits for it before it is needed.
    struct Gates {
        float ring_g, ring_beta, A_log, dt_bias;
        ACT decay_logit, beta_logit;
    } gates;

    __device__ void request_gates() {
        const Work head = w.of_head(solved_head());
        const int token = own - history;
        gates = {};
        if (token < 0) {
            const int row = w.history_row(own);
            gates.ring_beta = w.t.ring_beta[head.ring_beta_at(row)];
            gates.ring_g = w.t.ring_g[head.ring_g_at(row)];
        } else if (token < tokens) {
            gates.beta_logit = w.t.beta[w.token(token) * w.t.beta_stride + head.head()];
            gates.decay_logit = w.t.gate[w.token(token) * w.t.gate_stride + head.head()];
            gates.A_log = w.t.A_log[head.head()];
            gates.dt_bias = w.t.dt_bias[head.head()];
        }
    }

    __device__ void request() {
        if (solves()) request_gates();
        Keys::request_keys();
    }

    // ---- the triangular system -----------------------------------------------------------------------------------------

    // Of the lane's head.
    __device__ float of_entry(float x, int entry) const { return __shfl_sync(~0u, x, entry, width); }
    // Whether no lane before it has the same entry of the same head.
    __device__ bool is_first() const { return !HALVES || lane < width; }

    // A lane's tokens, in two groups. The second one is empty if the other half of the warp takes its tokens.
    static constexpr int GROUPS = HALVES ? 2 : 1, GROUP_TOKENS = SOLVED_TOKENS / GROUPS;
    __device__ bool has_group(int group) const { return group == 0 || width == 32; }
    __device__ int lane_token(int k) const { return first_token() + k + (HALVES && !is_first() ? GROUP_TOKENS : 0); }
    template <typename Body>
    __device__ void for_tokens(Body body) const {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (!has_group(group)) continue;
#pragma unroll
            for (int k = group * GROUP_TOKENS; k < (group + 1) * GROUP_TOKENS; ++k) body(k);
        }
    }

    // What the gates give, of the lane's head and entry.
    struct Decays {
        float beta;
        float since[ENTRY_ROWS];  // [i]: exp(G_i - G_own)
        float last;               // exp(G_last - G_own)
        float log2_from_start;    // of exp(G_own)
    };
    // Decays from the lane's entry to a token.
    __device__ float& decay_to(int token) const { return reinterpret_cast<float*>(in.along[solved_head()][token])[own]; }

    // Gates of tokens are appended to the ring on the way.
    __device__ void find_decays(Decays& to) const {
        const Work head = w.of_head(solved_head());
        const int token = own - history, entries = history + tokens, first_last = history + first_token();
        float g = gates.ring_g;
        to.beta = gates.ring_beta;
        if (u32(token) < u32(tokens)) {
            to.beta = head.beta(to_float(gates.beta_logit));
            g = Work::log_decay(expf(gates.A_log), to_float(gates.decay_logit) + gates.dt_bias);
            if (first_token() == 0 && is_first() && head.leads_head() && appends()) {
                const int row = w.append_row(token);
                w.t.ring_beta_out[head.ring_beta_at(row)] = to.beta;
                w.t.ring_g_out[head.ring_g_at(row)] = g;
            }
        }
        const float log2_g = g * LOG2_E;
        float since = 0.0f;
        to.log2_from_start = 0.0f;
#pragma unroll
        for (int first = 0; first < ENTRY_ROWS; first += 8) {
            const int end = min(first + 8, ENTRY_ROWS);
            // Those above 8 are often none.
            if (first >= entries) {
#pragma unroll
                for (int i = first; i < end; ++i) to.since[i] = 0.0f;
                continue;
            }
#pragma unroll
            for (int i = first; i < end; ++i) {
                const float step = of_entry(log2_g, i);
                if (i > own)
                    since += step;
                else
                    to.log2_from_start += step;
                const float decay = power_of_2(since);
                to.since[i] = decay;
                // Those of a single token remain at hand.
                if (READ_TOKENS > 1 && u32(i - first_last) < SOLVED_TOKENS && own < ENTRIES && is_first()) decay_to(i - history) = decay;
            }
        }
        to.last = power_of_2(since);
    }

    // Of the lane's head and tokens. `unit` becomes part of what products are multiplied by.
    __device__ void solve(const Decays& decays, float unit) const {
        const int n = solved_head(), key = n / KEY_HEADS_HERE, entry = min(own, ENTRY_ROWS - 1), entries = history + tokens;
        const float norm = own < entries ? rsqrtf(in.k_squares[key][entry] + NORM_EPSILON) : 0.0f;
        const float gain = own < entries ? decays.beta * norm * norm : 0.0f;
        float pairs[ENTRY_ROWS];  // [i]: exp(G_i - G_own) k_i . k_own
#pragma unroll
        for (int i = 0; i < ENTRY_ROWS; ++i) {
            // Of an upper block there are no products.
            const bool exists = i / 8 * 8 < entries && (ENTRIES == 16 || i >= 16 || own < 16);
            pairs[i] = exists ? decays.since[i] * in.kk[key][i][entry] : 0.0f;
        }
        float norms[SOLVED_TOKENS], y[SOLVED_TOKENS];
        for_tokens([&](int k) {
            const int token = lane_token(k);
            norms[k] = rsqrtf(in.q_squares[key][token] + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
            const float decay = READ_TOKENS == 1 ? decays.last : own < ENTRIES ? decay_to(token) : 0.0f;
            y[k] = own <= history + token ? norms[k] * in.qk[key][token][entry] * decay : 0.0f;
        });
        __syncwarp();  // decays to tokens have been read
        // Four entries at once, from the last down: what they take of each other is known before, so that one exchange serves all
        // four. Entries behind a token have no y.
#pragma unroll
        for (int first = ENTRY_ROWS - 4; first >= 0; first -= 4) {
            if (first >= entries) continue;
            float within[4][4];  // [m][n]: what entry first + m takes of first + n, n > m
#pragma unroll
            for (int n = 1; n < 4; ++n)
#pragma unroll
                for (int m = 0; m < n; ++m) within[m][n] = of_entry(gain * pairs[first + n], first + m);
            for_tokens([&](int k) {
                float c[4];
#pragma unroll
                for (int m = 3; m >= 0; --m) {
                    c[m] = of_entry(gain * y[k], first + m);
#pragma unroll
                    for (int n = 3; n > m; --n) c[m] = fmaf(-within[m][n], c[n], c[m]);
                }
#pragma unroll
                for (int m = 3; m >= 0; --m) y[k] = fmaf(-pairs[first + m], c[m], y[k]);
            });
        }
        const float key_decay = power_of_2(decays.log2_from_start);
        for_tokens([&](int k) {
            const int token = lane_token(k), last = history + token;
            const float whole = power_of_2(of_entry(decays.log2_from_start, last));
            const Rescaling to(whole, 8);
            float along = own <= last ? -(gain * y[k] * key_decay) * to.factor : 0.0f;
            float along_unit = 1.0f;
            if constexpr (same_type<T, fp16>::value) {
                // Of short keys it is large, of long ones little.
                float largest = fabsf(along);
#pragma unroll
                for (int offset = HEAD_LANES / 2; offset; offset /= 2)
                    if (!HALVES || offset < width) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
                const Rescaling within(largest, 12);
                along *= within.factor;
                along_unit = within.inverse;
            }
            if (own < ENTRIES) {
                out.store_sum(n, token, own, own <= last ? decays.beta * norm * y[k] : 0.0f);
#pragma unroll
                for (int part = 0; part < 3; ++part) {
                    const T rounded = round_quickly<T>(along);
                    in.along[n][token][part][own] = reinterpret_cast<const ACT&>(rounded);
                    along -= to_float(rounded);
                }
            }
            if (own == 0) {
                in.whole[n][token] = norms[k] * whole * to.factor;
                if constexpr (same_type<T, fp16>::value) in.along_unit[n][token] = along_unit;
                out.unit[n][token] = unit * to.inverse;
            }
        });
    }
};
