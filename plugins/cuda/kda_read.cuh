// The answer to one token of Kimi Delta Attention from the checkpoint and the ring (formulas: delta_read.cuh), head after head.
//
// A block has several heads of a row. While it multiplies one's state, inputs of the next are on their way, and tiles follow each other
// across heads, so that memory is never without requests. Products of ring keys are formed by all warps, beside gates and what the token
// has to do with itself; the first warp walks along the ring alone. Every lane ends with one value row of its warp.
#pragma once
#include "delta_read.cuh"
#include "kda_read_adjoint.cuh"

constexpr bool HEAD_AFTER_HEAD = READS && PER_CHANNEL && BY_EIGHTS && ONE_ROW_A_LANE && KEY_DIM % 64 == 0 && KEY_DIM <= THREADS;
// 16-bit states are multiplied on tensor cores, by x in two parts.
constexpr bool HALF_STATES = sizeof(STATE) == 2 && TILE_ROWS % 8 == 0;

struct HeadReadShared {
    alignas(128) STATE tiles[WARPS][STAGES][TILE_ROWS][KEY_DIM];
    KdaAdjointInputs adjoint;
    alignas(16) RING ring_v[READ_HISTORY][SLICE];
    union {
        alignas(16) float x[KEY_DIM];
        alignas(16) STATE parts[HALF_STATES ? 2 : 1][KEY_DIM];  // of x times a power of two
    };
    float unit;
    u64 keys_ready, values_ready, tiles_ready[WARPS][STAGES];
};

template <typename T>
struct HeadRead : KdaAdjoint {
    const Work& block;
    HeadReadShared& shared;
    const STATE* state;  // of the warp's first row
    ACT value;           // of the lane's row

    __device__ HeadRead(const Work& w, HeadReadShared& memory)
        : KdaAdjoint(w, memory.adjoint, memory.keys_ready), block(w), shared(memory),
          state(w.t.state + w.state_at(u32(threadIdx.x) / 32 * WARP_ROWS)) {}

    // ---- requests ------------------------------------------------------------------------------------------------------

    static constexpr bool WHOLE = SPLIT == 1;         // value rows of the ring
    static constexpr int VALUES_FROM = THREADS - 64;  // the thread that requests the ring's values

    // Behind it, all threads meet before one waits.
    __device__ void init() const {
        if (lane) return;
        for (int s = 0; s < STAGES; ++s) init_barrier(&shared.tiles_ready[warp][s]);
        if (threadIdx.x == KEYS_FROM) init_barrier(&keys_ready);
        if (threadIdx.x == VALUES_FROM) init_barrier(&shared.values_ready);
        publish_barriers();
    }

    __device__ void request_tile(int tile) const {
        u64* barrier = &shared.tiles_ready[warp][tile % STAGES];
        constexpr u32 BYTES = TILE_ROWS * ROW_BYTES;
        expect_bytes(barrier, BYTES);
        const STATE* from = state + (tile / HEAD_TILES * VALUE_DIM + tile % HEAD_TILES * TILE_ROWS) * KEY_DIM;
        stream_to_shared(shared.tiles[warp][tile % STAGES], from, BYTES, barrier);
    }
    __device__ void request_first_tiles() const {
        if (block.row.folded > 0 && lane == 0)
            for (int tile = 0; tile < STAGES; ++tile) request_tile(tile);
    }

    __device__ void request(const Work& w) {
        own.request(w);
        request_beta(w);
        if (has_row()) value = w.v(0)[warp * WARP_ROWS + lane_row()];
        request_ring(w);
        if (WHOLE && threadIdx.x == VALUES_FROM) {
            expect_bytes(&shared.values_ready, history * int(sizeof(shared.ring_v[0])));
            for_ring_spans(w, [&](int to, int row, int count) {
                stream_to_shared(shared.ring_v[to], w.t.ring_v + w.ring_v_at(row), count * u32(sizeof(shared.ring_v[0])),
                                 &shared.values_ready);
            });
        }
        if constexpr (!WHOLE)
#pragma unroll 1
            for (int j = warp; j < history; j += WARPS)
                request_row<SLICE>(shared.ring_v[j], w.t.ring_v + w.ring_v_at(w.history_row(j)), lane);
    }

    // By the first warp, behind its walk.
    __device__ void store(float (&x)[LANE_COLS]) const {
        if constexpr (!HALF_STATES) {
            store_columns(shared.x, lane, x);
        } else {
            if constexpr (same_type<STATE, fp16>::value) {
                u32 largest = 0;
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
                const Rescaling to(__uint_as_float(__reduce_max_sync(~0u, largest)), 4);
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) x[i] *= to.factor;
                if (lane == 0) shared.unit = to.inverse;
            }
            float rest[LANE_COLS];
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) rest[i] = x[i] - to_float(from_float<STATE>(x[i]));
            store_columns(shared.parts[0], lane, x);
            store_columns(shared.parts[1], lane, rest);
        }
    }

    // ---- the answer ----------------------------------------------------------------------------------------------------

    // Rows of the warp that lanes end with, one each.
    static constexpr int SUMS = WARP_ROWS / ROWS_AT_ONCE;
    __device__ bool has_row() const { return HALF_STATES ? lane < WARP_ROWS : lane % COPIES<ROW_LANES, SUMS> == 0; }
    __device__ int lane_row() const {
        return HALF_STATES ? lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2 : first_kept<ROW_LANES, SUMS>(lane) * ROWS_AT_ONCE + lane / ROW_LANES;
    }

    // sum_j c_j v_j of the lane's row; appends the token's v.
    __device__ float updates(const Work& w) const {
        if (!has_row()) return 0.0f;
        const int row = warp * WARP_ROWS + lane_row();
        const float v = to_float(value);
        w.t.ring_v_out[w.ring_v_at(w.append_row(0)) + row] = from_float<RING>(v);
        float sum = in.c[history] * v;
        for (int j = 0; j < history; ++j) sum = fmaf(in.c[j], to_float(shared.ring_v[j][row]), sum);
        return sum;
    }

    // Behind a tile's rows.
    __device__ void request_next(int tile) const {
        if (tile + STAGES >= HEADS_A_BLOCK * HEAD_TILES) return;
        __syncwarp();
        if (lane == 0) request_tile(tile + STAGES);
    }
    __device__ const STATE (*arrived(int tile) const)[KEY_DIM] {
        wait_barrier(&shared.tiles_ready[warp][tile % STAGES], tile / STAGES % 2);
        return shared.tiles[warp][tile % STAGES];
    }

    // Eight rows are the columns of a product whose rows are the upper and the lower part of x, each several times. Lane 4 g + t has state
    // row g, of which an even row's half of 128 bytes comes first where an odd one's comes last: it takes them from different banks.
    __device__ float multiply_halves(int n) const {
        constexpr int PARTS = KEY_DIM / 32;
        const bool odd = lane / 4 % 2;
        const auto column = [=](int part) { return 8 * (lane % 4 + 4 * (part ^ int(odd))); };
        vec<u32, 4> x[PARTS][2];
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) x[part][i] = *reinterpret_cast<const vec<u32, 4>*>(shared.parts[i] + column(part));
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
        return same_type<T, fp16>::value ? product * shared.unit : product;
    }

    // ROW_LANES lanes have a row.
    __device__ float multiply_rows(int n) const {
        constexpr int VECTORS = KEY_DIM / (ROW_LANES * ROW_VECTOR), PASSES = TILE_ROWS / ROWS_AT_ONCE;
        const int row = lane / ROW_LANES, column = lane % ROW_LANES * ROW_VECTOR;
        float x[VECTORS][ROW_VECTOR], sums[SUMS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < ROW_VECTOR; i += 4) load_vector<4>(&shared.x[v * ROW_LANES * ROW_VECTOR + column + i], &x[v][i]);
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

    __device__ void run() {
        init();
        request(block);
        request_first_tiles();
        __syncthreads();  // barriers
#pragma unroll 1
        for (int n = 0; n < HEADS_A_BLOCK; ++n) {
            const Work w = block.of_head(n);
            float x[LANE_COLS];
            begin(w, x);
            multiply_keys(w, n % 2);
            if constexpr (!WHOLE) wait_copies();
            __syncthreads();
            if (warp == 0) walk(x), store(x);
            __syncthreads();
            if (WHOLE) wait_barrier(&shared.values_ready, n % 2);
            float o = updates(w);
            if (n + 1 < HEADS_A_BLOCK) {
                // The copy engine writes where threads have written decays.
                fence_async_proxy();
                __syncthreads();
                request(block.of_head(n + 1));
            }
            if (block.row.folded > 0) {
                if constexpr (HALF_STATES)
                    o += multiply_halves(n);
                else
                    o += multiply_rows(n);
            }
            if (has_row()) w.o(0)[warp * WARP_ROWS + lane_row()] = from_float<ACT>(o);
        }
    }
};
