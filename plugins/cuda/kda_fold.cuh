// The fold of Kimi Delta Attention with 16-bit inputs, of rows whose entries are one chunk, on tensor cores (formulas: kda_fold_keys.cuh).
//
// A warp holds 16 value rows of the state in registers, while it needs no other warp. Lane 4 g + t has rows g and g + 8 and, of every 16
// columns, columns 4 t + 0 ... 3, which are two accumulators: of columns 4 t and 4 t + 1, and of the others. What is taken up of a row is
// followed by what another tile has in its place. The output of a token that is taken up is S q; a step that finds the ring folded is
// answered from the tile behind it (kda_step_answer.cuh).
#pragma once
#include "kda_fold_keys.cuh"

// Four neighbouring columns of the state, as stored.
template <typename T>
struct StateColumns {
    static constexpr int WORDS = sizeof(T);
    u32 words[WORDS];

    __device__ __forceinline__ void load(const T* from) {
        const auto stored = *reinterpret_cast<const vec<u32, WORDS>*>(from);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) words[i] = stored.v[i];
    }
    __device__ __forceinline__ void set(const float (&x)[4]) {
        if constexpr (WORDS == 4)
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(x[i]);
        else
#pragma unroll
            for (int i = 0; i < 2; ++i) words[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
    }
    __device__ __forceinline__ void store(T* to) const {
        vec<u32, WORDS> stored;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) stored.v[i] = words[i];
        *reinterpret_cast<vec<u32, WORDS>*>(to) = stored;
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32& word : words) word = 0;
    }
    __device__ __forceinline__ float get(int column) const {
        if constexpr (WORDS == 4)
            return __uint_as_float(words[column]);
        else
            return half_to_float<T>(words[column / 2], column % 2);
    }
};

// ANSWERS: of the token that is taken up, or of a step whose x the fold has.
template <bool ANSWERS>
struct KdaFoldTile {
    static constexpr bool ANSWERS_TOKEN = ANSWERS && TOKENS == 1, ANSWERS_STEP = ANSWERS && TOKENS > 1;
    const KdaFoldShared& shared;
    int thread;  // threadIdx.x, of which the compiler knows nothing between the stages: it saves registers
    StateColumns<STATE> S[PAIRS][2];
    float largest = 0.0f;  // magnitude of what the thread has stored, for nvfp4

    __device__ explicit KdaFoldTile(const KdaFoldShared& memory) : shared(memory), thread(opaque(int(threadIdx.x))) {}

    __device__ int lane() const { return u32(thread) % 32; }
    __device__ int g() const { return lane() / 4; }
    __device__ int t() const { return lane() % 4; }

    // Columns of block p of both rows; `rows`: at the lane's columns of the first row and block.
    __device__ __forceinline__ void load_block(const STATE* rows, int p) {
#pragma unroll
        for (int half = 0; half < 2; ++half) S[p][half].load(rows + half * 8 * KEY_DIM + 16 * p);
    }
    // Rows of the first tile. Of a checkpoint that must not be read they are zeros.
    __device__ __forceinline__ void load(const Work& w, int first) {
        if (w.row.folded > 0 && first < SLICE) {
            const STATE* rows = w.t.state + w.state_at(first + g()) + 4 * t();
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) load_block(rows, p);
        } else {
#pragma unroll
            for (int n = 0; n < 2 * PAIRS; ++n) S[n / 2][n % 2].clear();
        }
    }

    // S0 (exp(G) k) of the entries: element e of sum m belongs to row g + 8 (e / 2) and entry 8 m + 2 t + e % 2.
    __device__ __forceinline__ void read(Sum (&sums)[BLOCKS]) const {
        if constexpr (READS_PLANES)
            multiply_planes(sums);
        else
            multiply_splits(sums);
    }
    // Of bfloat16, which is an operand as it is stored.
    __device__ __forceinline__ void multiply_planes(Sum (&sums)[BLOCKS]) const {
        const int offset = KeyPlanes::offset(lane() / 16, lane() / 8 % 2, lane() % 8);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const u32 columns[4] = {S[p][0].words[0], S[p][1].words[0], S[p][0].words[1], S[p][1].words[1]};
#pragma unroll
            for (int n = 0; n < FOLD_PARTS; ++n) {
                const Matrices keys = load_transposed_matrices(shared.planes[READS_PLANES].block(p, n) + offset);
#pragma unroll
                for (int m = 0; m < BLOCKS; ++m) mma_bf16(n ? sums[m].rest : sums[m].upper, columns, keys.v[2 * m], keys.v[2 * m + 1]);
            }
        }
    }
    __device__ __forceinline__ void multiply_splits(Sum (&sums)[BLOCKS]) const {
        // The bits of tf32, of which the compiler must not know that the product reads no others: it would leave them on, and move whole
        // floats to where the product wants its operands.
        const u32 upper_bits = __ballot_sync(~0u, lane() >= 13);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            float upper[2][4], lower[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float a = S[p][i % 2].get(i / 4 + i % 4 / 2 * 2);
                upper[i / 4][i % 4] = sizeof(STATE) == 4 ? __uint_as_float(__float_as_uint(a) & upper_bits) : a;
                lower[i / 4][i % 4] = a - upper[i / 4][i % 4];
            }
#pragma unroll
            for (int m = 0; m < BLOCKS; ++m) {
                float keys[4];
                load_vector<4>(&shared.splits[0][8 * m + g()][16 * p + 4 * t()], keys);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    if constexpr (sizeof(STATE) == 4) mma_tf32(sums[m].rest, lower[c], keys[2 * c], keys[2 * c + 1]);
                    mma_tf32(sums[m].upper, upper[c], keys[2 * c], keys[2 * c + 1]);
                }
            }
#pragma unroll
            for (int m = 0; m < BLOCKS; ++m) {
                float keys[4];
                load_vector<4>(&shared.splits[1][8 * m + g()][16 * p + 4 * t()], keys);
#pragma unroll
                for (int c = 0; c < 2; ++c) mma_tf32(sums[m].rest, upper[c], keys[2 * c], keys[2 * c + 1]);
            }
        }
    }

    // x of the entries, as read has them.
    __device__ __forceinline__ void solve(const Sum (&read)[BLOCKS], int first, float (&x)[BLOCKS][4]) const {
        // opaque: what it gives would take a register from long before on, that narrow slices with a copy lack.
        const Matrices values = load_transposed_matrices(&shared.v[lane() / 16 * 8 + lane() % 8][first + opaque(lane() / 8) % 2 * 8]);
        float r[BLOCKS][4];
#pragma unroll
        for (int n = 0; n < BLOCKS; ++n) {
            float norms[2];
            load_vector<2>(&shared.k_norm[8 * n + 2 * t()], norms);
#pragma unroll
            for (int e = 0; e < 4; ++e) r[n][e] = fmaf(-norms[e % 2], read[n].get(e), half_to_float<ACT>(values.v[2 * n + e / 2], e % 2));
        }
#pragma unroll
        for (int m = 0; m < BLOCKS; ++m) {
            Sum solved = {};
#pragma unroll
            for (int n = 0; n <= m; ++n) {
                const Split a(r[n][0], r[n][2], r[n][1], r[n][3]);
                float columns[4];
                load_vector<4>(&shared.inverse[8 * m + g()][16 * n + 4 * t()], columns);
                mma_tf32(solved.rest, a.low, columns[0], columns[1]);
                mma_tf32(solved.rest, a.high, columns[2], columns[3]);
                mma_tf32(solved.upper, a.high, columns[0], columns[1]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) x[m][e] = solved.get(e);
        }
    }

    // Takes up the entries and stores the rows, in whose place those 64 below it are loaded, unless the step is to be answered from them.
    __device__ __forceinline__ void write(const float (&x)[BLOCKS][4], int first) {
        Parts<FOLD_PARTS> parts[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) parts[n] = split_pair<FOLD_PARTS>(x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]);
        STATE* rows = shared.state + (first + g()) * KEY_DIM + 4 * t();
        const int offset = KeyPlanes::offset(lane() / 8 % 2, lane() / 16, lane() % 8);
        float o[2] = {};
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            // Barriers keep the compiler from requesting more than registers hold. The small products first.
            if (p) __syncwarp();
            Accumulator sums[2] = {};
#pragma unroll
            for (int n = FOLD_PARTS - 1; n >= 0; --n) {
                const Matrices keys = load_matrices(shared.planes[0].block(p, n) + offset);
#pragma unroll
                for (int m = FOLD_PARTS - 1 - n; m >= 0; --m) {
                    const u32 part[4] = {parts[0].v[m], parts[1].v[m], parts[2].v[m], parts[3].v[m]};
#pragma unroll
                    for (int b = 0; b < 2; ++b) mma_bf16(sums[b], part, keys.v[2 * b], keys.v[2 * b + 1]);
                }
            }
            __syncwarp();
            float decay[4];
            load_vector<4>(&shared.decay[16 * p + 4 * t()], decay);
            float taken[2][4];
#pragma unroll
            for (int n = 0; n < 8; ++n)
                taken[n / 4][n % 4] = fmaf(S[p][n / 4].get(n % 4), decay[n % 4], sums[n % 4 / 2].v[n / 4 * 2 + n % 2]);
            if constexpr (ANSWERS_TOKEN) {
                float q[4];
                load_vector<4>(&shared.q[16 * p + 4 * t()], q);
#pragma unroll
                for (int n = 0; n < 8; ++n) o[n / 4] = fmaf(taken[n / 4][n % 4], q[n % 4], o[n / 4]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (ANSWERS_STEP)
                    S[p][half].set(taken[half]), S[p][half].store(rows + half * 8 * KEY_DIM + 16 * p);
                else
                    store_vector<4>(rows + half * 8 * KEY_DIM + 16 * p, taken[half]);
                if constexpr (READ_BITS == 4)
#pragma unroll
                    for (int e = 0; e < 4; ++e) largest = larger_magnitude(largest, taken[half][e]);
            }
            if (follows(first) && !ANSWERS_STEP) load_block(rows + 16 * WARPS * KEY_DIM, p);
        }
        thread = opaque(thread);
        if (ANSWERS_TOKEN && shared.o) answer(o, first);
    }
    __device__ __forceinline__ static bool follows(int first) { return first + 16 * WARPS < SLICE; }
    // The step's tokens, from the rows as they have been stored, in whose place come those below.
    __device__ __forceinline__ void answer_step(int stride, int first) {
        thread = opaque(int(threadIdx.x));
        KdaStepAnswer answer(*shared.coefficients, {shared.token_v, shared.o, stride}, 0, lane(), first + g());
        const STATE* next = shared.state + (first + 16 * WARPS + g()) * KEY_DIM + 4 * t();
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            answer.add(shared.x(), p, [&](int half, int column) { return S[p][half].get(column); });
            if (follows(first)) load_block(next, p);
            __syncwarp();
        }
        answer.finish();
    }
    // From a lane's share of the output of its rows.
    __device__ __forceinline__ void answer(float (&o)[2], int first) const {
        sum_all<4>(o);
        if (t() < 2) shared.o[first + g() + 8 * t()] = from_float<ACT>(t() ? o[1] : o[0]);
    }
};

// The rows of a checkpoint that must not be read below the first tile, which will be read.
__device__ __forceinline__ void clear_below(STATE* state) {
    constexpr int VECTOR = 16 / int(sizeof(STATE));
#pragma unroll 1
    for (int at = 16 * WARPS * KEY_DIM + VECTOR * threadIdx.x; at < SLICE * KEY_DIM; at += VECTOR * THREADS)
        *reinterpret_cast<uint4*>(state + at) = {0, 0, 0, 0};
}

// As chunk_step (delta_chunk.cuh), of rows that kda_folds names. keep(): called once keys are in planes.
template <bool ANSWERS, typename Keep>
__device__ __forceinline__ float kda_fold(const Work& w, KdaFoldShared& shared, Keep keep) {
    if (threadIdx.x == 0 && w.row.folded > 0)
        prefetch_bulk(w.t.state + w.state_at(0), SLICE * KEY_DIM * int(sizeof(STATE)));
    if (w.row.folded == 0) clear_below(w.t.state_out + w.state_at(0));
    KdaFoldKeys<ACT>{w, shared, opaque(int(threadIdx.x))}.make();
    KdaFoldTile<ANSWERS> tile(shared);
    int first = u32(tile.thread) / 32 * 16;
    tile.load(w, first);
    wait_copies();
    __syncthreads();
    keep();
    if (threadIdx.x / 32 == WARPS - 1) KdaFoldKeys<ACT>{w, shared, opaque(int(threadIdx.x))}.invert();
    bool solvable = false;
    constexpr int PASSES = (SLICE + 16 * WARPS - 1) / (16 * WARPS);
    // Beside the answer of a token no register is left to count passes.
    constexpr bool WRITTEN_OUT = ANSWERS && (TOKENS == 1 || PASSES == 1);
#pragma unroll WRITTEN_OUT ? PASSES : 1
    for (int pass = 0; !WRITTEN_OUT || pass < PASSES; ++pass) {
        if (WRITTEN_OUT) first = u32(opaque(int(threadIdx.x))) / 32 * 16 + pass * 16 * WARPS;
        Sum read[BLOCKS] = {};
        tile.thread = opaque(int(threadIdx.x));
        if (first < SLICE) tile.read(read);
        if (!solvable) __syncthreads();
        solvable = true;
        if (first >= SLICE) {
            if (WRITTEN_OUT) continue;
            break;
        }
        float x[BLOCKS][4];
        tile.thread = opaque(tile.thread);
        tile.solve(read, first, x);
        tile.thread = opaque(tile.thread);
        tile.write(x, first);
        if constexpr (KdaFoldTile<ANSWERS>::ANSWERS_STEP) tile.answer_step(w.t.qkv_stride, first);
        if (!WRITTEN_OUT && (first += 16 * WARPS) >= SLICE) break;
    }
    return to_float(from_float<STATE>(tile.largest));
}
