// A fold whose outputs have been given before, with the state on its way through shared memory.
//
// A warp has 16 value rows of a head at a time. They are requested while a chunk is prepared, or while other warps are at work, and
// read twice, for their products with the keys and for their update: no thread holds more than a few columns of them, so that more
// blocks fit on a multiprocessor. Where a row has more entries than a chunk, which the engine's steps rarely have, a float32 state
// waits in shared memory from chunk to chunk, and chunks are prepared anew for every tile.
//
// An fp8 copy is quantised from the rows while they are there. An nvfp4 copy waits for the whole head, of which the last rows are
// there then; of the others, lanes read again what they have stored themselves.
#pragma once
#include "delta_chunk.cuh"
#include "delta_tile_copy.cuh"

struct FoldShared {
    alignas(128) STATE rows[WARPS][16][STAGED_PITCH];
    ChunkShared chunk;
    float largest[2][WARPS];  // magnitudes of even and odd heads: one barrier a head keeps them apart
};
// Elements of 16 bytes, and lanes that take a row.
constexpr int STATE_UNIT = 16 / int(sizeof(STATE)), STATE_LANES = KEY_DIM / STATE_UNIT;
// A 16-bit state must not be rounded between chunks.
constexpr bool STREAMS = COPIED && TOKENS > 0 && CHUNKED && KEY_DIM % COPY_COLUMNS == 0 && 32 % STATE_LANES == 0 &&
                         sizeof(FoldShared) <= SHARED_LIMIT && (ONE_CHUNK || sizeof(STATE) == 4);

struct Fold {
    typedef ChunkTile<false, true> Tile;
    const Work& block;
    FoldShared& shared;

    __device__ static int warp() { return threadIdx.x / 32; }
    __device__ static int lane() { return threadIdx.x % 32; }

    // The warp's rows of the tile of a head that begins at `first`, behind whatever the warp has done with those before.
    __device__ void request(const Work& w, int first) const {
        __syncwarp();
        const int row = lane() / STATE_LANES, column = lane() % STATE_LANES * STATE_UNIT;
        const STATE* from = opaque(w.t.state + w.state_at(first + 16 * warp() + row) + column);
#pragma unroll
        for (int r = 0; r < 16; r += 32 / STATE_LANES) copy_16_bytes(&shared.rows[warp()][row + r][column], from + r * KEY_DIM);
    }

    // The scale of the head's copy, from the largest magnitudes that threads have met; for all threads of the block.
    __device__ float head_scale(const Work& w, float largest) const {
        float* of_warps = shared.largest[w.n % 2];
        const u32 of_warp = __reduce_max_sync(~0u, __float_as_uint(largest));
        if (lane() == 0) of_warps[warp()] = __uint_as_float(of_warp);
        __syncthreads();
        float amax = of_warps[0];
#pragma unroll
        for (int i = 1; i < WARPS; ++i) amax = larger_magnitude(amax, of_warps[i]);
        const float scale = nvfp4_head_scale(to_float(from_float<STATE>(amax)));
        if (threadIdx.x == 0) *w.copy().head_scale = scale;
        return scale;
    }

    // The copy of a tile whose rows lie at `from`, `pitch` elements apart.
    __device__ void copy_rows(const Tile& tile, float scale, const STATE* from, int pitch) const {
        const TileCopy copy{tile.w.copy(), scale, tile.row(), tile.t()};
#pragma unroll 1
        for (int pair = 0; pair < PAIRS; pair += COPY_PAIRS) {
            float x[COPY_PAIRS][2][4];
#pragma unroll
            for (int n = 0; n < 2 * COPY_PAIRS; ++n) load_vector<4>(from + n % 2 * 8 * pitch + (pair + n / 2) * 16, x[n / 2][n % 2]);
            copy.store(x, pair);
        }
    }
    __device__ void copy_shared(const Tile& tile, float scale) const { copy_rows(tile, scale, tile.own_staged(), STAGED_PITCH); }
    __device__ void copy_stored(const Tile& tile, float scale) const {
        copy_rows(tile, scale, tile.w.t.state_out + tile.w.state_at(tile.row()) + 4 * tile.t(), KEY_DIM);
    }

    // The warp's rows of a head that is folded, from the last tile to the first.
    __device__ void copy_head(Tile& tile) const {
        const float scale = head_scale(tile.w, tile.largest);
        tile.thread = opaque(int(threadIdx.x));
        bool last = true;
#pragma unroll 1
        for (tile.first -= TILE_VALUES; tile.first >= 0; tile.first -= TILE_VALUES) {
            if (!tile.active()) continue;
            if (last) {
                copy_shared(tile, scale);
                request_next_head(tile.w.n + 1);
            } else {
                copy_stored(tile, scale);
            }
            last = false;
        }
    }
    __device__ void request_next_head(int n) const {
        if (n < HEADS_A_BLOCK && block.row.folded > 0) request(block.of_head(n), 0);
    }

    __device__ void run() const {
        const bool stored = block.row.folded > 0;
        const int all = block.row.history() + block.row.tokens;
        const bool single = ONE_CHUNK || all <= CHUNK;
        Work w = block.of_head(0);
        Tile tile{w, shared.chunk, 0, false, int(threadIdx.x), shared.rows[0][0]};
        if (stored && tile.active()) request(w, 0);
#pragma unroll 1
        for (; w.n < HEADS_A_BLOCK; ++w.n) {
            Chunk chunk{w, shared.chunk, false, 0};
            const auto prepare = [&](int from) {
                tile.thread = opaque(int(threadIdx.x));
                tile.prepare(chunk, 0, from, min(from + CHUNK, all), all);
                __syncthreads();  // the inverse
            };
            if (single) prepare(0);
            tile.largest = 0.0f;
#pragma unroll 1
            for (tile.first = 0; tile.first < SLICE; tile.first += TILE_VALUES) {
                tile.holds = stored;
#pragma unroll 1
                for (int from = 0; from < all; from += CHUNK) {
                    if (!single) prepare(from);
                    if (!tile.active()) continue;
                    if (from == 0) {
                        wait_copies();
                        __syncwarp();
                    }
                    tile.fold(shared.chunk.inputs[0], min(CHUNK, all - from), from + CHUNK >= all);
                    if (ONE_CHUNK) break;
                }
                if (!tile.active()) continue;
                if constexpr (READ_BITS == 8) copy_shared(tile, 0.0f);
                if (tile.next_active()) {
                    if (stored) request(w, tile.first + TILE_VALUES);
                } else if (READ_BITS == 8) {
                    request_next_head(w.n + 1);
                }
            }
            if constexpr (READ_BITS == 4) copy_head(tile);
        }
    }
};
