// The delta rule in chunks of up to 16 entries on tensor cores, with a tile of the state in registers: folds the ring and takes
// the step's tokens, of which a prefill may have any number.
//
// Within a chunk, with G_j the log decay from its start through entry j (a vector where decays are per channel):
//
//     r_j = beta_j (v_j - S0 (exp(G_j) k_j))
//     u_j = r_j - beta_j sum_{i<j} (k_j . exp(G_j - G_i) k_i) u_i                                  one triangular system
//     o_j = S0 (exp(G_j) q_j) + sum_{i<=j} (q_j . exp(G_j - G_i) k_i) u_i
//     S   = S0 diag(exp G_last) + sum_j u_j (exp(G_last - G_j) k_j)^T
//
// No exponent is above zero, whatever the gates are. The state is float32 throughout. Products split their operands into two
// tf32 parts and leave out the product of the lower ones, and their sums are added to the state in float32, so that folds do
// not drift. bfloat16 keys meet all of u, in three bfloat16 parts.
//
// A warp holds 16 value rows of the state and needs no other warp once a chunk is prepared. Lane 4 g + t has rows g and
// g + 8 and, of every 16 columns, columns 4 t + 0 ... 3. As mma accumulators these are two blocks, of the even and of the odd
// columns: column c of block b is column 2 c + b. As an operand the same registers contract over columns. Of every 8
// entries, an accumulator's columns 2 t and 2 t + 1 are entries t and t + 4, which makes it an operand again.
#pragma once
#include "delta_tile_entries.cuh"
#include "ptx/bulk_copy.cuh"

// A tile of a float32 state in shared memory has the units of 16 bytes of each row in another order, so that neither a lane's columns
// of two rows nor a unit of eight rows meet in a bank; rows of 16-bit states are further apart instead.
constexpr bool STAGED_IN_TURN = sizeof(STATE) == 4;
constexpr int STAGED_PITCH = KEY_DIM + (STAGED_IN_TURN ? 0 : 16);  // elements from row to row
__device__ __forceinline__ int staged_turn(int row) { return STAGED_IN_TURN ? (row & 1) << 2 | (row >> 1 & 3) : 0; }
__device__ __forceinline__ int staged_column(int row, int column) { return column ^ 4 * staged_turn(row); }

// ANSWERS: outputs are wanted. SHARED: the state passes through shared memory (delta_fold.cuh).
template <bool ANSWERS, bool SHARED>
struct ChunkTile : TileEntries {
    // A chunk needs the state twice, for its products and for its update. What is not held is loaded again for the latter, from
    // shared memory or the L2 cache, which leaves registers to more blocks.
    static constexpr bool IN_PARTS = SHARED || ONE_CHUNK;
    // Pairs of columns that a thread holds at a time.
    static constexpr int HELD = SHARED ? 1 : IN_PARTS && PAIRS > 1 ? PAIRS / 2 : PAIRS > 0 ? PAIRS : 1;

    bool prepares;  // nobody has prepared the chunks
    STATE* staged = nullptr;  // the tile in shared memory
    bool holds = false;       // whether there is something in it
    float S[HELD][2][4];
    float largest = 0.0f;  // magnitude of what the thread has stored, for nvfp4

    // Whether the warp's rows exist.
    __device__ bool active() const { return first + 16 * warp() < min(SLICE, first + TILE_VALUES); }
    __device__ bool next_active() const { return 16 * warp() < TILE_VALUES && first + TILE_VALUES + 16 * warp() < SLICE; }

    // The lane's first row in shared memory, from which its columns of pair p are 16 p elements away if p is even, or if it is odd.
    __device__ STATE* own_staged(int p) const {
        const int turn = staged_turn(g()), turned = 16 * (turn / 4);
        return staged + (16 * warp() + g()) * STAGED_PITCH + 4 * (t() ^ turn % 4) + (p % 2 ? -turned : turned);
    }

    // HELD pairs from pair `from` on.
    __device__ void load_state(int from) {
        if ((SHARED ? holds : w.row.folded > 0) && active()) {
            const STATE* state = (SHARED ? own_staged(from) : w.t.state + w.state_at(row()) + 4 * t()) + 16 * from;
            constexpr int BELOW = 8 * (SHARED ? STAGED_PITCH : KEY_DIM);
#pragma unroll
            for (int p = 0; p < HELD; ++p)
#pragma unroll
                for (int half = 0; half < 2; ++half) load_vector<4>(state + half * BELOW + 16 * p, S[p][half]);
        } else {
#pragma unroll
            for (int n = 0; n < 8 * HELD; ++n) S[n / 8][n / 4 % 2][n % 4] = 0.0f;
        }
    }
    // Four columns of the checkpoint with one access, which the compiler does not find in every case.
    __device__ static void store_four(STATE* to, const float (&x)[4]) {
        vec<STATE, 4> stored;
        store_vector<4>(stored.v, x);
        const u32* words = reinterpret_cast<const u32*>(stored.v);
        if constexpr (sizeof(STATE) == 4)
            store_16_bytes(to, {words[0], words[1], words[2], words[3]});
        else
            store_8_bytes(to, {words[0], words[1]});
    }
    // To the checkpoint, and to shared memory, if the state is there and has a copy.
    __device__ void store_state(int from) {
        if (!active()) return;
        const auto rows = [](int pitch, STATE* first, int n) { return first + n % 2 * 8 * pitch + n / 2 * 16; };
        if constexpr (SHARED && COPIED)
#pragma unroll
            for (int n = 0; n < 2 * HELD; ++n) store_vector<4>(rows(STAGED_PITCH, own_staged(from) + 16 * from, n), S[n / 2][n % 2]);
        STATE* state = w.t.state_out + w.state_at(row()) + 4 * t() + 16 * from;
#pragma unroll
        for (int n = 0; n < 2 * HELD; ++n) store_four(rows(KEY_DIM, state, n), S[n / 2][n % 2]);
        if constexpr (READ_BITS == 4)
#pragma unroll
            for (int n = 0; n < 8 * HELD; ++n) largest = larger_magnitude(largest, S[n / 8][n / 4 % 2][n % 4]);
    }

    // Adds sums over the key columns at hand of S0 with N blocks of 8 staged keys or queries, of which the first `count` rows
    // count.
    template <int N>
    __device__ void multiply_state(const STAGED (*rows)[KEY_STRIDE], int count, int from, Sum (&sums)[N]) const {
        const STAGED* row = rows[column_entry()] + 4 * t() + 16 * from;
#pragma unroll
        for (int p = 0; p < HELD; ++p) {
            float x[N][4];
#pragma unroll
            for (int n = 0; n < N; ++n)
                if (8 * n < count) load_vector<4>(row + 8 * n * KEY_STRIDE + 16 * p, x[n]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Split a(S[p][0][half], S[p][1][half], S[p][0][half + 2], S[p][1][half + 2]);
#pragma unroll
                for (int n = 0; n < N; ++n)
                    if (8 * n < count) sums[n].template add<NARROW>(a, x[n][half], x[n][half + 2]);
            }
        }
    }

    // o of the chunk's entries from first_output on, which are tokens. `stored`: products of S0 with the only ones, if they
    // have been formed.
    __device__ void write_outputs(const ChunkInputs& in, int from, int count, int first_output, Sum (&stored)[1],
                                  const float (&u)[BLOCKS][4]) const {
#pragma unroll
        for (int m = 0; m < BLOCKS; ++m) {
            if (8 * m >= count || 8 * m + 8 <= first_output) continue;
            if constexpr (!IN_PARTS) {
                stored[0] = {};
                multiply_state(in.q + 8 * m, 8, 0, stored);
            }
            Sum pairs = {};
#pragma unroll
            for (int n = 0; n <= m; ++n) add_entries(pairs, u[n], shared.qk[8 * m + column_entry()] + 8 * n);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int j = 8 * m + element_entry(e);
                if (j < first_output || j >= count) continue;
                const float decay = PER_CHANNEL ? 1.0f : in.gates[0].from_start[j];
                const float o = shared.q_norm[j] * fmaf(decay, stored[0].get(e), pairs.get(e));
                w.o(from + j - w.row.history())[row() + 8 * (e / 2)] = from_float<ACT>(o);
            }
        }
    }

    __device__ void update_state(const ChunkInputs& in, int count, float (&u)[BLOCKS][4]) {
        decay_to_end(u);
        Parts<3> parts[4];
        if constexpr (BF16_KEYS) split_updates(u, parts);
#pragma unroll SHARED ? 2 : PAIRS
        for (int from = PAIRS - HELD; from >= 0; from -= HELD) {  // backwards: the last columns are at hand
            if (SHARED || from < PAIRS - HELD) load_state(from);
            if constexpr (PER_CHANNEL) decay_channels(from);
            if constexpr (BF16_KEYS)
                add_updates(in, from, parts);
            else
#pragma unroll
                for (int n = 0; n < BLOCKS; ++n)
                    if (8 * n < count) add_updates(in, n, from, u[n]);
            if constexpr (IN_PARTS) store_state(from);
        }
    }
    __device__ void decay_channels(int from) {
#pragma unroll
        for (int p = 0; p < HELD; ++p) {
            float decay[4];
            load_vector<4>(&shared.last[16 * (from + p) + 4 * t()], decay);
#pragma unroll
            for (int n = 0; n < 8; ++n) S[p][n / 4][n % 4] *= decay[n % 4];
        }
    }
    // What block n of the updates adds to the state; the first one lets it decay, unless its channels have done so before.
    __device__ void add_updates(const ChunkInputs& in, int n, int from, const float (&u)[4]) {
        const Split a(u[0], u[2], u[1], u[3]);
        const STAGED* keys = key_updates(in) + (8 * n + t()) * KEY_STRIDE + 2 * g() + 16 * from;
#pragma unroll
        for (int p = 0; p < HELD; ++p) {
            float k[2][2];
            load_vector<2>(keys + 16 * p, k[0]);
            load_vector<2>(keys + 4 * KEY_STRIDE + 16 * p, k[1]);
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                Accumulator sum = {};  // the small products first
                add_lower<NARROW>(sum, a, k[0][b], k[1][b]);
                add_upper<NARROW>(sum, a, k[0][b], k[1][b]);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& x = S[p][e / 2][b + 2 * (e % 2)];
                    x = fmaf(x, PER_CHANNEL || n > 0 ? 1.0f : chunk_decay(in), sum.v[e]);
                }
            }
        }
    }
    // The same with bfloat16 keys.
    __device__ void add_updates(const ChunkInputs& in, int from, const Parts<3> (&u)[4]) {
        const float decay = chunk_decay(in);
        const STAGED* keys = &in.k[t()][2 * g() + 16 * from];
#pragma unroll
        for (int p = 0; p < HELD; ++p) {
            u32 k[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) k[i] = *reinterpret_cast<const u32*>(keys + 4 * i * KEY_STRIDE + 16 * p);
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const u32 halves = b ? 0x7632 : 0x5410;
                const Accumulator sum = multiply_updates(u, __byte_perm(k[0], k[1], halves), __byte_perm(k[2], k[3], halves));
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& x = S[p][e / 2][b + 2 * (e % 2)];
                    x = fmaf(x, decay, sum.v[e]);
                }
            }
        }
    }
    __device__ const STAGED* key_updates(const ChunkInputs& in) const {
        return PER_CHANNEL ? reinterpret_cast<const STAGED*>(shared.decay[0]) : in.k[0];
    }

    __device__ void prepare(Chunk& chunk, int stage, int from, int to, int all) {
        ChunkInputs& in = shared.inputs[stage];
        chunk.thread = thread;
        if constexpr (!AHEAD) {
            __syncthreads();
            chunk.request(in, from, to - from);
            chunk.request_gates(from, to - from);
        }
        prepare_requested<0>(chunk, stage, from, to, all);
    }
    // LATER: groups of copies requested after the chunk's inputs, which need not have arrived.
    template <int LATER>
    __device__ void prepare_requested(Chunk& chunk, int stage, int from, int to, int all) {
        ChunkInputs& in = shared.inputs[stage];
        const int count = to - from;
        chunk.thread = thread;
        chunk.finish_gates(in, from, count);
        wait_for_copies<LATER>();
        if constexpr (FOLDS_BF16) chunk.interleave(in);
        __syncthreads();
        if (AHEAD && to < all) chunk.request(shared.inputs[1 - stage], to, min(CHUNK, all - to));
        chunk.append(in, from, count);
        ChunkPairs pairs{chunk, shared, in};
        const bool outputs = ANSWERS && to > w.row.history();
        if constexpr (PER_CHANNEL) {
            if (outputs)
                pairs.carry<true>(count);
            else
                pairs.carry<false>(count);
            __syncthreads();
            pairs.spread();
        } else {
            pairs.multiply(outputs);
        }
        __syncthreads();
        pairs.invert();
    }

    // What a tile in shared memory has to do with a chunk whose keys are there: their products with it ...
    __device__ void read_chunk(const ChunkInputs& in, int count, Sum (&stored)[BLOCKS]) {
#pragma unroll 1
        for (int pair = 0; pair < PAIRS; pair += HELD) {
            load_state(pair);
            multiply_state(in.k, count, pair, stored);
        }
    }
    // ... and its update, for which the inverse is there, too.
    __device__ void take_chunk(const ChunkInputs& in, int count, const Sum (&stored)[BLOCKS]) {
        thread = opaque(int(threadIdx.x));
        float u[BLOCKS][4];
        solve(in, stored, u);
        thread = opaque(thread);
        update_state(in, count, u);
    }

    __device__ void run() {
        const int history = w.row.history(), all = history + w.row.tokens;
        Chunk chunk{w, shared, first == 0 && !w.row.absorbs(), opaque(int(threadIdx.x))};
        if (AHEAD && prepares) {
            __syncthreads();
            chunk.request(shared.inputs[0], 0, min(CHUNK, all));
        }
        int stage = 0;
#pragma unroll 1
        for (int from = 0, to; from < all; from = to) {
            to = min(from + CHUNK, all);
            thread = opaque(int(threadIdx.x));
            const int count = to - from, first_output = ANSWERS ? max(history - from, 0) : count;
            if (prepares) prepare(chunk, stage, from, to, all);
            const ChunkInputs& in = shared.inputs[stage];
            Sum stored[BLOCKS] = {}, answered[1] = {};
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair += HELD) {
                if (ONE_CHUNK || from == 0) load_state(pair);
                if (!active()) continue;
                multiply_state(in.k, count, pair, stored);
                if (ONE_CHUNK && first_output < count) multiply_state(in.q + first_output / 8 * 8, 8, pair, answered);
            }
            if (prepares) __syncthreads();  // the inverse
            thread = opaque(int(threadIdx.x));
            if (active()) {
                float u[BLOCKS][4];
                solve(in, stored, u);
                if (first_output < count) write_outputs(in, from, count, first_output, answered, u);
                thread = opaque(thread);
                if (to < all || w.row.folds()) update_state(in, count, u);
            }
            if (ONE_CHUNK) return;
            stage = (stage + 1) % INPUT_STAGES;
        }
        if (w.row.folds()) store_state(0);
    }
};

// Returns the largest magnitude that the thread has stored, where nvfp4 asks for it.
template <bool ANSWERS>
__device__ __forceinline__ float chunk_step(const Work& w, ChunkShared& shared) {
    // The state travels to the L2 cache while the first chunk is prepared.
    if (threadIdx.x == 0 && w.row.folded > 0)
        prefetch_bulk(w.t.state + w.state_at(0), SLICE * KEY_DIM * int(sizeof(STATE)));
    // A single chunk serves all tiles of the slice.
    const bool single = ONE_CHUNK || w.row.history() + w.row.tokens <= CHUNK;
    float largest = 0.0f;
#pragma unroll 1
    for (int first = 0; first < SLICE; first += TILE_VALUES) {
        ChunkTile<ANSWERS, false> tile{{w, shared, first, 0}, first == 0 || !single};
        tile.run();
        largest = larger_magnitude(largest, tile.largest);
    }
    return to_float(from_float<STATE>(largest));
}
