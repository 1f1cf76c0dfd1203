// The inputs of a chunk of entries in shared memory, and what a chunk derives from them alone.
//
// Keys, queries and values lie there as they come: their norms are applied to products. Where all of them have the same
// 16-bit type they stay in it and arrive without passing registers. Otherwise they are floats, and so are those with decays
// per channel, which are multiplied into the keys.
#pragma once
#include "delta_step_answer.cuh"
#include "ptx/async_copy.cuh"

constexpr int CHUNK = KEY_DIM <= 128 ? 16 : 8;
constexpr int BLOCKS = CHUNK / 8;
constexpr int PAIRS = KEY_DIM / 16;
constexpr int ENTRY_LANES = THREADS / CHUNK;  // threads that stage an entry
// Wider keys would leave a thread too few registers beside the state. Decays per channel need whole vectors of keys for each of an
// entry's threads (delta_pairs.cuh, carry).
constexpr bool CHUNKED = WIDE && !DERIVED && KEY_DIM <= 192 && VALUE_DIM % SPLIT == 0 && SLICE % 16 == 0 &&
                         (!PER_CHANNEL || KEY_DIM % (4 * ENTRY_LANES) == 0);

constexpr bool NARROW = !PER_CHANNEL && sizeof(ACT) == 2 && same_type<ACT, RING_K>::value && same_type<ACT, RING>::value;
template <bool>
struct StagedType {
    typedef float type;
};
template <>
struct StagedType<true> {
    typedef ACT type;
};
typedef StagedType<NARROW>::type STAGED;
constexpr bool ONE_CHUNK = TOKENS == 1 && RING_ROWS <= CHUNK;  // whatever the ring holds
// A fold whose outputs have been given before may have the state in shared memory (delta_fold.cuh), of 16 bits if a single chunk is the
// rule. With bfloat16 keys it is delta_fold_tile.cuh's, if all fits.
constexpr bool FOLDS_APART = READS_ALL && TOKENS > 0 && CHUNKED && !KDA_VERIFIES &&
                             (ONE_CHUNK || sizeof(STATE) == 4 || FEW_NARROW_ENTRIES);
constexpr bool BF16_KEYS = NARROW && same_type<ACT, bf16>::value && CHUNK == 16;
constexpr bool FOLDS_BF16 = FOLDS_APART && BF16_KEYS && KEY_DIM % 64 == 0 && SLICE <= 128;
// Such a fold answers the step's tokens on the way, if it takes up the ring, and that is one chunk.
constexpr bool FOLD_ANSWERS_STEP = ANSWERS_FIRST && GRAM && FOLDS_BF16;
__device__ __forceinline__ bool fold_answers_step(const Row& row) {
    return FOLD_ANSWERS_STEP && row.folds() && !row.absorbs() && row.history() <= CHUNK;
}
// A prefill has the next chunk on its way while one is worked on; other steps rarely have a second one.
constexpr bool AHEAD = NARROW && TOKENS == 0;
constexpr int INPUT_STAGES = AHEAD ? 2 : 1;
constexpr int KEY_PIECE = FOLDS_BF16 ? 16 : 8;  // 16-bit columns that a thread has side by side
// Heads of a block have the same keys: a fold of bfloat16 keys prepares a chunk for all of them at once.
constexpr int PREPARED_HEADS = FOLDS_BF16 ? HEADS_A_BLOCK : 1;
static_assert(HEADS_PER_KEY % PREPARED_HEADS == 0 && PREPARED_HEADS * CHUNK <= 32, "a lane an entry of a head");
// Elements from row to row, by which a warp's accesses spread over the banks.
constexpr int KEY_STRIDE = KEY_DIM + (FOLDS_BF16 ? 8 : NARROW ? 16 : 4), VALUE_STRIDE = SLICE + 8, PAIR_STRIDE = CHUNK + 4;

// Steps that have been answered before entries are staged need none.
constexpr bool STAGES_QUERIES = !READS_ALL || TOKENS == 0;

template <bool>
struct StagedQueries {
    STAGED q[CHUNK][KEY_STRIDE];  // as keys; zero for entries of the ring
};
template <>
struct StagedQueries<false> {
    static constexpr STAGED (*q)[KEY_STRIDE] = nullptr;
};

// Of a head's entries.
struct ChunkGates {
    double log_decay[CHUNK];                  // G where decays are scalars, in double since differences of it count
    float from_start[CHUNK], to_end[CHUNK];  // exp(G), exp(G_last - G) of it
    float beta[CHUNK];
};
struct ChunkInputs : StagedQueries<STAGES_QUERIES> {
    STAGED k[CHUNK][KEY_STRIDE];  // with decays per channel: times exp(G) once the pairs are done; FOLDS_BF16: see interleave
    STAGED v[CHUNK][VALUE_STRIDE];
    ChunkGates gates[PREPARED_HEADS];
};

// A head's triangular system.
struct ChunkSystem {
    // [j][i]: k_j . exp(G_j - G_i) k_i, zero for i >= j; then the inverse (ChunkPairs::invert).
    alignas(16) float matrix[CHUNK][CHUNK];
    // Of entries 8 n + t and 8 n + t + 4, [4 n + t]: the norm of k times exp(G), of both, and exp(G_last - G).
    alignas(16) float gains[CHUNK / 2][4];
};

template <bool>
struct FoldCoefficients {
    StepCoefficients coefficients[1];
};
template <>
struct FoldCoefficients<false> {
    static constexpr StepCoefficients* coefficients = nullptr;
};

struct ChunkShared : FoldCoefficients<FOLD_ANSWERS_STEP> {
    ChunkInputs inputs[INPUT_STAGES];
    alignas(16) float decay[PER_CHANNEL ? CHUNK : 1][PER_CHANNEL ? KEY_STRIDE : 4];  // exp(g), then k exp(G_last - G)
    float last[PER_CHANNEL ? KEY_STRIDE : 4];                                         // exp(G_last) per channel
    ChunkSystem systems[PREPARED_HEADS];
    float qk[STAGES_QUERIES ? CHUNK : 1][PAIR_STRIDE];  // [j][i]: q_j . exp(G_j - G_i) k_i, zero for i > j
    float k_norm[CHUNK], q_norm[CHUNK];  // what k and q are to be multiplied by
    alignas(16) float query[FOLD_ANSWERS ? KEY_PADDED : 4];  // of the only token, finished
};

struct Chunk {
    const Work& w;
    ChunkShared& shared;
    bool appends;             // tokens are appended to the ring in this pass
    int thread;               // threadIdx.x
    float next_g, next_beta;  // of a lane of the last warp: what its entry of the chunk on its way has in memory

    __device__ int warp() const { return thread / 32; }
    __device__ int lane() const { return thread % 32; }
    __device__ int g() const { return lane() / 4; }
    __device__ int t() const { return lane() % 4; }

    // ---- staging; rows behind the last entry are zero, with a decay of one ------------------------------------------------

    __device__ void request(ChunkInputs& in, int from, int count) {
        if constexpr (AHEAD) request_gates(from, count);
        const int at = thread / ENTRY_LANES, part = thread % ENTRY_LANES;
        const int token = from + at - w.row.history(), row = w.history_row(from + at);
        const bool exists = at < count, is_token = token >= 0;
        if constexpr (NARROW) {
            const void* k = is_token ? w.k(token) : static_cast<const void*>(w.t.ring_k + w.ring_k_at(row));
            const ACT* q = w.q(is_token ? token : 0);
#pragma unroll
            for (int c = KEY_PIECE * part; c < KEY_DIM; c += KEY_PIECE * ENTRY_LANES)
#pragma unroll
                for (int n = c; n < c + KEY_PIECE; n += 8) {
                    copy_16_bytes(&in.k[at][n], static_cast<const STAGED*>(k) + n, exists);
                    if constexpr (STAGES_QUERIES) copy_16_bytes(&in.q[at][n], q + n, exists && is_token);
                }
            request_values(in, from, count);
        } else if (is_token) {
            copy_converted(in, at, part, exists, w.k(token), w.q(token), w.v(token));
            if constexpr (PER_CHANNEL) stage_decays(at, part, exists, token);
        } else {
            const ACT* no_queries = nullptr;
            copy_converted(in, at, part, exists, w.t.ring_k + w.ring_k_at(row), no_queries, w.t.ring_v + w.ring_v_at(row));
            if constexpr (PER_CHANNEL) stage_ring_decays(at, part, exists, row);
        }
    }

    // 16-bit values alone.
    __device__ void request_values(ChunkInputs& in, int from, int count) const {
        const int at = thread / ENTRY_LANES, part = thread % ENTRY_LANES;
        const int token = from + at - w.row.history();
        const void* v = token >= 0 ? w.v(token) : static_cast<const void*>(w.t.ring_v + w.ring_v_at(w.history_row(from + at)));
#pragma unroll
        for (int r = 8 * part; r < SLICE; r += 8 * ENTRY_LANES) copy_16_bytes(&in.v[at][r], static_cast<const STAGED*>(v) + r, at < count);
    }

    // Of every 16 columns, 4 t and 4 t + 1 (t = 0 ... 3) come first, and then the others, so that a lane of an accumulator of
    // either half has four neighbours. By the threads that requested them, once they have arrived.
    __device__ void interleave(ChunkInputs& in) const {
        const int at = thread / ENTRY_LANES, part = thread % ENTRY_LANES;
#pragma unroll
        for (int c = KEY_PIECE * part; c < KEY_DIM; c += KEY_PIECE * ENTRY_LANES) {
            uint4* words = reinterpret_cast<uint4*>(&in.k[at][c]);
            const uint4 first = words[0], last = words[1];
            words[0] = {first.x, first.z, last.x, last.z};
            words[1] = {first.y, first.w, last.y, last.w};
        }
    }

    template <typename K, typename V>
    __device__ void copy_converted(ChunkInputs& in, int at, int part, bool exists, const K* k, const ACT* q, const V* v) {
        float squares[2] = {};
#pragma unroll
        for (int c = 4 * part; c < KEY_DIM; c += 4 * ENTRY_LANES) {
            float keys[4] = {}, queries[4] = {};
            if (exists) load_vector<4>(k + c, keys);
            if (exists && q) load_vector<4>(q + c, queries);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                squares[0] = fmaf(keys[e], keys[e], squares[0]);
                squares[1] = fmaf(queries[e], queries[e], squares[1]);
            }
            store_vector<4>(&in.k[at][c], keys);
            if constexpr (STAGES_QUERIES) store_vector<4>(&in.q[at][c], queries);
        }
#pragma unroll
        for (int r = 4 * part; r < SLICE; r += 4 * ENTRY_LANES) {
            float values[4] = {};
            if (exists) load_vector<4>(v + r, values);
            store_vector<4>(&in.v[at][r], values);
        }
        sum_neighbours(squares);
        shared.k_norm[at] = rsqrtf(squares[0] + NORM_EPSILON);
        shared.q_norm[at] = rsqrtf(squares[1] + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
    }
    // Sums over an entry's threads, of which some entries' may take another branch.
    __device__ static void sum_neighbours(float (&sums)[2]) {
        const u32 mask = ((1ull << ENTRY_LANES) - 1) << (threadIdx.x % 32 / ENTRY_LANES * ENTRY_LANES);
#pragma unroll
        for (int offset = ENTRY_LANES / 2; offset; offset /= 2)
#pragma unroll
            for (int i = 0; i < 2; ++i) sums[i] += __shfl_xor_sync(mask, sums[i], offset);
    }

    // exp(g) of a token's or ring row's channels.
    __device__ void stage_decays(int at, int part, bool exists, int token) {
        const float rate = w.decay_rate();
        const ACT* logits = w.t.gate + w.token(token) * w.t.gate_stride + w.gate_at(0);
#pragma unroll 2
        for (int c = 4 * part; c < KEY_DIM; c += 4 * ENTRY_LANES) {
            float g[4] = {}, bias[4];
            if (exists) {
                load_vector<4>(logits + c, g);
                load_vector<4>(w.t.dt_bias + w.gate_at(c), bias);
#pragma unroll
                for (int e = 0; e < 4; ++e) g[e] = Work::log_decay(rate, g[e] + bias[e]);
                if (appends && w.leads_head()) store_vector<4>(w.t.ring_g_out + w.ring_g_at(w.append_row(token)) + c, g);
            }
            store_decays(at, c, g);
        }
    }
    __device__ void stage_ring_decays(int at, int part, bool exists, int row) {
#pragma unroll
        for (int c = 4 * part; c < KEY_DIM; c += 4 * ENTRY_LANES) {
            float g[4] = {};
            if (exists) load_vector<4>(w.t.ring_g + w.ring_g_at(row) + c, g);
            store_decays(at, c, g);
        }
    }
    __device__ void store_decays(int at, int c, float (&g)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) g[e] = expf(g[e]);
        store_vector<4>(&shared.decay[PER_CHANNEL ? at : 0][c], g);
    }

    // A lane an entry of a head in the last warp: the scalars, in memory and as the chunk needs them.
    __device__ bool has_gates() const { return warp() == WARPS - 1 && lane() < PREPARED_HEADS * CHUNK; }
    __device__ Work work_of_gates() const { return PREPARED_HEADS > 1 ? w.of_head(lane() / CHUNK) : w; }
    __device__ void request_gates(int from, int count) {
        const int at = lane() % CHUNK, token = from + at - w.row.history(), row = w.history_row(from + at);
        if (!has_gates() || at >= count) return;
        const Work own = work_of_gates();
        next_beta = token < 0 ? own.t.ring_beta[own.ring_beta_at(row)] : own.beta_logit(token);
        if constexpr (!PER_CHANNEL) next_g = token < 0 ? own.t.ring_g[own.ring_g_at(row)] : own.decay_logit(token, 0);
    }
    __device__ void finish_gates(ChunkInputs& in, int from, int count) {
        if (warp() != WARPS - 1) return;
        const int at = lane() % CHUNK, token = from + at - w.row.history();
        ChunkGates& gates = in.gates[PREPARED_HEADS > 1 ? lane() / CHUNK : 0];
        float g = 0.0f, beta = 0.0f;
        if (has_gates() && at < count) {
            const Work own = work_of_gates();
            g = PER_CHANNEL ? 0.0f : token < 0 ? next_g : own.log_decay(next_g, 0);
            beta = token < 0 ? next_beta : own.beta(next_beta);
            if (token >= 0 && appends && own.leads_head()) {
                own.t.ring_beta_out[own.ring_beta_at(own.append_row(token))] = beta;
                if constexpr (!PER_CHANNEL) own.t.ring_g_out[own.ring_g_at(own.append_row(token))] = g;
            }
        }
        if constexpr (!PER_CHANNEL) {
            double sum = g;
#pragma unroll
            for (int offset = 1; offset < CHUNK; offset *= 2) {
                const double other = __shfl_up_sync(~0u, sum, offset, CHUNK);
                if (at >= offset) sum += other;
            }
            const double last = __shfl_sync(~0u, sum, CHUNK - 1, CHUNK);
            if (has_gates()) {
                gates.log_decay[at] = sum;
                gates.from_start[at] = expf(float(sum));
                gates.to_end[at] = expf(float(last - sum));
            }
        }
        if (has_gates()) gates.beta[at] = beta;
    }

    // The chunk's tokens to the ring, by the threads that staged them.
    __device__ void append(const ChunkInputs& in, int from, int count) const {
        const int at = thread / ENTRY_LANES, part = thread % ENTRY_LANES;
        const int token = from + at - w.row.history();
        if (!appends || at >= count || token < 0) return;
        const int row = w.append_row(token);
        float x[4];
        if (w.leads_key_head())
            for (int c = 4 * part; c < KEY_DIM; c += 4 * ENTRY_LANES) {
                load_vector<4>(&in.k[at][c], x);
                store_vector<4>(w.t.ring_k_out + w.ring_k_at(row) + c, x);
            }
        for (int r = 4 * part; r < SLICE; r += 4 * ENTRY_LANES) {
            load_vector<4>(&in.v[at][r], x);
            store_vector<4>(w.t.ring_v_out + w.ring_v_at(row) + r, x);
        }
    }
};
