// The product of a checkpoint with x of several tokens (delta_read.cuh) on tensor cores.
//
// x is the left operand: row g is the upper part of token g, row g + 8 the lower one. Eight state rows are the columns of the right one:
// lane 4 g + t has row g of them, 16 bytes of each 64. These pass through shared memory, where no other lane needs them. Of float32 both
// operands have two tf32 parts, of 16 bits x alone has two, of the state's type.
#pragma once
#include "delta_gram.cuh"
#include "delta_read_values.cuh"
#include "ptx/async_copy.cuh"

// Elements of 16 bytes, and parts of 64 bytes that a state row has, or a warp's tile.
constexpr int PART_UNIT = 16 / int(sizeof(STATE)), ROW_PARTS = KEY_DIM > 4 * PART_UNIT ? KEY_DIM / (4 * PART_UNIT) : 1;
constexpr int MATRIX_ROWS = 2 * PART_UNIT, MATRIX_PARTS = MATRIX_ROWS / 8 * ROW_PARTS;
constexpr int FEWEST_MATRIX_TOKENS = sizeof(STATE) == 2 ? 2 : 4;
constexpr bool MATRIX = (GRAM || KDA_VERIFIES) && READ_TOKENS >= FEWEST_MATRIX_TOKENS && KEY_DIM <= 128 && WARP_ROWS % MATRIX_ROWS == 0;

typedef STATE MatrixPart[MATRIX ? THREADS : 1][PART_UNIT];

// T: of the state. AHEAD: parts that are on their way.
template <typename T, int AHEAD, typename Shared>
struct MatrixRead {
    const Work& w;
    Shared& shared;
    const int warp, lane;

    static constexpr int HEAD_TILES = MATRIX ? WARP_ROWS / MATRIX_ROWS : 1, TILES = HEADS * HEAD_TILES;
    static constexpr int OPERANDS = (READ_TOKENS + 7) / 8;
    static constexpr bool KEEPS_X = OPERANDS == 1;
    static constexpr int X_WORDS = sizeof(STATE) == 4 ? 4 : 8;  // of a lane's columns of a part

    __device__ int first_row(int tile) const { return warp * WARP_ROWS + tile % HEAD_TILES * MATRIX_ROWS; }
    // The lane's columns of its first row of a tile.
    __device__ const STATE* rows(int tile) const {
        return w.t.state + w.of_head(tile / HEAD_TILES).state_at(first_row(tile) + lane / 4) + PART_UNIT * (lane % 4);
    }
    __device__ void request(const STATE* rows, int part, bool exists) const {
        const int element = part / ROW_PARTS * 8 * KEY_DIM + part % ROW_PARTS * 4 * PART_UNIT;
        if (exists) copy_16_bytes(shared.parts[part % AHEAD][threadIdx.x], rows + element);
        end_copies();
    }
    // As many groups of copies in any case.
    __device__ void request_first(bool exist) const {
        const STATE* first = opaque(rows(0));
#pragma unroll
        for (int part = 0; part < AHEAD; ++part) request(first, part, exist);
    }

    // The lane's columns of a part of x: floats, or pairs of their upper and lower parts in the order of an operand.
    __device__ void load_x(u32 (&to)[X_WORDS], int n, int operand, int part) const {
        const int token = 8 * operand + lane / 4;
        float values[PART_UNIT] = {};
        if (token < READ_TOKENS)
#pragma unroll
            for (int i = 0; i < PART_UNIT; i += 4)
                load_vector<4>(&shared.in.results.x[n][token][PART_UNIT * (4 * part + lane % 4) + i], values + i);
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < PART_UNIT; ++i) to[i] = __float_as_uint(values[i]);
        } else {
#pragma unroll
            for (int i = 0; i < PART_UNIT; i += 2) {
                const u32 upper = pack_pair<T>(values[i], values[i + 1]);
                to[i] = upper;
                to[i + 1] = pack_pair<T>(values[i] - half_to_float<T>(upper, false), values[i + 1] - half_to_float<T>(upper, true));
            }
        }
    }

    __device__ static void multiply(Accumulator (&sums)[2], const u32 (&x)[X_WORDS], const vec<u32, 4>& state) {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                float s[2], high[2], q[2], upper[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    s[e] = __uint_as_float(state.v[i + e]), high[e] = tf32_part(s[e]);
                    q[e] = __uint_as_float(x[i + e]), upper[e] = tf32_part(q[e]);
                }
                const float both[4] = {upper[0], q[0] - upper[0], upper[1], q[1] - upper[1]};
                mma_tf32(sums[0], both, high[0], high[1]);
                mma_tf32(sums[1], both, s[0] - high[0], s[1] - high[1]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                mma_16bit<T>(sums[i], {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]}, state.v[2 * i], state.v[2 * i + 1]);
        }
    }

    __device__ void run() const {
        u32 kept[KEEPS_X ? ROW_PARTS : 1][X_WORDS];
#pragma unroll 1
        for (int tile = 0; tile < TILES; ++tile) {
            const int n = tile / HEAD_TILES;
            if (KEEPS_X && tile % HEAD_TILES == 0)
#pragma unroll
                for (int part = 0; part < ROW_PARTS; ++part) load_x(kept[KEEPS_X ? part : 0], n, 0, part);
            const bool last = tile + 1 == TILES;
            const STATE *own = rows(tile), *next = opaque(rows(last ? tile : tile + 1));
#pragma unroll
            for (int row = 0; row < MATRIX_ROWS; row += 8) {
                Accumulator sums[OPERANDS][2] = {};
#pragma unroll KEEPS_X ? ROW_PARTS : 1
                for (int at = 0; at < ROW_PARTS; ++at) {
                    const int part = row / 8 * ROW_PARTS + at, ahead = part + AHEAD - MATRIX_PARTS;
                    wait_for_copies<AHEAD - 1>();
                    const vec<u32, 4> state = *reinterpret_cast<const vec<u32, 4>*>(shared.parts[part % AHEAD][threadIdx.x]);
                    request(ahead < 0 ? own : next, ahead < 0 ? part + AHEAD : ahead, ahead < 0 || !last);
#pragma unroll
                    for (int i = 0; i < OPERANDS; ++i) {
                        if constexpr (!KEEPS_X) load_x(kept[0], n, i, at);
                        multiply(sums[i], kept[KEEPS_X ? at : 0], state);
                    }
                }
#pragma unroll
                for (int i = 0; i < OPERANDS; ++i) {
                    const int token = 8 * i + lane / 4;
                    float products[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        products[e] = (sums[i][0].v[e] + sums[i][0].v[e + 2]) + (sums[i][1].v[e] + sums[i][1].v[e + 2]);
                    if (token < READ_TOKENS) store_vector<2>(&shared.in.o[n][token][first_row(tile) + row + 2 * (lane % 4)], products);
                }
            }
        }
    }
};
