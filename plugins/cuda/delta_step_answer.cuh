// The answer of several tokens from a checkpoint that is on its way to memory, 16 value rows at a time (delta_fold_tile.cuh).
//
// The tokens find the ring folded into it, so that of their adjoint (delta_gram.cuh) the coefficients alone are needed. With S the new
// checkpoint,
//
//     o_t = a_t (S q_t) + sum_{j<=t} b_tj (S k_j) + sum_{j<=t} c_tj v_j
//
// Rows are multiplied with keys and queries as those lie among the activations, which are bfloat16 and so have one tf32 part; the
// coefficients come to the products when the rows are through.
#pragma once
#include "delta_read_shape.cuh"
#include "tf32_parts.cuh"

// Columns of keys, and as many of queries, in blocks of 8.
constexpr int STEP_COLUMNS = READ_TOKENS < 4 ? 4 : READ_TOKENS, STEP_BLOCKS = 2 * STEP_COLUMNS / 8;
constexpr int OUTPUT_BLOCKS = (READ_TOKENS + 7) / 8;

// Zero behind a token's own, and for tokens that the row has not.
struct StepCoefficients {
    alignas(16) float products[HEADS][READ_TOKENS][2 * STEP_COLUMNS];  // b, then a in column STEP_COLUMNS + t
    float values[HEADS][READ_TOKENS][STEP_COLUMNS];                    // c
    int tokens;
};

// Of a lane's rows `row` and row + 8 of the slice. T: of keys, queries and values.
template <typename T>
struct StepAnswer {
    const Work& w;
    const StepCoefficients& by;
    const int lane, row;
    static constexpr int VALUES = STEP_COLUMNS / 4;  // of tokens t, 4 + t ...
    ACT values[VALUES][2];
    const T* key;  // the lane's columns, of the token of its first block
    Sum products[STEP_BLOCKS] = {};

    __device__ StepAnswer(const Work& work, const StepCoefficients& coefficients, int in_lane, int first_row)
        : w(work), by(coefficients), lane(in_lane), row(first_row) {
#pragma unroll
        for (int i = 0; i < 2 * VALUES; ++i) values[i / 2][i % 2] = w.v(existing(i / 2 * 4 + t()))[row + i % 2 * 8];
        const bool query = STEP_BLOCKS == 1 && g() >= STEP_COLUMNS;
        const int token = existing(STEP_BLOCKS == 1 ? g() % STEP_COLUMNS : g());
        key = reinterpret_cast<const T*>(w.k(token)) - (query ? KEY_HEADS * KEY_DIM : 0) + 4 * t();
    }

    __device__ int g() const { return lane / 4; }
    __device__ int t() const { return lane % 4; }
    // A lane that has no token has the first one's, with coefficients of zero.
    __device__ int existing(int token) const { return token < by.tokens ? token : 0; }
    // Elements from the lane's columns of the first block to those of another.
    __device__ int to_block(int block) const {
        constexpr int KEY_BLOCKS = (STEP_BLOCKS + 1) / 2;
        if (block == 0) return 0;
        const int tokens = existing(block % KEY_BLOCKS * 8 + g()) - existing(g());
        return tokens * w.t.qkv_stride - (block < KEY_BLOCKS ? 0 : KEY_HEADS * KEY_DIM);
    }

    __device__ void move(int columns) { key += columns; }
    // Columns 4 t ... 4 t + 3 of 16, of both rows.
    __device__ void add(const float (&x)[2][4], int columns) {
#pragma unroll
        for (int block = 0; block < STEP_BLOCKS; ++block) {
            const auto pairs = *reinterpret_cast<const vec<u32, 2>*>(key + to_block(block) + columns);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float a[4] = {x[0][c], x[1][c], x[0][c + 2], x[1][c + 2]};
                const float b[2] = {half_to_float<T>(pairs.v[0], c), half_to_float<T>(pairs.v[1], c)};
                if constexpr (sizeof(STATE) == 4)
                    products[block].template add<true>(Split(a[0], a[1], a[2], a[3]), b[0], b[1]);
                else
                    mma_tf32(products[block].upper, a, b[0], b[1]);
            }
        }
    }

    __device__ void store() const {
        float v[VALUES][2];
#pragma unroll
        for (int i = 0; i < 2 * VALUES; ++i) v[i / 2][i % 2] = late_float(values[i / 2][i % 2]);
#pragma unroll
        for (int m = 0; m < OUTPUT_BLOCKS; ++m) {
            const int token = min(8 * m + g(), READ_TOKENS - 1);
            Sum o = {};
#pragma unroll
            for (int i = 0; i < VALUES; i += 2) {
                const bool second = i + 1 < VALUES;
                const float a[4] = {v[i][0], v[i][1], second ? v[i + second][0] : 0.0f, second ? v[i + second][1] : 0.0f};
                float c[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) c[e] = e == 0 || second ? by.values[w.n][token][4 * (i + e) + t()] : 0.0f;
                mma_tf32(o.rest, a, c[0] - tf32_part(c[0]), c[1] - tf32_part(c[1]));
                mma_tf32(o.upper, a, tf32_part(c[0]), tf32_part(c[1]));
            }
#pragma unroll
            for (int block = 0; block < STEP_BLOCKS; ++block) {
                float x[4], b[2];
#pragma unroll
                for (int e = 0; e < 4; ++e) x[e] = products[block].get(e);
                load_vector<2>(&by.products[w.n][token][8 * block + 2 * t()], b);
                o.add<false>({x[0], x[2], x[1], x[3]}, b[0], b[1]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int to = 8 * m + 2 * t() + e % 2;
                if (to < by.tokens) w.o(to)[row + e / 2 * 8] = from_float<ACT>(o.get(e));
            }
        }
    }
};
