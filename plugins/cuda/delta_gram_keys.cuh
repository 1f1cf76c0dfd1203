// Keys and queries of a step (delta_gram.cuh) in shared memory, and their products, which tensor cores form.
#pragma once
#include "delta_adjoint.cuh"
#include "mma.cuh"
#include "ptx/barriers.cuh"

// Elements from row to row, by which a warp's accesses spread over the banks.
constexpr int GRAM_PITCH = KEY_DIM + 8, PRODUCT_PITCH = ENTRY_ROWS <= 16 ? 18 : ENTRY_ROWS <= 24 ? 24 : 34;

constexpr int KEY_HEADS_HERE = HEADS / KEYS;  // value heads of the block that share a key head

// Dead once x is known.
struct GramInputs {
    alignas(16) ACT k[KEYS][ENTRY_ROWS][GRAM_PITCH];  // ring rows, then tokens, then zeros
    alignas(16) ACT q[KEYS][READ_TOKENS][GRAM_PITCH];
    alignas(8) float kk[KEYS][ENTRY_ROWS][PRODUCT_PITCH];  // [i][j]: of i > j, zero elsewhere in the blocks of 16 that are formed
    float qk[KEYS][READ_TOKENS][PRODUCT_PITCH];         // [token][j]
    float k_squares[KEYS][ENTRIES], q_squares[KEYS][READ_TOKENS];
    alignas(4) ACT along[HEADS][READ_TOKENS][3][ENTRIES];  // what x has of key j, in three parts; before, decays from j to the token
    float along_unit[HEADS][READ_TOKENS];                  // by which sums of them are to be multiplied, for float16
    float whole[HEADS][READ_TOKENS];                       // what it has of q
};

// Tokens that a warp solves at once, one beside the other.
constexpr int SOLVED_TOKENS = READ_TOKENS < 4 ? READ_TOKENS : READ_TOKENS > 4 * HEAD_WARPS ? READ_TOKENS / HEAD_WARPS : 4;
// Lanes of a head: where its entries are few, a warp solves two heads.
constexpr int HEAD_LANES = ENTRIES == 16 && HEADS % 2 == 0 ? 16 : 32, SOLVED_HEADS = 32 / HEAD_LANES;
// Where a step's entries are few, half a warp has them, and either half of it takes half of its tokens.
constexpr bool HALVES = HEAD_LANES == 32 && SOLVED_TOKENS > 1;
// The last warps solve. The first half of them, or all where more than half solve, load keys, form their products and append to the ring.
constexpr int SOLVING_WARPS = HEADS / SOLVED_HEADS * (READ_TOKENS / SOLVED_TOKENS);
constexpr int KEY_WARPS = SOLVING_WARPS > WARPS / 2 ? WARPS : WARPS / 2, KEY_THREADS = 32 * KEY_WARPS;

// T: of keys and queries.
template <typename T>
struct GramKeys {
    const Work& w;
    GramInputs& in;
    const int warp, lane, history, tokens;

    __device__ GramKeys(const Work& work, GramInputs& inputs)
        : w(work), in(inputs), warp(threadIdx.x / 32), lane(threadIdx.x % 32), history(work.row.history()), tokens(work.row.tokens) {}

    __device__ bool appends() const { return !w.row.absorbs(); }
    __device__ bool has_keys() const { return warp < KEY_WARPS; }

    // ---- inputs ------------------------------------------------------------------------------------------------------

    // Keys of every entry and the tokens' queries, 16 bytes a lane.
    static constexpr int ROW_LANES = KEY_DIM / 8;
    __device__ void request_keys() const {
        if (!has_keys()) return;
        const int column = threadIdx.x % ROW_LANES * 8;
#pragma unroll
        for (int key = 0; key < KEYS; ++key) {
            const Work head = w.of_head(key * KEY_HEADS_HERE);
            const T* ring = opaque(reinterpret_cast<const T*>(w.t.ring_k) + head.ring_k_at(0) + column);
#pragma unroll 1
            for (int j = threadIdx.x / ROW_LANES; j < history; j += KEY_THREADS / ROW_LANES)
                copy_16_bytes(&in.k[key][j][column], ring + w.history_row(j) * KEY_DIM);
            const T* q = opaque(head.q(0) + column);
            // The last rows' threads, which have fewer of the ring.
#pragma unroll 1
            for (int i = (KEY_THREADS - 1 - threadIdx.x) / ROW_LANES; i < tokens; i += KEY_THREADS / ROW_LANES) {
                const T* token = q + i * w.t.qkv_stride;
                copy_16_bytes(&in.q[key][i][column], token);
                copy_16_bytes(&in.k[key][history + i][column], token + KEY_HEADS * KEY_DIM);
            }
            const int entries = history + tokens;
#pragma unroll 1
            for (int j = entries + threadIdx.x / ROW_LANES; j < padded_rows(entries); j += KEY_THREADS / ROW_LANES)
                *reinterpret_cast<uint4*>(&in.k[key][j][column]) = {0, 0, 0, 0};
        }
    }
    // Until the keys are there, for the warps that have them. The others go on with their gates.
    template <int LATER>
    __device__ static void wait_for_keys() {
        wait_for_copies<LATER>();
        if constexpr (KEY_WARPS < WARPS)
            sync_threads(1, KEY_THREADS);
        else
            __syncthreads();
    }

    __device__ void append_keys() const {
        if (!appends()) return;
        const int column = threadIdx.x % ROW_LANES * 8;
#pragma unroll 1
        for (int token = threadIdx.x / ROW_LANES; token < tokens; token += KEY_THREADS / ROW_LANES)
#pragma unroll
            for (int key = 0; key < KEYS; ++key) {
                const Work head = w.of_head(key * KEY_HEADS_HERE);
                if (!head.leads_key_head()) continue;
                *reinterpret_cast<uint4*>(w.t.ring_k_out + head.ring_k_at(w.append_row(token)) + column) =
                    *reinterpret_cast<const uint4*>(&in.k[key][history + token][column]);
            }
    }

    // ---- products ----------------------------------------------------------------------------------------------------

    // A product of 16 rows of keys with as many rows of keys, or with the queries, is a warp's task. With two blocks of rows they are
    // (0, 0), (0, queries), (1, 0), (1, 1), (1, queries).
    static constexpr int ROW_BLOCKS = ENTRIES / 16, KEY_TASKS = ROW_BLOCKS * (ROW_BLOCKS + 3) / 2;
    static_assert(!GRAM || (ROW_BLOCKS <= 2 && READ_TOKENS <= 16), "tasks");

    __device__ void multiply() const {
#pragma unroll 1
        for (int task = warp; task < KEYS * KEY_TASKS; task += KEY_WARPS) {
            const int key = task / KEY_TASKS, rows = task % KEY_TASKS > 1 ? 1 : 0, columns = task % KEY_TASKS - 2 * rows;
            if (16 * rows >= history + tokens) continue;
            if (columns > rows)
                multiply_queries(key, 16 * rows);
            else
                multiply_keys(key, 16 * rows, 16 * columns);
        }
    }

    // Of lane 8 m + i: row i of the m-th of four matrices that make up 16 x 16 elements.
    __device__ const ACT* lane_row(const ACT (*rows)[GRAM_PITCH], int first, int last) const {
        return rows[min(first + lane % 16, last)] + lane / 16 * 8;
    }

    __device__ void multiply_keys(int key, int rows, int columns) const {
        const int entries = history + tokens, group = lane / 4, t = lane % 4;
        const ACT *left = lane_row(in.k[key], rows, ENTRY_ROWS - 1), *right = lane_row(in.k[key], columns, ENTRY_ROWS - 1);
        Accumulator sums[2][2] = {};
#pragma unroll
        for (int p = 0; p < KEY_DIM / 16; ++p) {
            const Matrices a = load_matrices(left + 16 * p), b = load_matrices(right + 16 * p);
#pragma unroll
            for (int n = 0; n < 2; ++n) mma_16bit<T>(sums[p % 2][n], a.v, b.v[n], b.v[n + 2]);
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int i = rows + group + m % 2 * 8, j = columns + 2 * t + m / 2 * 8;
            if (ENTRY_ROWS < ENTRIES && max(i, j) >= ENTRY_ROWS) continue;
            float products[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int at = m % 2 * 2 + e;
                const float product = sums[0][m / 2].v[at] + sums[1][m / 2].v[at];
                if (i == j + e) in.k_squares[key][i] = product;
                products[e] = j + e < i && i < entries ? product : 0.0f;
            }
            store_vector<2>(&in.kk[key][i][j], products);
        }
    }

    // With the squares of queries besides, which are needed once.
    __device__ void multiply_queries(int key, int rows) const {
        const int group = lane / 4, t = lane % 4;
        const ACT *left = lane_row(in.k[key], rows, ENTRY_ROWS - 1), *right = lane_row(in.q[key], 0, READ_TOKENS - 1);
        constexpr int TOKEN_BLOCKS = (READ_TOKENS + 7) / 8;
        Accumulator sums[2][TOKEN_BLOCKS] = {}, squares[2][TOKEN_BLOCKS] = {};
#pragma unroll
        for (int p = 0; p < KEY_DIM / 16; ++p) {
            const Matrices a = load_matrices(left + 16 * p), b = load_matrices(right + 16 * p);
#pragma unroll
            for (int n = 0; n < TOKEN_BLOCKS; ++n) {
                mma_16bit<T>(sums[p % 2][n], a.v, b.v[n], b.v[n + 2]);
                mma_16bit<T>(squares[p % 2][n], b.v, b.v[n], b.v[n + 2]);
            }
        }
#pragma unroll
        for (int n = 0; n < TOKEN_BLOCKS; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int token = 8 * n + 2 * t + e;
                if (token >= tokens) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int j = rows + group + 8 * half;
                    if (ENTRY_ROWS == ENTRIES || j < ENTRY_ROWS)
                        in.qk[key][token][j] = sums[0][n].v[2 * half + e] + sums[1][n].v[2 * half + e];
                }
                if (group == 2 * t + e) in.q_squares[key][token] = squares[0][n].v[2 * n + e] + squares[1][n].v[2 * n + e];
            }
    }
};
