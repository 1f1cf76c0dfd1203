// Products of a chunk's entries with each other: the triangular system of their updates, and what outputs take of them.
#pragma once
#include "delta_chunk_inputs.cuh"

struct ChunkPairs {
    const Chunk& chunk;
    ChunkShared& shared;
    ChunkInputs& in;

    // ---- scalar decays: a warp for 8 columns i of a head's matrix, or of that of queries ------------------------------------

    // Norms come from the diagonals of K K^T and Q Q^T.
    __device__ void multiply(bool outputs) {
        const int n = chunk.warp() % BLOCKS, g = chunk.g(), t = chunk.t();
        const int matrix = chunk.warp() / BLOCKS, head = PREPARED_HEADS > 1 ? matrix : 0;
        const bool is_output = PREPARED_HEADS == 1 && matrix > 0;
        if (matrix >= (outputs ? 2 : PREPARED_HEADS)) return;
        const double* log_decay = in.gates[head].log_decay;
        const STAGED(*rows)[KEY_STRIDE] = is_output ? in.q : in.k;
        float products[4], squares[4];
        multiply_rows(rows, n, is_output, products, squares);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int j = g + 8 * (e / 2), i = 8 * n + 2 * t + e % 2;
            if (j >= CHUNK) continue;
            const float decay = expf(fminf(float(log_decay[j] - log_decay[i]), 0.0f));
            if (is_output) {
                shared.qk[j][i] = i <= j ? products[e] * decay : 0.0f;
                if (NARROW && i == j) shared.q_norm[j] = rsqrtf(squares[e] + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
            } else {
                shared.systems[head].matrix[j][i] = i < j ? products[e] * decay : 0.0f;
                if (NARROW && i == j && head == 0) shared.k_norm[j] = rsqrtf(products[e] + NORM_EPSILON);
            }
        }
    }

    // 16-bit rows.
    template <typename T>
    __device__ void multiply_rows(const T (*rows)[KEY_STRIDE], int n, bool is_output, float (&products)[4],
                                  float (&squares)[4]) const {
        Accumulator sums[2] = {}, norms = {};
        if constexpr (FOLDS_BF16) {
            // Interleaved keys: the operands, and so the bits, are those that other keys give below.
            const int lane = chunk.lane();
            const T* row = &rows[lane % 16][lane / 16 * 8];
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                const Matrices k = load_matrices(row + 16 * p);
                mma_16bit<T>(sums[p % 2], k.v, n ? k.v[1] : k.v[0], n ? k.v[3] : k.v[2]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) products[e] = sums[0].v[e] + sums[1].v[e];
            return;
        }
        const int g = chunk.g(), t = chunk.t();
        const auto pairs = [t](const T* row, int p) { return *reinterpret_cast<const uint2*>(row + 16 * p + 4 * t); };
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const uint2 upper = pairs(rows[g], p), lower = CHUNK == 16 ? pairs(rows[(g + 8) % CHUNK], p) : uint2{0, 0};
            const u32 a[4] = {upper.x, lower.x, upper.y, lower.y};
            const uint2 keys = pairs(in.k[8 * n + g], p);
            mma_16bit<T>(sums[p % 2], a, keys.x, keys.y);
            if (is_output) {
                const uint2 queries = pairs(in.q[8 * n + g], p);
                mma_16bit<T>(norms, a, queries.x, queries.y);
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) products[e] = sums[0].v[e] + sums[1].v[e], squares[e] = norms.v[e];
    }

    __device__ void multiply_rows(const float (*rows)[KEY_STRIDE], int n, bool, float (&products)[4], float (&)[4]) const {
        const int g = chunk.g(), t = chunk.t();
        Sum sum = {};
#pragma unroll 2
        for (int p = 0; p < PAIRS; ++p) {
            float upper[4], lower[4] = {}, keys[4];
            load_vector<4>(&rows[g][16 * p + 4 * t], upper);
            if (CHUNK == 16) load_vector<4>(&rows[(g + 8) % CHUNK][16 * p + 4 * t], lower);
            load_vector<4>(&in.k[8 * n + g][16 * p + 4 * t], keys);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                sum.add<false>({upper[2 * half], lower[2 * half], upper[2 * half + 1], lower[2 * half + 1]}, keys[2 * half],
                               keys[2 * half + 1]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) products[e] = sum.get(e);
    }

    // ---- decays per channel ------------------------------------------------------------------------------------------------

    // The threads of an entry carry its k forward through the decays and meet every later k and q.
    template <bool OUTPUTS>
    __device__ void carry(int count) {
        constexpr int PART = KEY_DIM / ENTRY_LANES;  // key columns of a thread: 4 (l + ENTRY_LANES m) + 0 ... 3
        const int thread = chunk.thread, l = thread % ENTRY_LANES, i = thread / ENTRY_LANES;
        const int warp_first = i / (32 / ENTRY_LANES) * (32 / ENTRY_LANES);
        const auto column = [l](int m) { return 4 * l + ENTRY_LANES * m; };
        float carried[PART];
#pragma unroll
        for (int m = 0; m < PART; m += 4) load_vector<4>(&in.k[i][column(m)], carried + m);
        for (int j = l; j < CHUNK; j += ENTRY_LANES)
            if (j < warp_first || j >= count) {
                shared.systems[0].matrix[j][i] = 0.0f;
                if (OUTPUTS) shared.qk[j][i] = 0.0f;
            }
#pragma unroll 2
        for (int j = warp_first; j < count; ++j) {
            float k_sums[4] = {}, q_sums[4] = {};
#pragma unroll
            for (int m = 0; m < PART; m += 4) {
                float x[4];
                load_vector<4>(&shared.decay[PER_CHANNEL ? j : 0][column(m)], x);
#pragma unroll
                for (int e = 0; e < 4; ++e) carried[m + e] *= j > i ? x[e] : 1.0f;
                load_vector<4>(&in.k[j][column(m)], x);
#pragma unroll
                for (int e = 0; e < 4; ++e) k_sums[e] = fmaf(x[e], carried[m + e], k_sums[e]);
                if constexpr (OUTPUTS) {
                    load_vector<4>(&in.q[j][column(m)], x);
#pragma unroll
                    for (int e = 0; e < 4; ++e) q_sums[e] = fmaf(x[e], carried[m + e], q_sums[e]);
                }
            }
            float sums[2] = {(k_sums[0] + k_sums[1]) + (k_sums[2] + k_sums[3]), (q_sums[0] + q_sums[1]) + (q_sums[2] + q_sums[3])};
            sum_all<ENTRY_LANES>(sums);
            if (l != 0) continue;
            shared.systems[0].matrix[j][i] = i < j ? sums[0] : 0.0f;
            if (OUTPUTS) shared.qk[j][i] = i <= j ? sums[1] : 0.0f;
        }
    }

    // Decays move into the keys: exp(G) and exp(G_last - G), one thread a channel.
    __device__ void spread() {
        for (int c = chunk.thread; c < KEY_DIM; c += THREADS) {
            float product = 1.0f, keys[CHUNK];
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                keys[j] = to_float(in.k[j][c]);
                product *= shared.decay[PER_CHANNEL ? j : 0][c];
                in.k[j][c] = from_float<STAGED>(keys[j] * product);
                if constexpr (STAGES_QUERIES) in.q[j][c] = from_float<STAGED>(to_float(in.q[j][c]) * product);
            }
            shared.last[c] = product;
            product = 1.0f;
#pragma unroll
            for (int j = CHUNK - 1; j >= 0; --j) {
                float& decay = shared.decay[PER_CHANNEL ? j : 0][c];
                const float factor = decay;
                decay = keys[j] * product;
                product *= factor;
            }
        }
    }

    // ---- the triangular system ---------------------------------------------------------------------------------------------

    // Its inverse, which takes its place, a lane a column c of a head's, by the first warp: what values and reads leave of an entry
    // (TileEntries::solve) is multiplied by the columns, which take up beta, and becomes u times the norm of k. The columns of a row are
    // in the order of an accumulator's entries (delta_chunk.cuh).
    __device__ void invert() {
        constexpr int LANES = PREPARED_HEADS * CHUNK;
        if (threadIdx.x >= LANES) return;
        const int c = chunk.thread % CHUNK, head = PREPARED_HEADS > 1 ? chunk.thread / CHUNK : 0;
        const ChunkGates& gates = in.gates[head];
        ChunkSystem& system = shared.systems[head];
        const float beta = gates.beta[c];
        float* gains = &system.gains[c / 8 * 4 + c % 4][c / 4 % 2];
        gains[0] = shared.k_norm[c] * (PER_CHANNEL ? 1.0f : gates.from_start[c]);
        gains[2] = PER_CHANNEL ? 1.0f : gates.to_end[c];
        float u[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const float norm = shared.k_norm[i];
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                float pairs[4];
                load_vector<4>(&system.matrix[i][j], pairs);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (j + e < i) sum = fmaf(pairs[e], u[j + e], sum);
            }
            u[i] = fmaf(-gates.beta[i] * norm * norm, sum, i == c ? norm : 0.0f);
        }
        __syncwarp(u32((1ull << LANES) - 1));
        float* column = &system.matrix[0][c / 8 * 8 + c % 4 * 2 + c / 4 % 2];
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) column[i * CHUNK] = __fmul_rn(u[i], beta);
    }
};
