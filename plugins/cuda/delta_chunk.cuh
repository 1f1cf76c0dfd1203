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
#include "delta_inputs.cuh"
#include "mma.cuh"

constexpr int CHUNK = KEY_DIM <= 128 ? 16 : 8;
constexpr int KEY_STRIDE = KEY_DIM + 16;  // floats from row to row of staged keys: quarter warps read 128-bit words apart
constexpr int SYSTEM_STRIDE = 20;         // likewise of the triangular systems

// Warps that share 16 value rows: as few as registers (64 for the state) and the slice's rows allow; 0: none fits.
constexpr int key_warps(int n) {
    return n > WARPS ? 0
           : KEY_DIM / n <= 128 && KEY_DIM / n % 16 == 0 && SLICE % (16 * WARPS / n) == 0 ? n
                                                                                             : key_warps(2 * n);
}
constexpr bool CHUNKED = WIDE && !DERIVED && VALUE_DIM % SPLIT == 0 && key_warps(1) > 0;
constexpr int KEY_WARPS = key_warps(1) > 0 ? key_warps(1) : 1;
constexpr int TILE_VALUES = 16 * WARPS / KEY_WARPS;  // value rows of the block's tile
constexpr int PAIRS = CHUNKED ? KEY_DIM / KEY_WARPS / 16 : 1;
constexpr int ENTRIES_A_WARP = CHUNK / WARPS;
constexpr int VALUES_A_THREAD = (CHUNK * TILE_VALUES + THREADS - 1) / THREADS;
// A prefill has the next chunk on its way while one is worked on; a decode step has no registers left for that.
constexpr bool PREFETCH = TOKENS == 0;

struct ChunkShared {
    float k[CHUNK][KEY_STRIDE];  // normalised; with per-channel decays, times exp(G) once the pairs are done
    float q[CHUNK][KEY_STRIDE];  // likewise
    float decay[PER_CHANNEL ? CHUNK : 1][PER_CHANNEL ? KEY_STRIDE : 4];  // exp(g), then k exp(G_last - G)
    float last[PER_CHANNEL ? KEY_STRIDE : 4];                             // exp(G_last), per channel or at [0]
    float from_start[CHUNK], to_end[CHUNK];                               // exp(G), exp(G_last - G) of scalar decays
    float system[KEY_WARPS][TILE_VALUES][SYSTEM_STRIDE];                  // S0 k of each entry, then u
    float output[KEY_WARPS][TILE_VALUES][SYSTEM_STRIDE];                  // S0 q of each entry, then o
    float kk[CHUNK][CHUNK], qk[CHUNK][CHUNK];                             // coefficients of u_i in u_j and o_j
    float v[CHUNK][TILE_VALUES];
    float g[CHUNK], beta[CHUNK];
};

struct ChunkInputs {
    Entry entries[ENTRIES_A_WARP];
    float v[VALUES_A_THREAD];
};

struct ChunkTile {
    const Work& w;
    ChunkShared& shared;
    int first;  // first value row of the tile within the slice
    Accumulator S[2 * PAIRS];

    __device__ int warp() const { return threadIdx.x / 32; }
    __device__ int lane() const { return threadIdx.x % 32; }
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

    __device__ static int value_entry(int n) { return (threadIdx.x + n * THREADS) / TILE_VALUES; }
    __device__ static int value_row(int n) { return (threadIdx.x + n * THREADS) % TILE_VALUES; }

    __device__ void fetch_one(Entry& in, int from, int at, int count) const {
        if (at < count) fetch_entry(w, lane(), from + at, in);
    }
    __device__ float fetch_one_value(int n, int from, int count) const {
        return value_entry(n) < count ? fetch_value(w, from + value_entry(n), first + value_row(n)) : 0.0f;
    }
    __device__ void stage_one(Entry& in, int from, int at, int count) {
        if (at < count) {
            append_key(w, lane(), from + at, in, first == 0);
            normalise(in, from + at >= w.row.history());
        } else {
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) in.k[i] = in.q[i] = in.g[i] = 0.0f;
        }
        store_padded(shared.k[at], lane(), in.k);
        store_padded(shared.q[at], lane(), in.q);
        if constexpr (PER_CHANNEL) store_padded(shared.decay[at], lane(), in.g);
        const int index = at < count ? from + at : -1;  // an entry behind the last is no token
        if constexpr (PER_CHANNEL)
            finish_decays<PREFETCH ? LANE_COLS : 1>(w, lane(), index, shared.decay[at], first == 0);
        else
            shared.g[at] = finish_decay(w, index, 0, in.g[0], first == 0);
        shared.beta[at] = at < count ? finish_beta(w, index, in.beta, first == 0) : 0.0f;
    }
    __device__ void stage_one_value(int n, int from, int count, float v) {
        if (value_entry(n) >= CHUNK) return;
        shared.v[value_entry(n)][value_row(n)] = v;
        if (value_entry(n) < count) append_value(w, from + value_entry(n), first + value_row(n), v);
    }

    __device__ void fetch(ChunkInputs& in, int from, int count) const {
#pragma unroll
        for (int n = 0; n < ENTRIES_A_WARP; ++n) fetch_one(in.entries[n], from, warp() + n * WARPS, count);
#pragma unroll
        for (int n = 0; n < VALUES_A_THREAD; ++n) in.v[n] = fetch_one_value(n, from, count);
    }
    __device__ void stage(ChunkInputs& in, int from, int count) {
#pragma unroll
        for (int n = 0; n < ENTRIES_A_WARP; ++n) stage_one(in.entries[n], from, warp() + n * WARPS, count);
#pragma unroll
        for (int n = 0; n < VALUES_A_THREAD; ++n) stage_one_value(n, from, count, in.v[n]);
    }
    // Both at once, for fewer registers.
    __device__ void fetch_and_stage(int from, int count) {
#pragma unroll 1
        for (int at = warp(); at < CHUNK; at += WARPS) {
            Entry in;
            fetch_one(in, from, at, count);
            stage_one(in, from, at, count);
        }
#pragma unroll 1
        for (int n = 0; n < VALUES_A_THREAD; ++n) stage_one_value(n, from, count, fetch_one_value(n, from, count));
    }

    // ---- coefficients of pairs -----------------------------------------------------------------------------------------

    // kk[j][i] = beta_j (k_j . exp(G_j - G_i) k_i) for i < j, qk[j][i] = q_j . exp(G_j - G_i) k_i for i <= j. Eight lanes share
    // entry i: they carry k_i forward through the decays and meet every later k_j and q_j.
    __device__ void pair_entries(int count, bool outputs) {
        constexpr int PART = KEY_DIM / 8;  // key columns of a lane: 4 (l + 8 m) + 0 ... 3
        const int l = threadIdx.x % 8;
        for (int i = threadIdx.x / 8; i < count; i += THREADS / 8) {
            const unsigned lanes = 0xffu << (lane() / 8 * 8);
            float carried[PART], scalar = 1.0f;
#pragma unroll
            for (int m = 0; m < PART; m += 4) load_vector<4>(&shared.k[i][4 * l + 8 * m], carried + m);
            for (int j = i; j < count; ++j) {
                float sums[2] = {0.0f, 0.0f};
                if (j > i && !PER_CHANNEL) scalar *= expf(shared.g[j]);
#pragma unroll
                for (int m = 0; m < PART; m += 4) {
                    float x[4];
                    if (PER_CHANNEL && j > i) {
                        load_vector<4>(&shared.decay[PER_CHANNEL ? j : 0][4 * l + 8 * m], x);
#pragma unroll
                        for (int e = 0; e < 4; ++e) carried[m + e] *= x[e];
                    }
                    load_vector<4>(&shared.k[j][4 * l + 8 * m], x);
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[0] = fmaf(x[e], carried[m + e], sums[0]);
                    if (!outputs) continue;
                    load_vector<4>(&shared.q[j][4 * l + 8 * m], x);
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[1] = fmaf(x[e], carried[m + e], sums[1]);
                }
#pragma unroll
                for (int offset = 4; offset; offset /= 2) {
                    sums[0] += __shfl_xor_sync(lanes, sums[0], offset);
                    sums[1] += __shfl_xor_sync(lanes, sums[1], offset);
                }
                if (l == 0) {
                    shared.kk[j][i] = shared.beta[j] * scalar * sums[0];
                    shared.qk[j][i] = scalar * sums[1];
                }
            }
        }
    }

    // exp(G) and exp(G_last - G): one thread a channel, or a scalar's entry.
    __device__ void spread_decays(int count) {
        if constexpr (PER_CHANNEL) {
            for (int c = threadIdx.x; c < KEY_DIM; c += THREADS) {
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

    // The triangular system of one value row: S0 k to u, S0 q to o.
    __device__ void solve(int count, int first_output) {
        const int r = threadIdx.x;
        float u[CHUNK];
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            if (j >= count) {
                u[j] = 0.0f;
                continue;
            }
            const float start = PER_CHANNEL ? 1.0f : shared.from_start[j];
            float read = 0.0f;
#pragma unroll
            for (int part = 0; part < KEY_WARPS; ++part) read += shared.system[part][r][j];
            float sum = shared.beta[j] * (shared.v[j][r] - start * read);
#pragma unroll
            for (int i = 0; i < j; ++i) sum = fmaf(-shared.kk[j][i], u[i], sum);
            u[j] = sum;
            if (j < first_output) continue;
            read = 0.0f;
#pragma unroll
            for (int part = 0; part < KEY_WARPS; ++part) read += shared.output[part][r][j];
            float o = start * read;
#pragma unroll
            for (int i = 0; i <= j; ++i) o = fmaf(shared.qk[j][i], u[i], o);
            shared.output[0][r][j] = o;
        }
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) shared.system[0][r][j] = u[j] * (PER_CHANNEL ? 1.0f : shared.to_end[j]);
    }

    __device__ void update_state(int count) {
        float u[CHUNK / 8][4];
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) u[n][e] = shared.system[0][row() + 8 * (e % 2)][8 * n + t() + 4 * (e / 2)];
        const float(*keys)[KEY_STRIDE] = key_updates();
#pragma unroll
        for (int block = 0; block < 2 * PAIRS; ++block) {
            if (PER_CHANNEL && block % 4 == 0) asm volatile("" ::: "memory");  // no more operands at once than registers
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
        ChunkInputs in;
        if constexpr (PREFETCH) fetch(in, from, min(CHUNK, to - from));
#pragma unroll 1
        for (; from < to; from += CHUNK) {
            const int count = min(CHUNK, to - from), first_output = max(w.row.history() - from, 0);
            __syncthreads();
            if constexpr (PREFETCH)
                stage(in, from, count);
            else
                fetch_and_stage(from, count);
            __syncthreads();
            if constexpr (PREFETCH)
                if (from + CHUNK < to) fetch(in, from + CHUNK, min(CHUNK, to - from - CHUNK));
            pair_entries(count, first_output < count);
            if constexpr (PER_CHANNEL) __syncthreads();
            spread_decays(count);
            __syncthreads();
#pragma unroll
            for (int n = 0; n < CHUNK / 8; ++n) {
                if (8 * n < count) multiply_state(shared.k, n, shared.system[key_part()]);
                if (8 * n < count && 8 * n + 8 > first_output) multiply_state(shared.q, n, shared.output[key_part()]);
            }
            __syncthreads();
            if (threadIdx.x < TILE_VALUES) solve(count, first_output);
            __syncthreads();
            for (int n = threadIdx.x + first_output * TILE_VALUES; n < count * TILE_VALUES; n += THREADS) {
                const int at = n / TILE_VALUES, r = n % TILE_VALUES;
                w.o(from + at - w.row.history())[first + r] = from_float<ACT>(shared.output[0][r][at]);
            }
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
