// What a fold of Kimi Delta Attention takes from up to 16 entries alone; a thread makes it for one key channel.
//
// With G_i the log decays per channel from the chunk's start through entry i, n the norms of keys and
// P_ij = sum_c exp(G_ic - G_jc) k_ic k_jc (kda_key_planes.cuh),
//
//     (I + A) x = diag(n beta) (v - n S0 (exp(G) k)),   A_ij = n_i^2 beta_i P_ij for i > j
//     S = S0 diag(exp G_last) + sum_j x_j (exp(G_last - G_j) k_j)^T
//
// so that x is n u. Keys that read the state lie in shared memory in two tf32 parts, those that are written in three of bfloat16. Two of
// bfloat16 are enough where the state has 16 bits, and for what reads it if it is an operand itself, of bfloat16.
#pragma once
#include "delta_read_shape.cuh"
#include "delta_tile_entries.cuh"
#include "kda_key_planes.cuh"
#include "kda_step_answer.cuh"
#include "ptx/async_copy.cuh"

// Of rows whose entries are one chunk; with several tokens, of those that take up the ring alone, since no outputs of its entries are
// wanted.
constexpr bool KDA_FOLDS = PER_CHANNEL && CHUNKED && NARROW_INPUTS && TOKENS > 0 && KEY_DIM == 32 * WARPS && SLICE <= 256;
__device__ __forceinline__ bool kda_folds(const Row& row) {
    return row.folds() && row.history() + row.tokens <= CHUNK && (TOKENS == 1 || row.tokens == 0);
}

constexpr int LEVELS = 4;  // bits of an entry's index
// Keys that read the state are bfloat16, as it is.
constexpr bool READS_PLANES = same_type<STATE, bf16>::value;

// Verify steps that take up the ring are answered by the new checkpoint, if x has room beside what the fold needs: of bfloat16 states in
// the place of keys in tf32 parts.
constexpr bool KDA_FOLD_ANSWERS_STEP = KDA_VERIFIES && !COPIED && (READS_PLANES || READ_TOKENS <= 8);
template <bool>
struct KdaStepShared {
    float kept_x[READS_PLANES ? 1 : READ_TOKENS][X_PITCH];
    ValueCoefficients coefficients[1];
};
template <>
struct KdaStepShared<false> {
    static constexpr float (*kept_x)[X_PITCH] = nullptr;
    static constexpr ValueCoefficients* coefficients = nullptr;
};

struct KdaFoldShared : KdaStepShared<KDA_FOLD_ANSWERS_STEP> {
    // At first the log decays of entries, and as ACT their keys; then k exp(G) in tf32 parts, of every 4 columns the even ones first.
    alignas(16) float splits[2][CHUNK][X_PITCH];
    KeyPlanes planes[READS_PLANES ? 2 : 1];  // k exp(G_last - G), and k exp(G)
    ACT v[CHUNK][VALUE_STRIDE];
    float decay[KEY_DIM];             // exp(G_last)
    float q[TOKENS == 1 ? KEY_DIM : 4];  // of the token, as S is to be multiplied by it
    float products[WARPS][LEVELS][8][8];  // P of every warp's channels, of entries that differ first in each bit
    float squares[CHUNK][WARPS];      // of keys
    float lower[LEVELS][8][8];        // A, as products are
    float inverse[CHUNK][2 * CHUNK];  // (I + A)^-1 diag(n beta): of every two columns the upper tf32 parts, then the lower ones
    float beta[CHUNK], k_norm[CHUNK];
    // What would take registers beside the state: addresses of the slice's state, of the first token's output, null if a single token wants
    // none, and of its values, and the row's number.
    STATE* state;
    ACT* o;
    const ACT* token_v;
    int number;

    // Of the step's tokens; of bfloat16 states once keys are in planes.
    __device__ float (*x())[X_PITCH] { return READS_PLANES ? splits[0] : kept_x; }
    __device__ const float (*x() const)[X_PITCH] { return READS_PLANES ? splits[0] : kept_x; }
};

// T: 16-bit, of activations and rings.
template <typename T>
struct KdaFoldKeys {
    const Work& w;
    KdaFoldShared& shared;
    const int thread;  // threadIdx.x, and the thread's channel

    __device__ int warp() const { return u32(thread) / 32; }
    __device__ int lane() const { return u32(thread) % 32; }
    __device__ int entries() const { return w.row.history() + w.row.tokens; }

    // Behind it, the thread's values are on their way; behind a barrier, everything else is there but the inverse (invert).
    __device__ __forceinline__ void make() const {
        request_keys();
        end_copies();
        request_values();
        end_copies();
        if (thread == 0) {
            shared.state = w.t.state_out + w.state_at(0);
            shared.o = TOKENS > 1 || w.row.tokens ? w.o(0) : nullptr;
            shared.token_v = w.v(0);
            shared.number = w.row.number;
        }
        if (warp() == WARPS - 1 && lane() < CHUNK) shared.beta[lane()] = beta(lane());
        if (TOKENS == 1 && w.row.tokens) make_token();
        wait_for_copies<1>();
        __syncwarp();
        square();
        ChannelRuns runs;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            runs.k[i] = to_float(keys(i)[lane()]);
            runs.until[i] = expf(shared.splits[0][i][thread]);  // errors of an approximation would add up over folds
            runs.behind[i] = 1.0f;
        }
        multiply<0, 2, EXACT_PARTS<T>>(runs);
        multiply<1, 2, 2>(runs);
        multiply<2, 2, 2>(runs);
        multiply<3, FOLD_PARTS, FOLD_PARTS>(runs);
        __syncwarp();
        shared.decay[thread] = runs.until[CHUNK - 1];
        store_keys(shared.planes[0], runs.k, runs.behind);
        if constexpr (READS_PLANES)
            store_keys(shared.planes[1], runs.k, runs.until);
        else
            store_splits(runs);
    }

    // By one warp, behind a barrier.
    __device__ __forceinline__ void invert() const {
        const int entry = lane() % CHUNK, g = lane() / 4, t = lane() % 4;
        float squares[WARPS];
        load_vector<WARPS>(shared.squares[entry], squares);
        const float norm = rsqrtf((squares[0] + squares[1]) + (squares[2] + squares[3]) + NORM_EPSILON);
        const float gain = norm * shared.beta[entry], row_gain = norm * gain;
        if (lane() < CHUNK) shared.k_norm[entry] = norm;
#pragma unroll
        for (int level = 0; level < LEVELS; ++level) {
            float sums[WARPS][2];
#pragma unroll
            for (int m = 0; m < WARPS; ++m) load_vector<2>(&shared.products[m][level][g][2 * t], sums[m]);
            const float of_row = __shfl_sync(~0u, row_gain, ChannelRuns::entry(g, 1 << level, true));
            float a[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) a[e] = of_row * ((sums[0][e] + sums[1][e]) + (sums[2][e] + sums[3][e]));
            store_vector<2>(&shared.lower[level][g][2 * t], a);
        }
        __syncwarp();
        if (lane() < CHUNK) solve_column(gain);
    }

private:
    // The only token is the last entry.
    __device__ __forceinline__ bool is_token(int entry) const { return TOKENS == 1 && w.row.tokens && entry == w.row.history(); }
    // The warp's channels of an entry's key as it is stored.
    __device__ __forceinline__ T* keys(int entry) const { return reinterpret_cast<T*>(&shared.splits[1][entry][32 * warp()]); }

    // The warp's channels of keys, and of the ring's log decays. Behind the entries are zeros.
    __device__ __forceinline__ void request_keys() const {
        const T* ring_k = w.t.ring_k + w.ring_k_at(0) + 32 * warp();
        const float* ring_g = w.t.ring_g + w.ring_g_at(0) + 32 * warp();
#pragma unroll
        for (int r = 0; r < CHUNK; r += 8) {
            const int entry = r + lane() / 4, column = lane() % 4 * 8;
            const T* k = is_token(entry) ? w.k(0) + 32 * warp() : ring_k + w.history_row(entry) * KEY_DIM;
            copy_16_bytes(keys(entry) + column, k + column, entry < entries());
        }
#pragma unroll
        for (int r = 0; r < CHUNK; r += 4) {
            const int entry = r + lane() / 8, column = lane() % 8 * 4;
            if (is_token(entry)) continue;
            const float* g = ring_g + w.history_row(entry) * KEY_DIM;
            copy_16_bytes(&shared.splits[0][entry][32 * warp() + column], g + column, entry < w.row.history());
        }
    }
    // As Chunk has it (delta_chunk_inputs.cuh).
    __device__ __forceinline__ void request_values() const {
        const int entry = thread / ENTRY_LANES, part = thread % ENTRY_LANES;
        const T* v = is_token(entry) ? w.v(0) : w.t.ring_v + w.ring_v_at(w.history_row(entry));
#pragma unroll
        for (int r = 8 * part; r < SLICE; r += 8 * ENTRY_LANES) copy_16_bytes(&shared.v[entry][r], v + r, entry < entries());
    }
    // The token's log decay, and by the first warp its query.
    __device__ __forceinline__ void make_token() const {
        shared.splits[0][w.row.history()][thread] = w.log_decay(w.decay_logit(0, thread), thread);
        if (warp() == 0) {
            float q[LANE_COLS];
            load_columns(w.q(0), lane(), q);
            finish_query(q);
            store_columns(shared.q, lane(), q);
        }
    }
    __device__ __forceinline__ float beta(int entry) const {
        if (entry >= entries()) return 0.0f;
        return is_token(entry) ? w.beta(w.beta_logit(0)) : w.t.ring_beta[w.ring_beta_at(w.history_row(entry))];
    }

    // Of keys over the warp's channels: what products of entries with themselves have in their diagonals.
    __device__ __forceinline__ void square() const {
        Accumulator first = {}, second = {};  // of entries g in rows g, and of entries 8 + g in rows 8 + g
#pragma unroll
        for (int c = 0; c < 32; c += 16) {
            const Matrices k = load_matrices(keys(lane() % 16) + c + lane() / 16 * 8);
            mma_16bit<T>(first, k.v, k.v[0], k.v[2]);
            mma_16bit<T>(second, k.v, k.v[1], k.v[3]);
        }
        const int g = lane() / 4;
        if (g / 2 != lane() % 4) return;
        shared.squares[g][warp()] = g % 2 ? first.v[1] : first.v[0];
        shared.squares[g + 8][warp()] = g % 2 ? second.v[3] : second.v[2];
    }

    // Of entries that differ first in bit LEVEL, in parts; then runs are twice as long. Planes of the warp's written keys, which come
    // later, have room.
    template <int LEVEL, int PARTS, int OTHERS>
    __device__ __forceinline__ void multiply(ChannelRuns& runs) const {
        constexpr int B = 1 << LEVEL;
        KeyPlane* planes = shared.planes[0].v[warp()][0];
        float x[8];
        __syncwarp();
        runs.of_boundary(B, true, x);
        store_planes<PARTS>(x, planes, 1, lane());
        runs.of_boundary(B, false, x);
        store_planes<OTHERS>(x, planes + PARTS, 1, lane());
        __syncwarp();
        float products[2];
        multiply_planes<PARTS, OTHERS>(planes, lane(), products);
        store_vector<2>(&shared.products[warp()][LEVEL][lane() / 4][lane() % 4 * 2], products);
        runs.double_runs(B);
    }

    __device__ __forceinline__ void store_keys(KeyPlanes& to, const float (&k)[CHUNK], const float (&decays)[CHUNK]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(k[8 * half + i], decays[8 * half + i]);
            store_planes<FOLD_PARTS>(x, &to.v[warp()][0][half], 2, KeyPlanes::row(lane()));
        }
    }
    __device__ __forceinline__ void store_splits(const ChannelRuns& runs) const {
        const int column = thread / 4 * 4 + thread % 4 / 2 + thread % 2 * 2;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const float x = __fmul_rn(runs.k[i], runs.until[i]), upper = tf32_part(x);
            shared.splits[0][i][column] = upper, shared.splits[1][i][column] = x - upper;
        }
    }

    // The lane's column of the inverse, times what the gains leave of values.
    __device__ __forceinline__ void solve_column(float gain) const {
        float* column = &shared.inverse[0][lane() / 2 * 4 + lane() % 2];
        float x[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            x[i] = i == lane() ? gain : 0.0f;
#pragma unroll
            for (int level = LEVELS - 1; level >= 0; --level) {
                const int b = 1 << level, run = i / (2 * b);  // of 2 b entries
                if (!(i & b)) continue;
#pragma unroll
                for (int j = 0; j < b; j += 4) {
                    float a[4];
                    load_vector<4>(&shared.lower[level][run * b + i % b][(run * b + j) / 4 * 4], a);
#pragma unroll
                    for (int e = 0; e < 4 && e < b; ++e) x[i] = fmaf(-a[run * b % 4 + e], x[2 * run * b + j + e], x[i]);
                }
            }
        }
        // Behind all loads, which the compiler would not move ahead of them.
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const float upper = tf32_part(x[i]);
            column[i * 2 * CHUNK] = upper, column[i * 2 * CHUNK + 2] = x[i] - upper;
        }
    }
};
