// The delta rule in chunks of up to 16 entries on tensor cores, with a tile of the state in registers: folds the ring and
// takes the step's tokens, of which a prefill may have any number.
//
// Within a chunk, with G_j the log decay from its start through entry j (a vector where decays are per channel):
//
//     u_j = beta_j (v_j - S0 (exp(G_j) k_j) - sum_{i<j} (k_j . exp(G_j - G_i) k_i) u_i)        one triangular system
//     o_j = S0 (exp(G_j) q_j) + sum_{i<=j} (q_j . exp(G_j - G_i) k_i) u_i
//     S   = S0 diag(exp G_last) + sum_j u_j (exp(G_last - G_j) k_j)^T
//
// No exponent is above zero, whatever the gates are: the coefficients of pairs come from running products of decays. The
// state is float32 throughout. Products split both operands into two tf32 parts and leave out the product of the lower
// ones, and their sums are added to the state in float32, so that folds do not drift.
//
// A warp holds 16 value rows and KEY_DIM / KEY_WARPS key columns as mma accumulators: lane 4 g + t has rows g and g + 8 and
// columns 16 p + 4 t + 0 ... 3 of pair p, of which 0 and 1 are columns 2 t, 2 t + 1 of its first block, 2 and 3 of its
// second. As an operand, the same registers contract over key columns.
#pragma once
#include "async_copy.cuh"
#include "delta_inputs.cuh"
#include "mma.cuh"

constexpr int CHUNK = KEY_DIM <= 128 ? 16 : 8;
constexpr int KEY_STRIDE = KEY_DIM + 16;  // floats from row to row of staged keys: quarter warps read 128-bit words apart
constexpr int SYSTEM_STRIDE = 20;         // likewise of the triangular systems

// Key columns of a warp at most: 64 state values a thread in a prefill, 32 in a decode step, whose read-out wants blocks.
constexpr int MOST_KEYS = TOKENS == 0 ? 128 : 64;
// Warps that share 16 value rows: as few as that and the slice's rows allow; 0: none fits.
constexpr int key_warps(int n) {
    return n > WARPS ? 0
           : KEY_DIM / n <= MOST_KEYS && KEY_DIM / n % 16 == 0 && SLICE % (16 * WARPS / n) == 0 ? n
                                                                                                 : key_warps(2 * n);
}
constexpr bool CHUNKED = WIDE && !DERIVED && VALUE_DIM % SPLIT == 0 && key_warps(1) > 0;
constexpr int KEY_WARPS = key_warps(1) > 0 ? key_warps(1) : 1;
constexpr int TILE_VALUES = 16 * WARPS / KEY_WARPS;  // value rows of the block's tile
constexpr int PAIRS = CHUNKED ? KEY_DIM / KEY_WARPS / 16 : 1;
constexpr int WARP_ENTRIES = CHUNK / WARPS;  // entries of a warp, in staging
// A prefill has registers to interleave them.
constexpr int ENTRIES_TOGETHER = TOKENS == 0 ? WARP_ENTRIES : 1, CHANNELS_TOGETHER = TOKENS == 0 ? LANE_COLS : 1;

struct ChunkShared {
    float k[CHUNK][KEY_STRIDE];  // normalised; with per-channel decays, times exp(G) once the pairs are done
    float q[CHUNK][KEY_STRIDE];  // likewise
    float decay[PER_CHANNEL ? CHUNK : 1][PER_CHANNEL ? KEY_STRIDE : 4];  // exp(g), then k exp(G_last - G)
    float last[PER_CHANNEL ? KEY_STRIDE : 4];                             // exp(G_last), per channel or at [0]
    float from_start[CHUNK], to_end[CHUNK];                               // exp(G), exp(G_last - G) of scalar decays
    float system[KEY_WARPS][TILE_VALUES][SYSTEM_STRIDE];                  // S0 k of each entry, then u
    float output[KEY_WARPS][TILE_VALUES][SYSTEM_STRIDE];                  // S0 q of each entry
    float kk[CHUNK][CHUNK], qk[CHUNK][CHUNK];                             // coefficients of u_i in u_j, [i][j], and o_j, [j][i]
    float v[CHUNK][TILE_VALUES];
    float g[CHUNK], beta[CHUNK];
};

struct ChunkTile {
    const Work& w;
    ChunkShared& shared;
    int first;  // first value row of the tile within the slice
    Accumulator S[2 * PAIRS];

    __device__ int warp() const { return opaque(int(threadIdx.x)) / 32; }
    __device__ int lane() const { return opaque(int(threadIdx.x)) % 32; }
    __device__ int g() const { return lane() / 4; }
    __device__ int t() const { return lane() % 4; }
    __device__ int row() const { return 16 * (warp() / KEY_WARPS) + g(); }
    __device__ int key_part() const { return warp() % KEY_WARPS; }
    __device__ int column(int pair) const { return key_part() * (KEY_DIM / KEY_WARPS) + 16 * pair + 4 * t(); }

    // ---- the tile ----------------------------------------------------------------------------------------------------

    __device__ void load_state() {
#pragma unroll
        for (int p = 0; p < PAIRS; ++p)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (w.row.folded > 0) load_vector<4>(w.t.state + w.state_at(first + row() + 8 * half) + column(p), s);
#pragma unroll
                for (int e = 0; e < 4; ++e) S[2 * p + e / 2].v[2 * half + e % 2] = s[e];
            }
    }
    __device__ void store_state() const {
#pragma unroll
        for (int p = 0; p < PAIRS; ++p)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float s[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) s[e] = S[2 * p + e / 2].v[2 * half + e % 2];
                store_vector<4>(w.t.state_out + w.state_at(first + row() + 8 * half) + column(p), s);
            }
    }

    // ---- a chunk's inputs; rows behind its last entry are zero, with a decay of one -----------------------------------------

    // Requests `N` elements for a row of shared memory, which holds them in their own type until they are converted there.
    template <int N, typename T>
    __device__ void request(float* to, const T* from) const {
        for (int at = lane() * 16 / int(sizeof(T)); at < N; at += 512 / int(sizeof(T)))
            copy_16_bytes(reinterpret_cast<T*>(to) + at, from + at);
    }
    __device__ void request_entry(int at, int index) {
        const int history = w.row.history(), token = index - history, row = w.history_row(index);
        if (index < history) {
            request<KEY_DIM>(shared.k[at], w.t.ring_k + w.ring_k_at(row));
            request<TILE_VALUES>(shared.v[at], w.t.ring_v + w.ring_v_at(row) + first);
            if constexpr (PER_CHANNEL) request<KEY_DIM>(shared.decay[at], w.t.ring_g + w.ring_g_at(row));
        } else {
            request<KEY_DIM>(shared.k[at], w.k(token));
            request<KEY_DIM>(shared.q[at], w.q(token));
            request<TILE_VALUES>(shared.v[at], w.v(token) + first);
            if constexpr (PER_CHANNEL)
                request<KEY_DIM>(shared.decay[at], w.t.gate + w.token(token) * w.t.gate_stride + w.gate_at(0));
        }
    }
    // A row of shared memory as floats, from the type in which it was requested; `values` are this lane's columns.
    template <typename T>
    __device__ void unpack(const float* row, float (&values)[LANE_COLS]) const {
        load_columns(reinterpret_cast<const T*>(row), lane(), values);
    }
    __device__ void convert_entry(int at, int index, float beta, float g) {
        const bool is_token = index >= w.row.history();
        float k[LANE_COLS], q[LANE_COLS], v[(TILE_VALUES + 31) / 32];
        if (is_token)
            unpack<ACT>(shared.k[at], k), unpack<ACT>(shared.q[at], q);
        else
            unpack<RING_K>(shared.k[at], k);
        if (appends(w, index, first == 0) && w.leads_key_head())
            store_columns(w.t.ring_k_out + w.ring_k_at(w.append_row(index - w.row.history())), lane(), k);
#pragma unroll
        for (int n = 0; n < (TILE_VALUES + 31) / 32; ++n) {
            const int r = lane() + 32 * n;
            if (r >= TILE_VALUES) continue;
            v[n] = is_token ? to_float(reinterpret_cast<const ACT*>(shared.v[at])[r])
                            : to_float(reinterpret_cast<const RING*>(shared.v[at])[r]);
            append_value(w, index, first + r, v[n]);
        }
        float squares[2] = {dot(k, k), is_token ? dot(q, q) : 0.0f};
        sum_all<32>(squares);
        __syncwarp();  // every lane has read the row before any writes it
        const float k_scale = rsqrtf(squares[0] + NORM_EPSILON);
        const float q_scale = rsqrtf(squares[1] + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) {
            k[i] *= k_scale;
            q[i] = is_token ? q[i] * q_scale : 0.0f;
        }
        store_padded(shared.k[at], lane(), k);
        store_padded(shared.q[at], lane(), q);
#pragma unroll
        for (int n = 0; n < (TILE_VALUES + 31) / 32; ++n)
            if (lane() + 32 * n < TILE_VALUES) shared.v[at][lane() + 32 * n] = v[n];
        if constexpr (PER_CHANNEL) {
            if (is_token) {
                unpack<ACT>(shared.decay[at], k);
                __syncwarp();
                store_padded(shared.decay[at], lane(), k);
            }
            finish_decays<CHANNELS_TOGETHER>(w, lane(), index, shared.decay[at], first == 0);
        } else {
            shared.g[at] = finish_decay(w, index, 0, g, first == 0);
        }
        shared.beta[at] = finish_beta(w, index, beta, first == 0);
    }
    __device__ void clear_entry(int at) {
        const float zeros[LANE_COLS] = {};
        store_padded(shared.k[at], lane(), zeros);
        store_padded(shared.q[at], lane(), zeros);
        for (int r = lane(); r < TILE_VALUES; r += 32) shared.v[at][r] = 0.0f;
        if constexpr (PER_CHANNEL)
            for (int c = lane(); c < KEY_DIM; c += 32) shared.decay[at][c] = 1.0f;
        shared.g[at] = shared.beta[at] = 0.0f;
    }
    // The keys of a row with a single chunk serve all its tiles; later tiles stage their values alone.
    __device__ bool keys_are_staged() const {
        const int all = w.row.history() + w.row.tokens, fold = w.row.fold_entries();
        return first > 0 && all <= CHUNK && (fold == 0 || fold == all);
    }
    __device__ void stage_values(int from, int count) {
#pragma unroll 2
        for (int n = opaque(int(threadIdx.x)); n < count * TILE_VALUES; n += THREADS) {
            const int at = n / TILE_VALUES, r = first + n % TILE_VALUES;
            const float v = fetch_value(w, from + at, r);
            shared.v[at][n % TILE_VALUES] = v;
            append_value(w, from + at, r, v);
        }
    }
    // A warp stages entries warp, warp + 4, ...: all are requested before the first is waited for.
    __device__ void stage(int from, int count) {
#pragma unroll 1
        for (int at = warp(); at < count; at += WARPS) request_entry(at, from + at);
        // Lane n has the scalars of the warp's n-th entry.
        const int mine = from + warp() + lane() % WARP_ENTRIES * WARPS, history = w.row.history();
        float beta = 0.0f, g = 0.0f;
        if (mine < history) {
            beta = w.t.ring_beta[w.ring_beta_at(w.history_row(mine))];
            if constexpr (!PER_CHANNEL) g = w.t.ring_g[w.ring_g_at(w.history_row(mine))];
        } else if (mine < from + count) {
            beta = w.beta_logit(mine - history);
            if constexpr (!PER_CHANNEL) g = w.decay_logit(mine - history, 0);
        }
        wait_copies();
        __syncwarp();
#pragma unroll ENTRIES_TOGETHER
        for (int n = 0; n < WARP_ENTRIES; ++n) {
            const int at = warp() + n * WARPS;
            const float entry_beta = __shfl_sync(~0u, beta, n), entry_g = __shfl_sync(~0u, g, n);
            if (at < count)
                convert_entry(at, from + at, entry_beta, entry_g);
            else
                clear_entry(at);
        }
    }

    // ---- coefficients of pairs: kk[i][j] = beta_j (k_j . exp(G_j - G_i) k_i) for i < j, --------------------------------------
    // ---- qk[j][i] = q_j . exp(G_j - G_i) k_i for i <= j; the other triangles hold anything ------------------------------------

    // Scalar decays: products of all pairs, a warp for 8 columns i of either matrix.
    __device__ void multiply_pairs(bool outputs) {
        const int n = warp() % (CHUNK / 8);
        if (warp() >= CHUNK / 4 || (warp() >= CHUNK / 8 && !outputs)) return;
        const bool is_output = warp() >= CHUNK / 8;
        const float(*rows)[KEY_STRIDE] = is_output ? shared.q : shared.k;
        Accumulator sum[2] = {}, rest[2] = {};
#pragma unroll 2
        for (int p = 0; p < KEY_DIM / 16; ++p) {
            float a[4], below[4] = {}, b[4];
            load_vector<4>(&rows[g()][16 * p + 4 * t()], a);
            if (CHUNK == 16) load_vector<4>(&rows[(g() + 8) % CHUNK][16 * p + 4 * t()], below);
            load_vector<4>(&shared.k[8 * n + g()][16 * p + 4 * t()], b);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float operand[4] = {a[2 * half], below[2 * half], a[2 * half + 1], below[2 * half + 1]};
                product(sum[half], rest[half], operand, b[2 * half], b[2 * half + 1]);
            }
        }
        float exponent[4] = {};
#pragma unroll 2
        for (int m = 0; m < CHUNK; ++m) {
            const float log_decay = shared.g[m];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                exponent[e] += m > 8 * n + 2 * t() + e % 2 && m <= g() + 8 * (e / 2) ? log_decay : 0.0f;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int j = g() + 8 * (e / 2), i = 8 * n + 2 * t() + e % 2;
            if (j >= CHUNK) continue;
            const float value = expf(exponent[e]) * (sum[0].v[e] + sum[1].v[e] + (rest[0].v[e] + rest[1].v[e]));
            if (is_output)
                shared.qk[j][i] = value;
            else
                shared.kk[i][j] = shared.beta[j] * value;
        }
    }

    // Decays per channel: eight lanes carry k_i forward through the decays and meet every later k_j and q_j.
    template <bool OUTPUTS>
    __device__ void carry_pairs(int count) {
        constexpr int PART = KEY_DIM / 8;  // key columns of a lane: 4 (l + 8 m) + 0 ... 3
        const int thread = opaque(int(threadIdx.x)), l = thread % 8, i = thread / 8;
        if (i >= CHUNK) return;
        float carried[PART];
#pragma unroll
        for (int m = 0; m < PART; m += 4) load_vector<4>(&shared.k[i][4 * l + 8 * m], carried + m);
#pragma unroll 2
        for (int j = i / 4 * 4; j < count; ++j) {  // the warp's first i
            float k_sums[4] = {}, q_sums[4] = {};
#pragma unroll
            for (int m = 0; m < PART; m += 4) {
                float x[4];
                load_vector<4>(&shared.decay[PER_CHANNEL ? j : 0][4 * l + 8 * m], x);
#pragma unroll
                for (int e = 0; e < 4; ++e) carried[m + e] *= j > i ? x[e] : 1.0f;
                load_vector<4>(&shared.k[j][4 * l + 8 * m], x);
#pragma unroll
                for (int e = 0; e < 4; ++e) k_sums[e] = fmaf(x[e], carried[m + e], k_sums[e]);
                if constexpr (OUTPUTS) {
                    load_vector<4>(&shared.q[j][4 * l + 8 * m], x);
#pragma unroll
                    for (int e = 0; e < 4; ++e) q_sums[e] = fmaf(x[e], carried[m + e], q_sums[e]);
                }
            }
            float sums[2] = {(k_sums[0] + k_sums[1]) + (k_sums[2] + k_sums[3]), (q_sums[0] + q_sums[1]) + (q_sums[2] + q_sums[3])};
            if constexpr (OUTPUTS) {
                sum_scattered<8>(sums, l);
                if (l == 0) shared.kk[i][j] = shared.beta[j] * sums[0];
                if (l == 4) shared.qk[j][i] = sums[0];
            } else {
                float one[1] = {sums[0]};
                sum_all<8>(one);
                if (l == 0) shared.kk[i][j] = shared.beta[j] * one[0];
            }
        }
        for (int j = count + l; j < CHUNK; j += 8) shared.kk[i][j] = 0.0f;
    }
    __device__ void pair_entries(int count, bool outputs) {
        if constexpr (!PER_CHANNEL)
            multiply_pairs(outputs);
        else if (outputs)
            carry_pairs<true>(count);
        else
            carry_pairs<false>(count);
    }

    // exp(G) and exp(G_last - G): one thread a channel, or a scalar's entry.
    __device__ void spread_decays() {
        if constexpr (PER_CHANNEL) {
            for (int c = opaque(int(threadIdx.x)); c < KEY_DIM; c += THREADS) {
                float product = 1.0f, keys[CHUNK];
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) {
                    keys[j] = shared.k[j][c];
                    product *= shared.decay[j][c];
                    shared.k[j][c] = keys[j] * product;
                    shared.q[j][c] *= product;
                }
                shared.last[c] = product;
                product = 1.0f;
#pragma unroll
                for (int j = CHUNK - 1; j >= 0; --j) {
                    const float decay = shared.decay[j][c];
                    shared.decay[j][c] = keys[j] * product;
                    product *= decay;
                }
            }
        } else if (threadIdx.x < CHUNK) {
            float before = 0.0f, behind = 0.0f;
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) (j <= threadIdx.x ? before : behind) += shared.g[j];
            shared.from_start[threadIdx.x] = expf(before);
            shared.to_end[threadIdx.x] = expf(behind);
            if (threadIdx.x == CHUNK - 1) shared.last[0] = expf(before);
        }
    }

    // ---- products with the state ---------------------------------------------------------------------------------------

    // Sums over this warp's key columns of S0 with block `n` (8 entries) of keys, to `to`.
    __device__ void multiply_state(const float (*keys)[KEY_STRIDE], int n, float (*to)[SYSTEM_STRIDE]) const {
        Accumulator sum[2] = {}, rest = {};
        const float* from = keys[8 * n + g()] + column(0);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            float b[4];
            load_vector<4>(from + 16 * p, b);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Accumulator& s = S[2 * p + half];
                const float a[4] = {s.v[0], s.v[2], s.v[1], s.v[3]};
                product(sum[half], rest, a, b[2 * half], b[2 * half + 1]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float pair[2];
#pragma unroll
            for (int e = 0; e < 2; ++e)
                pair[e] = (sum[0].v[2 * half + e] + sum[1].v[2 * half + e]) + rest.v[2 * half + e];
            store_vector<2>(&to[row() + 8 * half][8 * n + 2 * t()], pair);
        }
    }

    // sum += a b of the upper tf32 parts, rest += the products of an upper and a lower part.
    __device__ static void product(Accumulator& sum, Accumulator& rest, const float (&a)[4], float b0, float b1) {
        float high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high[i] = tf32_part(a[i]);
            low[i] = a[i] - high[i];
        }
        const float high0 = tf32_part(b0), high1 = tf32_part(b1);
        mma_tf32(sum, high, high0, high1);
        mma_tf32(rest, low, high0, high1);
        mma_tf32(rest, high, b0 - high0, b1 - high1);
    }

    // S0 k or S0 q of entry j at value row r, of all key columns.
    __device__ static float read(const float (*parts)[TILE_VALUES][SYSTEM_STRIDE], int r, int j) {
        float sum = parts[0][r][j];
#pragma unroll
        for (int part = 1; part < KEY_WARPS; ++part) sum += parts[part][r][j];
        return sum;
    }

    // The triangular system of one value row: S0 k to u.
    __device__ void solve(int count) {
        const int r = opaque(int(threadIdx.x));
        float u[CHUNK];
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            const float stored = 8 * (j / 8) < count ? read(shared.system, r, j) : 0.0f;
            u[j] = shared.beta[j] * fmaf(-stored, PER_CHANNEL ? 1.0f : shared.from_start[j], shared.v[j][r]);
        }
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
#pragma unroll
            for (int j = i + 1; j < CHUNK; ++j) u[j] = fmaf(-shared.kk[i][j], u[i], u[j]);
        }
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) shared.system[0][r][j] = u[j];
    }

    // o of the chunk's entries from first_output on, which are tokens.
    __device__ void write_outputs(int from, int count, int first_output) const {
#pragma unroll 1
        for (int n = opaque(int(threadIdx.x)) + first_output * TILE_VALUES; n < count * TILE_VALUES; n += THREADS) {
            const int j = n / TILE_VALUES, r = n % TILE_VALUES;
            float sums[4] = {(PER_CHANNEL ? 1.0f : shared.from_start[j]) * read(shared.output, r, j), 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < CHUNK; ++i)
                sums[i % 4] = fmaf(i <= j ? shared.qk[j][i] : 0.0f, shared.system[0][r][i], sums[i % 4]);
            w.o(from + j - w.row.history())[first + r] = from_float<ACT>((sums[0] + sums[1]) + (sums[2] + sums[3]));
        }
    }

    __device__ void update_state(int count) {
        float u[CHUNK / 8][4];
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int j = 8 * n + t() + 4 * (e / 2);
                u[n][e] = shared.system[0][row() + 8 * (e % 2)][j] * (PER_CHANNEL ? 1.0f : shared.to_end[j]);
            }
        const float(*keys)[KEY_STRIDE] = key_updates();
#pragma unroll
        for (int block = 0; block < 2 * PAIRS; ++block) {
            // Column g of the block, and this lane's columns of the accumulator.
            const int at = column(block / 2) - 4 * t() + 2 * (block % 2), operand = at + 4 * (g() / 2) + g() % 2;
            Accumulator sum = {}, rest = {};
#pragma unroll
            for (int n = 0; n < CHUNK / 8; ++n)
                if (8 * n < count) product(sum, rest, u[n], keys[8 * n + t()][operand], keys[8 * n + t() + 4][operand]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float last = shared.last[PER_CHANNEL ? at + 4 * t() + e % 2 : 0];
                S[block].v[e] = fmaf(last, S[block].v[e], sum.v[e] + rest.v[e]);
            }
        }
    }
    __device__ const float (*key_updates() const)[KEY_STRIDE] {
        if constexpr (PER_CHANNEL)
            return reinterpret_cast<const float(*)[KEY_STRIDE]>(shared.decay);
        else
            return shared.k;
    }

    // ---- the chunk -----------------------------------------------------------------------------------------------------

    __device__ void take(int from, int to) {
#pragma unroll 1
        for (; from < to; from += CHUNK) {
            const int count = min(CHUNK, to - from), first_output = max(w.row.history() - from, 0);
            __syncthreads();
            if (keys_are_staged()) {
                stage_values(from, count);
            } else {
                stage(from, count);
                __syncthreads();
                pair_entries(count, first_output < count);
                if constexpr (PER_CHANNEL) __syncthreads();
                spread_decays();
            }
            __syncthreads();
#pragma unroll
            for (int n = 0; n < CHUNK / 8; ++n) {
                if (8 * n < count) multiply_state(shared.k, n, shared.system[key_part()]);
                if (8 * n < count && 8 * n + 8 > first_output) multiply_state(shared.q, n, shared.output[key_part()]);
            }
            __syncthreads();
            if (threadIdx.x < TILE_VALUES) solve(count);
            __syncthreads();
            write_outputs(from, count, first_output);
            update_state(count);
        }
    }
};

__device__ __forceinline__ void chunk_step(const Work& w, ChunkShared& shared) {
#pragma unroll 1
    for (int first = 0; first < SLICE; first += TILE_VALUES) {
        ChunkTile tile{w, shared, first};
        run_step(w, tile);
    }
}
