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

// Columns of keys, and as many of queries, in blocks of 8: keys come first, with four tokens at most in the first half of the only one.
constexpr int STEP_COLUMNS = READ_TOKENS < 4 ? 4 : READ_TOKENS, STEP_BLOCKS = 2 * STEP_COLUMNS / 8;
constexpr int OUTPUT_BLOCKS = (READ_TOKENS + 7) / 8;  // and blocks of keys

// Zero behind a token's own, and for tokens that the row has not.
struct ValueCoefficients {
    float values[HEADS][READ_TOKENS][STEP_COLUMNS];  // c
    int tokens;
};
struct StepCoefficients : ValueCoefficients {
    alignas(16) float keys[HEADS][READ_TOKENS][STEP_COLUMNS];  // b
    float queries[HEADS][READ_TOKENS];                         // a
};

// Of a head's slice: values and outputs of the first token. Tokens are `stride` values apart.
struct StepTensors {
    const ACT* v;
    ACT* o;
    int stride;
};

// Of head n of the block, in a lane's rows `row` and row + 8 of the slice: what the tokens' values add, and the answer. Values that are no
// numbers do not reach tokens before their own.
template <typename Coefficients>
struct StepRows {
    const Coefficients& by;
    const StepTensors of;
    const int n, lane, row;
    static constexpr int VALUES = STEP_COLUMNS / 4;  // of tokens t, 4 + t ...
    ACT values[VALUES][2];

    __device__ StepRows(const Coefficients& coefficients, const StepTensors& tensors, int head, int in_lane, int first_row)
        : by(coefficients), of(tensors), n(head), lane(in_lane), row(first_row) {
#pragma unroll
        for (int i = 0; i < 2 * VALUES; ++i) values[i / 2][i % 2] = of.v[existing(i / 2 * 4 + t()) * of.stride + row + i % 2 * 8];
    }

    __device__ int g() const { return lane / 4; }
    __device__ int t() const { return lane % 4; }
    // A lane that has no token has the first one's, with coefficients of zero.
    __device__ int existing(int token) const { return token < by.tokens ? token : 0; }
    // Of block m of outputs, the token of column g.
    __device__ int column_token(int m) const { return min(8 * m + g(), READ_TOKENS - 1); }

    // Of either row, the first token whose value is no number; for all lanes of a warp.
    __device__ void find_spoilt(int (&first)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            first[half] = READ_TOKENS;
#pragma unroll
            for (int i = VALUES - 1; i >= 0; --i)
                if (!is_number(late_float(values[i][half]))) first[half] = 4 * i + t();
#pragma unroll
            for (int offset = 1; offset < 4; offset *= 2) first[half] = min(first[half], __shfl_xor_sync(~0u, first[half], offset));
        }
    }
    __device__ static bool is_number(float x) { return x - x == 0.0f; }

    __device__ void add_values(Sum& o, int m) const {
        const float* c = by.values[n][column_token(m)];
#pragma unroll
        for (int i = 0; i < VALUES; i += 2) {
            float v[4], b[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const bool exists = i + e < VALUES;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float own = late_float(values[exists ? i + e : i][half]);
                    v[2 * e + half] = exists && is_number(own) ? own : 0.0f;
                }
                b[e] = exists ? c[4 * (i + e) + t()] : 0.0f;
            }
            mma_tf32(o.rest, v, b[0] - tf32_part(b[0]), b[1] - tf32_part(b[1]));
            mma_tf32(o.upper, v, tf32_part(b[0]), tf32_part(b[1]));
        }
    }
    __device__ int output_token(int m, int e) const { return 8 * m + 2 * t() + e % 2; }
    __device__ void store(const float (&o)[4], const int (&spoilt)[2], int m) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int token = output_token(m, e);
            const float answer = token < spoilt[e / 2] ? o[e] : __uint_as_float(0x7fc00000);
            if (token < by.tokens) of.o[token * VALUE_HEADS * VALUE_DIM + row + e / 2 * 8] = from_float<ACT>(answer);
        }
    }
};

// T: of keys and queries.
template <typename T>
struct StepAnswer : StepRows<StepCoefficients> {
    const T* key;  // the lane's columns, of the token of its first block
    Sum products[STEP_BLOCKS] = {};

    // keys: the first token's.
    __device__ StepAnswer(const StepCoefficients& coefficients, const StepTensors& tensors, const ACT* keys, int head, int in_lane,
                          int first_row)
        : StepRows(coefficients, tensors, head, in_lane, first_row) {
        const bool query = STEP_BLOCKS == 1 && g() >= STEP_COLUMNS;
        const int token = existing(STEP_BLOCKS == 1 ? g() % STEP_COLUMNS : g());
        key = reinterpret_cast<const T*>(keys) + token * of.stride - (query ? KEY_HEADS * KEY_DIM : 0) + 4 * t();
    }

    // Elements from the lane's columns of the first block to those of another.
    __device__ int to_block(int block) const {
        if (block == 0) return 0;
        const int tokens = existing(block % OUTPUT_BLOCKS * 8 + g()) - existing(g());
        return tokens * of.stride - (block < OUTPUT_BLOCKS ? 0 : KEY_HEADS * KEY_DIM);
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

    __device__ void finish() const {
        int spoilt[2];
        find_spoilt(spoilt);
#pragma unroll
        for (int m = 0; m < OUTPUT_BLOCKS; ++m) {
            Sum sums = {};
            add_values(sums, m);
#pragma unroll
            for (int block = 0; block < OUTPUT_BLOCKS; ++block) {
                float x[4], b[2];
#pragma unroll
                for (int e = 0; e < 4; ++e) x[e] = STEP_BLOCKS > 1 || t() < 2 ? products[block].get(e) : 0.0f;
                load_vector<2>(&by.keys[n][column_token(m)][STEP_BLOCKS > 1 ? 8 * block + 2 * t() : 2 * (t() % 2)], b);
                sums.add<false>({x[0], x[2], x[1], x[3]}, b[0], b[1]);
            }
            float o[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                // Of the outputs' columns, or of those half a block behind.
                const float of_query = STEP_BLOCKS > 1 ? products[STEP_BLOCKS > 1 ? OUTPUT_BLOCKS + m : 0].get(e)
                                                       : __shfl_xor_sync(~0u, products[0].get(e), 2);
                o[e] = fmaf(by.queries[n][min(output_token(m, e), READ_TOKENS - 1)], of_query, sums.get(e));
            }
            store(o, spoilt, m);
        }
    }
};
