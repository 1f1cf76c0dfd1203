// The product of a single token with the state (delta_read.cuh), tile after tile of a warp's value rows. Every lane ends with one of these
// rows at most.
#pragma once
#include "delta_read_tiles.cuh"
#include "ptx/bulk_copy.cuh"

static_assert(!HALF_STATES || !READS || BY_EIGHTS || PER_CHANNEL, "a step that nothing else reads");

// T: of the state.
template <typename T>
struct TokenProduct {
    const STATE* const state;            // the warp's first row of the block's first head
    STATE (*tiles)[TILE_ROWS][KEY_DIM];  // the warp's
    u64* ready;
    const int warp, lane;

    __device__ TokenProduct(const Work& w, STATE (*of_warps)[STAGES][TILE_ROWS][KEY_DIM], u64 (*barriers)[STAGES])
        : state(w.row.folded > 0 ? w.t.state + w.state_at(u32(threadIdx.x) / 32 * WARP_ROWS) : nullptr), tiles(of_warps[threadIdx.x / 32]),
          ready(barriers[threadIdx.x / 32]), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    // ---- tiles ---------------------------------------------------------------------------------------------------------

    // By one lane, which publishes them. Behind that, all threads meet before one waits.
    __device__ void init() const {
        for (int s = 0; s < STAGES; ++s) init_barrier(&ready[s]);
    }
    __device__ void request(int tile) const {
        constexpr u32 BYTES = TILE_ROWS * ROW_BYTES;
        expect_bytes(&ready[tile % STAGES], BYTES);
        const STATE* from = state + (tile / HEAD_TILES * VALUE_DIM + tile % HEAD_TILES * TILE_ROWS) * KEY_DIM;
        stream_to_shared(tiles[tile % STAGES], from, BYTES, &ready[tile % STAGES]);
    }
    // By the lane that has published the barriers.
    __device__ void request_first() const {
        if (state && lane == 0)
            for (int tile = 0; tile < STAGES; ++tile) request(tile);
    }
    // Behind a tile's rows.
    __device__ void request_next(int tile) const {
        if (tile + STAGES >= TILES) return;
        __syncwarp();
        if (lane == 0) request(tile + STAGES);
    }
    __device__ const STATE (*arrived(int tile) const)[KEY_DIM] {
        wait_barrier(&ready[tile % STAGES], tile / STAGES % 2);
        return tiles[tile % STAGES];
    }

    // ---- rows ----------------------------------------------------------------------------------------------------------

    static constexpr int SUMS = WARP_ROWS / ROWS_AT_ONCE;
    __device__ bool has_row() const { return HALF_STATES ? lane < WARP_ROWS : lane % COPIES<ROW_LANES, SUMS> == 0; }
    // The lane's, of the slice.
    __device__ int row() const {
        return warp * WARP_ROWS + (HALF_STATES ? lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2
                                               : first_kept<ROW_LANES, SUMS>(lane) * ROWS_AT_ONCE + lane / ROW_LANES);
    }

    // ---- products ------------------------------------------------------------------------------------------------------

    // Of head n, with x in an upper and a lower part. Eight rows are the columns of a product whose rows are these parts, each several
    // times.
    // Lane 4 g + t has state row g, of which an even row's half of 128 bytes comes first where an odd one's comes last: it takes them from
    // different banks.
    __device__ float multiply(int n, const STATE (*parts_of_x)[KEY_DIM]) const {
        constexpr int PARTS = KEY_DIM / 32;
        const bool odd = lane / 4 % 2;
        const auto column = [=](int part) { return 8 * (lane % 4 + 4 * (part ^ int(odd))); };
        vec<u32, 4> x[PARTS][2];
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) x[part][i] = *reinterpret_cast<const vec<u32, 4>*>(parts_of_x[i] + column(part));
        float product = 0.0f;
#pragma unroll
        for (int head_tile = 0; head_tile < HEAD_TILES; ++head_tile) {
            const int tile = n * HEAD_TILES + head_tile;
            const STATE(*rows)[KEY_DIM] = arrived(tile);
#pragma unroll
            for (int row = 0; row < TILE_ROWS; row += 8) {
                Accumulator sums[2] = {};
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const auto s = *reinterpret_cast<const vec<u32, 4>*>(rows[row + lane / 4] + column(part));
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        mma_16bit<T>(sums[i], {x[part][0].v[2 * i], x[part][1].v[2 * i], x[part][0].v[2 * i + 1], x[part][1].v[2 * i + 1]},
                                     s.v[2 * i], s.v[2 * i + 1]);
                }
                // Of the lane's columns 2 t and 2 t + 1, the one whose halves came as those of its part of x.
                const float even = (sums[0].v[0] + sums[1].v[0]) + (sums[0].v[2] + sums[1].v[2]);
                const float other = (sums[0].v[1] + sums[1].v[1]) + (sums[0].v[3] + sums[1].v[3]);
                if (lane / 8 == (head_tile * TILE_ROWS + row) / 8) product = odd ? other : even;
            }
            request_next(tile);
        }
        return product;
    }

    // The same on ordinary units, by ROW_LANES lanes a row.
    __device__ float multiply(int n, const float* x_of_head) const {
        constexpr int VECTORS = KEY_DIM / (ROW_LANES * ROW_VECTOR), PASSES = TILE_ROWS / ROWS_AT_ONCE;
        const int row = lane / ROW_LANES, column = lane % ROW_LANES * ROW_VECTOR;
        float x[VECTORS][ROW_VECTOR], sums[SUMS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < ROW_VECTOR; i += 4) load_vector<4>(&x_of_head[v * ROW_LANES * ROW_VECTOR + column + i], &x[v][i]);
#pragma unroll
        for (int head_tile = 0; head_tile < HEAD_TILES; ++head_tile) {
            const int tile = n * HEAD_TILES + head_tile;
            const STATE(*rows)[KEY_DIM] = arrived(tile);
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                float sum = 0.0f;
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    float s[ROW_VECTOR];
                    load_vector<ROW_VECTOR>(rows[pass * ROWS_AT_ONCE + row] + column + v * ROW_LANES * ROW_VECTOR, s);
#pragma unroll
                    for (int i = 0; i < ROW_VECTOR; ++i) sum = fmaf(s[i], x[v][i], sum);
                }
                sums[head_tile * PASSES + pass] = sum;
            }
            request_next(tile);
        }
        sum_scattered<ROW_LANES>(sums, lane);
        return sums[0];
    }
};
