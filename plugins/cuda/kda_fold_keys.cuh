// What a fold of Kimi Delta Attention takes from up to 16 entries alone; a warp makes it for 32 key channels.
//
// With G_i the log decays per channel from the chunk's start through entry i, n the norms of keys and
// P_ij = sum_c exp(G_ic - G_jc) k_ic k_jc (kda_pairs.cuh),
//
//     (I + A) x = diag(n beta) (v - n S0 (exp(G) k)),   A_ij = n_i^2 beta_i P_ij for i > j
//     S = S0 diag(exp G_last) + sum_j x_j (exp(G_last - G_j) k_j)^T
//
// so that x is n u. Keys that read the state lie in shared memory in two tf32 parts, those that are written in three of bfloat16. Two of
// bfloat16 are enough where the state has 16 bits, and for what reads it if it is an operand itself, of bfloat16.
#pragma once
#include "delta_read_shape.cuh"
#include "delta_tile_entries.cuh"
#include "kda_pairs.cuh"
#include "ptx/arithmetic.cuh"

// Of rows whose entries are one chunk; with several tokens, of those that take up the ring alone, since no outputs of its entries are
// wanted.
constexpr bool KDA_FOLDS = PER_CHANNEL && CHUNKED && NARROW_INPUTS && TOKENS > 0 && KEY_DIM == 32 * WARPS && SLICE <= 256;
__device__ __forceinline__ bool kda_folds(const Row& row) {
    return row.folds() && row.history() + row.tokens <= CHUNK && (TOKENS == 1 || row.tokens == 0);
}

constexpr int FOLD_PARTS = sizeof(STATE) == 2 ? 2 : 3;

// Keys in bfloat16 parts, of every 16 columns 4 t and 4 t + 1 first.
struct KeyParts {
    bf16 v[FOLD_PARTS][CHUNK][KEY_DIM + 8];

    __device__ __forceinline__ void store(int entry, int channel, const Channels<4>& x) {
        const int at = channel / 16 * 16 + channel % 16 / 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto parts = split_pair<FOLD_PARTS>(x.v[2 * half], x.v[2 * half + 1]);
#pragma unroll
            for (int p = 0; p < FOLD_PARTS; ++p) *reinterpret_cast<u32*>(&v[p][entry][at + 8 * half]) = parts.v[p];
        }
    }
};
// In tf32 parts, of every 4 columns the even ones first.
struct KeySplits {
    float v[2][CHUNK][KEY_DIM + 16];

    __device__ __forceinline__ void store(int entry, int channel, const Channels<4>& x) {
        Channels<4> upper(0.0f), lower(0.0f);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int at = c / 2 + c % 2 * 2;
            upper.v[at] = tf32_part(x.v[c]), lower.v[at] = x.v[c] - upper.v[at];
        }
        upper.store(&v[0][entry][channel]), lower.store(&v[1][entry][channel]);
    }
};
template <typename T>
struct ReadKeys {
    typedef KeySplits type;
};
template <>
struct ReadKeys<bf16> {
    typedef KeyParts type;
};

struct KdaFoldShared {
    alignas(16) ReadKeys<STATE>::type read;  // k exp(G)
    KeyParts written;                               // k exp(G_last - G)
    ACT v[CHUNK][VALUE_STRIDE];
    float decay[KEY_DIM];             // exp(G_last)
    float q[KEY_DIM];                 // of the token, as S is to be multiplied by it
    float token_g[KEY_DIM];           // its log decays
    float products[WARPS][3][8][8];   // P of every warp's channels
    float squares[CHUNK][WARPS];      // of keys
    float lower[CHUNK][CHUNK];        // A
    float inverse[CHUNK][2 * CHUNK];  // (I + A)^-1 diag(n beta): of every two columns the upper tf32 parts, then the lower ones
    float beta[CHUNK], k_norm[CHUNK];
    // What would take registers beside the state: addresses of the slice's state and of the token's output, null where there is none, and
    // whether the state must not be read.
    STATE* state;
    ACT* o;
    bool fresh;
};

// T: 16-bit, of activations and rings.
template <typename T>
struct KdaFoldKeys {
    static constexpr int CHANNELS = 4, PIECES = 2;  // of a lane: 4 t ... 4 t + 3 of 16, and pieces of 16 of its warp
    const Work& w;
    KdaFoldShared& shared;
    const int thread;  // threadIdx.x

    __device__ int warp() const { return u32(thread) / 32; }
    __device__ int lane() const { return u32(thread) % 32; }
    __device__ int entries() const { return w.row.history() + w.row.tokens; }

    // Behind it, the thread's values are on their way; behind a barrier, everything else is there but the inverse (invert).
    __device__ __forceinline__ void make() const {
        request_values();
        if (thread == 0) {
            shared.state = w.t.state_out + w.state_at(0), shared.fresh = w.row.folded == 0;
            shared.o = w.row.tokens ? w.o(0) : nullptr;
        }
        Stored stored[PIECES];
        load(stored);
        if (warp() == WARPS - 1 && lane() < CHUNK) shared.beta[lane()] = beta(lane());
        if (TOKENS == 1 && w.row.tokens) make_token();
        PairProducts products = {};
        float squares[2] = {};
#pragma unroll
        for (int n = 0; n < PIECES; ++n) make_piece(stored[n], channel(n), products, squares);
        products.store(shared.products[warp()], lane());
        sum_all<4>(squares);
        if (lane() % 4 == 0) shared.squares[lane() / 4][warp()] = squares[0], shared.squares[lane() / 4 + 8][warp()] = squares[1];
    }

    // By one warp, behind a barrier.
    __device__ __forceinline__ void invert() const {
        PairProducts products = {};
#pragma unroll
        for (int m = 0; m < WARPS; ++m) products.add(shared.products[m], lane());
        const int entry = lane() % CHUNK;
        float squares[WARPS];
        load_vector<WARPS>(shared.squares[entry], squares);
        const float norm = rsqrtf((squares[0] + squares[1]) + (squares[2] + squares[3]) + NORM_EPSILON);
        const float gain = norm * shared.beta[entry], row_gain = norm * gain;
        if (lane() < CHUNK) shared.k_norm[entry] = norm;
        const int i = lane() / 4, j = lane() % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < 3; ++tile) {
            const int row = tile == 0 ? i : 8 + i, column = tile == 2 ? 8 + j : j;
            const float of_row = __shfl_sync(~0u, row_gain, row);
            const float a[2] = {of_row * products.v[tile][0], of_row * products.v[tile][1]};
            store_vector<2>(&shared.lower[row][column], a);
        }
        __syncwarp();
        if (lane() < CHUNK) solve_column(gain);
    }

private:
    typedef Channels<CHANNELS> LaneChannels;
    // A piece's channels of entries g and g + 8 in memory: keys, and log decays of entries of the ring.
    struct Stored {
        uint2 k[2];
        float g[2][CHANNELS];
    };

    __device__ __forceinline__ int channel(int piece) const { return 32 * warp() + 16 * piece + CHANNELS * (lane() % 4); }
    __device__ __forceinline__ int entry(int r) const { return 8 * r + lane() / 4; }
    // The only token is the last entry.
    __device__ __forceinline__ bool is_token(int entry) const { return TOKENS == 1 && entry >= w.row.history(); }

    // As Chunk has it (delta_chunk_inputs.cuh).
    __device__ __forceinline__ void request_values() const {
        const int entry = thread / ENTRY_LANES, part = thread % ENTRY_LANES;
        const T* v = is_token(entry) ? w.v(0) : w.t.ring_v + w.ring_v_at(w.history_row(entry));
#pragma unroll
        for (int r = 8 * part; r < SLICE; r += 8 * ENTRY_LANES) copy_16_bytes(&shared.v[entry][r], v + r, entry < entries());
    }
    __device__ __forceinline__ void load(Stored (&stored)[PIECES]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = w.history_row(entry(r));
            const T* k = is_token(entry(r)) ? w.k(0) : w.t.ring_k + w.ring_k_at(row);
            const float* g = w.t.ring_g + w.ring_g_at(row);
#pragma unroll
            for (int n = 0; n < PIECES; ++n) {
                stored[n].k[r] = {0, 0};
#pragma unroll
                for (float& x : stored[n].g[r]) x = 0.0f;
                if (entry(r) < entries()) stored[n].k[r] = *reinterpret_cast<const uint2*>(k + channel(n));
                if (entry(r) < w.row.history()) load_vector<CHANNELS>(g + channel(n), stored[n].g[r]);
            }
        }
    }
    // The token's log decays, one channel a lane, and by the first warp its query.
    __device__ __forceinline__ void make_token() const {
        const int own = 32 * warp() + lane();
        shared.token_g[own] = w.log_decay(w.decay_logit(0, own), own);
        if (warp() == 0) {
            float q[LANE_COLS], squares[1];
            load_columns(w.q(0), lane(), q);
            squares[0] = dot(q, q);
            sum_all<32>(squares);
            const float norm = rsqrtf(squares[0] + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) q[i] *= norm;
            store_columns(shared.q, lane(), q);
        }
        __syncwarp();
    }
    __device__ __forceinline__ float beta(int entry) const {
        if (entry >= entries()) return 0.0f;
        return is_token(entry) ? w.beta(w.beta_logit(0)) : w.t.ring_beta[w.ring_beta_at(w.history_row(entry))];
    }

    // exp(g) of entry 8 r + g; one, where there is none.
    __device__ __forceinline__ LaneChannels decays(int r, const float (&stored)[CHANNELS], int channel) const {
        LaneChannels g(0.0f);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) g.v[c] = stored[c];
        if (is_token(entry(r)) && entry(r) < entries()) load_vector<CHANNELS>(&shared.token_g[channel], g.v);
#pragma unroll
        for (float& x : g.v) x = expf(x);  // errors of the approximation add up over folds
        return g;
    }
    __device__ __forceinline__ void make_piece(const Stored& stored, int channel, PairProducts& products, float (&squares)[2]) const {
        const LaneChannels keys[2] = {unpacked(stored.k[0]), unpacked(stored.k[1])};
        RunDecays<CHANNELS> runs(decays(0, stored.g[0], channel), decays(1, stored.g[1], channel));
        PairProducts of_piece = {};
#pragma unroll
        for (int b = 1; b < 8; b *= 2) {
            ChannelParts<2, CHANNELS> k;
            k.set(0, keys[0] * runs.of_boundary(0, b, lane())), k.set(1, keys[1] * runs.of_boundary(1, b, lane()));
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                Accumulator sum = {};
                k.multiply(sum, k, r);
                of_piece.keep(r, sum, b, lane());
            }
            runs.double_runs(b, lane());
        }
        ChannelParts<3, CHANNELS> across;
        across.set(0, keys[0] * runs.behind[0]), across.set(1, keys[1] * runs.until[1]);
        Accumulator sum = {};
        across.multiply(sum, across, 0);
        of_piece.keep_across(sum);
        products.add(of_piece);
        runs.join(lane());
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            squares[r] += dot(keys[r].v, keys[r].v);
            shared.read.store(entry(r), channel, keys[r] * runs.until[r]);
            shared.written.store(entry(r), channel, keys[r] * runs.behind[r]);
        }
        if (lane() / 4 == 7) runs.until[1].store(&shared.decay[channel]);
    }
    __device__ __forceinline__ static LaneChannels unpacked(const uint2& stored) {
        const u32 words[2] = {stored.x, stored.y};
        return LaneChannels(words);
    }

    // The lane's column of the inverse, times what the gains leave of values.
    __device__ __forceinline__ void solve_column(float gain) const {
        float* column = &shared.inverse[0][lane() / 2 * 4 + lane() % 2];
        float x[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            x[i] = i == lane() ? gain : 0.0f;
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                float a[4];
                load_vector<4>(&shared.lower[i][j], a);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (j + e < i) x[i] = fmaf(-a[e], x[j + e], x[i]);
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
