// The answer of a step that leaves the checkpoint alone, from the checkpoint and the ring, without touching the state twice.
//
// Unrolling the recurrence from the token of interest backwards gives its adjoint. With x = q of token t, for j = t ... 1:
//
//     c_j = beta_j (k_j . x),   o += c_j v_j,   x = exp(g_j) * (x - c_j k_j)
//
// and finally o += S0 x, where S0 is the checkpoint: one product with the state per token, raw inputs alone in the ring,
// one formula for scalar and per-channel decays, and no exponent above zero. The x and c do not depend on S0, so the
// state's tiles are requested first and arrive while the warps work out the x of their tokens. A block may have several heads, so
// that more of the state stands behind each wait for them. The product of several tokens, of float32 states four or more,
// runs on tensor cores (delta_read_matrix.cuh), a single token mostly has a form of its own (delta_token_read.cuh).
#pragma once
#include "delta_read_tiles.cuh"
#include "ptx/bulk_copy.cuh"

// Tokens whose x fits into a lane's registers at once: all of them, or a half, a quarter...
constexpr int read_group(int tokens) { return tokens == 1 || tokens * LANE_COLS <= 64 ? tokens : read_group(tokens / 2); }

struct Read {
    const Tensors& t;
    const Work& w;
    ReadShared& shared;
    ReadInputs& in;
    ReadBarriers& ready;
    Either<GRAM, Gram<ACT, FloatAdjoint>, FloatChains>::type adjoint;
    ReadValues values;
    const int warp, lane, tokens;

    __device__ Read(const Work& work, ReadShared& memory, ReadBarriers& barriers)
        : t(work.t), w(work), shared(memory), in(memory.in), ready(barriers), adjoint(work, memory.in.adjoint, memory.in.results),
          values(work, memory.in.values, barriers.values, memory.in.results), warp(threadIdx.x / 32), lane(threadIdx.x % 32),
          tokens(work.row.tokens) {}

    __device__ MatrixRead<STATE, PARTS_AHEAD, ReadShared> matrix() const { return {w, shared, warp, lane}; }

    // ---- requests ------------------------------------------------------------------------------------------------------

    __device__ void request_tile(int tile) {
        u64* barrier = &ready.tiles[warp][tile % STAGES];
        constexpr u32 BYTES = TILE_ROWS * ROW_BYTES;
        expect_bytes(barrier, BYTES);
        const STATE* from = t.state + w.of_head(tile / HEAD_TILES).state_at(warp * WARP_ROWS + tile % HEAD_TILES * TILE_ROWS);
        stream_to_shared(shared.tiles[warp][tile % STAGES], from, BYTES, barrier);
    }

    // The ring's live rows and the step's k and v first, since the chains wait for them, then every warp's first tiles.
    __device__ void request() {
        if (lane == 0) {
            values.init();
            if (!MATRIX)
                for (int s = 0; s < STAGES; ++s) init_barrier(&ready.tiles[warp][s]);
            publish_barriers();
        }
        adjoint.request();
        values.request();
        if constexpr (MATRIX) {
            end_copies();
            matrix().request_first(w.row.folded > 0);
        } else if (w.row.folded > 0 && lane == 0) {
            for (int tile = 0; tile < min(STAGES, TILES); ++tile) request_tile(tile);
        }
    }

    // ---- the product with the checkpoint -------------------------------------------------------------------------------

    // Tokens of a group, state rows whose sums are reduced together.
    static constexpr int GROUP = read_group(READ_TOKENS), GROUPS = READ_TOKENS / GROUP;
    static constexpr int ROWS = TILE_ROWS * GROUP <= 32 ? TILE_ROWS : 32 / GROUP > 0 ? 32 / GROUP : 1;
    static_assert(GROUP * GROUPS == READ_TOKENS && TILE_ROWS % ROWS == 0, "groups and rows without a rest");

    __device__ void load_x(float (&x)[GROUP][LANE_COLS], int n, int group) const {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) load_columns(in.results.x[n][group * GROUP + i], lane, x[i]);
    }

    // Products of ROWS rows of a tile with the x of a group of tokens, to their rows of o.
    __device__ void multiply(const STATE (*tile)[KEY_DIM], const float (&x)[GROUP][LANE_COLS], float (*o)[SLICE]) const {
        constexpr int SUMS = ROWS * GROUP;
        float sums[SUMS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float s[LANE_COLS];
            load_columns(tile[r], lane, s);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) sums[r * GROUP + i] = dot(s, x[i]);
        }
        sum_scattered<32>(sums, lane);
        if (lane % COPIES<32, SUMS> == 0) {
#pragma unroll
            for (int n = 0; n < KEPT<32, SUMS>; ++n) {
                const int at = first_kept<32, SUMS>(lane) + n;
                o[at % GROUP][at / GROUP] = sums[n];
            }
        }
    }

    __device__ void read_state() {
        float x[GROUP][LANE_COLS];
#pragma unroll 1
        for (int tile = 0; tile < TILES; ++tile) {
            const int n = tile / HEAD_TILES, first_row = warp * WARP_ROWS + tile % HEAD_TILES * TILE_ROWS;
            if (GROUPS == 1 && tile % HEAD_TILES == 0) load_x(x, n, 0);
            wait_barrier(&ready.tiles[warp][tile % STAGES], tile / STAGES % 2);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                if constexpr (GROUPS > 1) load_x(x, n, group);
#pragma unroll
                for (int r = 0; r < TILE_ROWS; r += ROWS)
                    multiply(shared.tiles[warp][tile % STAGES] + r, x,
                             reinterpret_cast<float(*)[SLICE]>(&in.o[n][group * GROUP][first_row + r]));
            }
            __syncwarp();
            if (lane == 0 && tile + STAGES < TILES) request_tile(tile + STAGES);
        }
    }

    // ---- the answer ----------------------------------------------------------------------------------------------------

    // Of the product, at a value row of head n.
    __device__ float product(int n, int i, int row) const {
        return w.row.folded > 0 && i < tokens ? in.o[n][i][row] * (GRAM || SCALED_CHAINS ? in.results.unit[n][i] : 1.0f) : 0.0f;
    }
    // For the warp's value rows of head n, a lane each.
    __device__ void finish(int n) {
        for (int r = lane; r < WARP_ROWS; r += 32) {
            const int row = warp * WARP_ROWS + r;
            float o[READ_TOKENS];
#pragma unroll
            for (int i = 0; i < READ_TOKENS; ++i) o[i] = product(n, i, row);
            values.add_updates(o, n, row);
#pragma unroll
            for (int i = 0; i < READ_TOKENS; ++i)
                if (i < tokens) w.of_head(n).o(i)[row] = from_float<ACT>(o[i]);
        }
    }
};

__device__ __forceinline__ void read_step(const Work& w, ReadShared& shared, ReadBarriers& barriers) {
    Read read(w, shared, barriers);
    read.request();
    read.adjoint.run<MATRIX ? PARTS_AHEAD : 0>(1.0f, [] {});  // values are appended in the end
    __syncthreads();  // x and c
    read.values.wait();
    float updates[HEADS][READ_TOKENS];  // found while the state is on its way
    const int row = read.warp * WARP_ROWS + read.lane;
    if constexpr (UPDATES_FIRST)
#pragma unroll
        for (int n = 0; n < HEADS; ++n) {
#pragma unroll
            for (float& update : updates[n]) update = 0.0f;
            if (read.lane < WARP_ROWS) read.values.add_updates(updates[n], n, row);
        }
    if (w.row.folded > 0) {
        if constexpr (MATRIX)
            read.matrix().run();
        else
            read.read_state();
    }
    __syncwarp();  // o
    if constexpr (UPDATES_FIRST) {
#pragma unroll
        for (int n = 0; n < HEADS; ++n)
#pragma unroll
            for (int i = 0; i < READ_TOKENS; ++i)
                if (read.lane < WARP_ROWS && (READ_TOKENS == 1 || i < read.tokens))
                    w.of_head(n).o(i)[row] = from_float<ACT>(updates[n][i] + read.product(n, i, row));
    } else {
#pragma unroll 1
        for (int n = 0; n < HEADS; ++n) read.finish(n);
    }
}
