// A fold with the state on its way through shared memory. Outputs have been given before, or are those of a single token (FOLD_ANSWERS), or
// of a step that finds the ring folded (FOLD_ANSWERS_STEP).
//
// A warp has 16 value rows of a head at a time. They are requested while a chunk is prepared, or while other warps are at work, and
// read twice, for their products with the keys and for their update: no thread holds more than a few columns of them, so that more
// blocks fit on a multiprocessor. Where a row has more entries than a chunk, which the engine's steps rarely have, the next chunk
// finds a float32 state in the L2 cache, where the one before has left it.
//
// An fp8 copy is quantised from the rows while they are there. An nvfp4 copy waits for the whole head, of which the last rows are
// there then; the others come back from the L2 cache.
#pragma once
#include "delta_chunk.cuh"
#include "delta_fold_tile.cuh"
#include "delta_tile_copy.cuh"

// 16 bits would have to wait in shared memory for another chunk.
constexpr bool SINGLE_CHUNK = ONE_CHUNK || sizeof(STATE) == 2;

struct FoldShared {
    alignas(128) STATE rows[WARPS][16][STAGED_PITCH];
    ChunkShared chunk;
    float largest[2][WARPS];  // magnitudes of even and odd heads: one barrier a head keeps them apart
};
// Elements of 16 bytes, and lanes that take a row.
constexpr int STATE_UNIT = 16 / int(sizeof(STATE)), STATE_LANES = KEY_DIM / STATE_UNIT;
constexpr bool STREAMS = FOLDS_APART && KEY_DIM % 64 == 0 && 32 % STATE_LANES == 0 &&
                         sizeof(FoldShared) + BARRIER_ROOM <= SHARED_LIMIT;
static_assert(STREAMS || !FOLDS_BF16, "keys have been interleaved");

template <bool>
struct FoldTiles {
    typedef ChunkTile<false, true> type;
};
template <>
struct FoldTiles<true> {
    typedef FoldTile<bf16> type;
};

struct Fold {
    typedef FoldTiles<FOLDS_BF16>::type Tile;
    const Work& block;
    FoldShared& shared;

    __device__ int entries() const { return block.row.history() + block.row.tokens; }
    __device__ bool single() const { return ONE_CHUNK || entries() <= CHUNK; }  // one chunk is all of them
    __device__ static int warp() { return threadIdx.x / 32; }
    __device__ static int lane() { return threadIdx.x % 32; }

    // Rows of the warp's, behind whatever it has done with those before.
    __device__ void request(const STATE* rows) const {
        __syncwarp();
        request_rows<16>(rows, 0);
    }
    // ROWS of them, from row `first` of those at `rows` on.
    template <int ROWS>
    __device__ void request_rows(const STATE* rows, int first) const {
        const int lane = opaque(int(threadIdx.x)) % 32, row = first + lane / STATE_LANES, column = lane % STATE_LANES * STATE_UNIT;
        const STATE* from = opaque(rows + row * KEY_DIM + column);
#pragma unroll
        for (int r = 0; r < ROWS; r += 32 / STATE_LANES)
            copy_16_bytes(&shared.rows[warp()][row + r][staged_column(row + r, column)], from + r * KEY_DIM);
    }

    // The scale of the head's copy, from the largest magnitudes that threads have met; for all threads of the block.
    __device__ HeadScale head_scale(const Work& w, float largest) const {
        float* of_warps = shared.largest[w.n % 2];
        const u32 of_warp = __reduce_max_sync(~0u, __float_as_uint(largest));
        if (lane() == 0) of_warps[warp()] = __uint_as_float(of_warp);
        __syncthreads();
        float amax = of_warps[0];
#pragma unroll
        for (int i = 1; i < WARPS; ++i) amax = larger_magnitude(amax, of_warps[i]);
        const HeadScale scale(to_float(from_float<STATE>(amax)));
        if (threadIdx.x == 0) *w.copy().head_scale = scale.value;
        return scale;
    }

    __device__ TileCopy copy_of(const Tile& tile, const HeadScale& scale) const {
        return {tile.w.copy(), scale, tile.first + 16 * warp(), lane()};
    }
    // The copy of a tile, of fp8.
    __device__ void copy_tile(const Tile& tile) const {
        __syncwarp();
        const TileCopy copy = copy_of(tile, HeadScale());
#pragma unroll 1
        for (int pass = 0; pass < TileCopy::PASSES; ++pass) copy.store(shared.rows[warp()], pass);
    }
    // The copy of the warp's rows of a head that is folded, of nvfp4, from the last tile, which is still there, to the first. Rows of
    // the next tile, and in the end of the next head, are requested as room becomes free, before them that head's values.
    __device__ void copy_head(Tile& tile) const {
        const HeadScale scale = head_scale(tile.w, tile.largest);
        tile.thread = opaque(int(threadIdx.x));
        if (PREPARED_HEADS > 1 && tile.w.n + 1 < HEADS_A_BLOCK && single()) request_values(tile.w.n + 1);
#pragma unroll 1
        for (tile.first -= TILE_VALUES; tile.first >= 0; tile.first -= TILE_VALUES) {
            const bool active = tile.active();
            if (!active && tile.first > 0) continue;
            const TileCopy copy = copy_of(tile, scale);
            const STATE* next = active ? next_quantised(tile) : nullptr;
#pragma unroll 1
            for (int pass = 0; pass < TileCopy::PASSES; ++pass) {
                wait_for_copies<TileCopy::PASSES - 1>();
                __syncwarp();
                if (active) copy.store(shared.rows[warp()], pass);
                __syncwarp();
                if (next) request_rows<TileCopy::PASS_ROWS>(next, TileCopy::PASS_ROWS * pass);
                end_copies();
            }
        }
    }
    // The warp's first rows, if they exist, in as many groups as copy_head has for those of the next head.
    __device__ void request_in_passes(const STATE* rows, bool exist) const {
#pragma unroll
        for (int pass = 0; pass < TileCopy::PASSES; ++pass) {
            if (exist) request_rows<TileCopy::PASS_ROWS>(rows, TileCopy::PASS_ROWS * pass);
            end_copies();
        }
    }
    // The warp's rows of the tile that begins at `first`: what the chunk at entry `from` finds.
    __device__ const STATE* rows_at(const Work& w, int first, int from) const {
        return (from > 0 ? w.t.state_out : w.t.state) + w.state_at(first + 16 * warp());
    }
    // Its first rows of head n, if there are any that can come ahead of its inputs.
    __device__ const STATE* first_rows(int n) const {
        return n < HEADS_A_BLOCK && block.row.folded > 0 && single() ? rows_at(block.of_head(n), 0, 0) : nullptr;
    }
    // What its rows in shared memory give way to once they are folded, if there is something. `last`: no chunk follows. nvfp4's last
    // tile has to be quantised first.
    __device__ const STATE* next_folded(const Tile& tile, int from, bool last) const {
        if (tile.next_active()) return tile.holds ? rows_at(tile.w, tile.first + TILE_VALUES, from) : nullptr;
        return READ_BITS != 4 && last ? first_rows(tile.w.n + 1) : nullptr;
    }
    // ... and once they are quantised.
    __device__ const STATE* next_quantised(const Tile& tile) const {
        if (tile.first > 0) return tile.w.t.state_out + tile.w.state_at(tile.first - TILE_VALUES + 16 * warp());
        return first_rows(tile.w.n + 1);
    }

    // The head's values, where the rest of its only chunk has been prepared with that of another head.
    __device__ void request_values(int n) const {
        Chunk{block.of_head(n), shared.chunk, false, opaque(int(threadIdx.x))}.request_values(shared.chunk.inputs[0], 0, entries());
        end_copies();
    }
    // The warp that finishes the token's query, for all heads of the block: it has neither gates nor the triangular system.
    static constexpr int QUERY_WARP = 1;
    // A chunk's inputs, the warp's first rows if nobody has requested them, and what the chunk derives of its inputs, while rows arrive.
    __device__ void prepare(Tile& tile, int from) const {
        const bool rows = tile.holds && tile.active();
        const int count = SINGLE_CHUNK ? entries() : min(CHUNK, entries() - from);
        tile.thread = opaque(int(threadIdx.x));
        Chunk chunk{tile.w, shared.chunk, false, tile.thread};
        if constexpr (FOLDS_BF16) {
            if (tile.w.n > 0 || from > 0) __syncthreads();  // all warps have done with the chunk before
            float query[LANE_COLS] = {};
            const bool asked = FOLD_ANSWERS && warp() == QUERY_WARP && block.row.absorbs();
            if (asked) load_columns(tile.w.q(0), lane(), query);
            chunk.request(shared.chunk.inputs[0], from, count);
            chunk.request_gates(from, count);
            end_copies();
            request_in_passes(rows_at(tile.w, 0, from), rows);
            if (asked) finish_query(query), store_columns(shared.chunk.query, lane(), query);
            tile.thread = opaque(int(threadIdx.x));
            tile.template prepare_requested<TileCopy::PASSES>(chunk, 0, from, from + count, entries());
        } else {
            if (rows && !(tile.w.n > 0 && single())) request(rows_at(tile.w, 0, from));
            tile.prepare(chunk, 0, from, from + count, entries());
        }
    }

    __device__ void run() const {
        const ChunkInputs& in = shared.chunk.inputs[0];
        Work w = block.of_head(0);
        Tile tile{w, shared.chunk, 0, int(threadIdx.x), false, shared.rows[0][0]};
#pragma unroll 1
        for (; w.n < HEADS_A_BLOCK; ++w.n) {
#pragma unroll 1
            for (int from = 0; from < entries(); from += CHUNK) {
                const bool last = SINGLE_CHUNK || from + CHUNK >= entries();
                tile.first = 0, tile.largest = 0.0f;
                tile.holds = block.row.folded > 0 || from > 0;
                if (PREPARED_HEADS == 1 || w.n == 0 || !single()) {
                    prepare(tile, from);
                } else if (READ_BITS != 4) {
                    __syncthreads();  // all warps have done with the values before
                    request_values(w.n);
                }
#pragma unroll 1
                for (; tile.first < SLICE; tile.first += TILE_VALUES) {
                    wait_copies();
                    Sum products[BLOCKS] = {};
                    if (tile.active()) {
                        __syncwarp();
                        tile.read_chunk(in, entries() - from, products);
                    }
                    if (tile.first == 0) __syncthreads();  // the inverse and values
                    if (!tile.active()) continue;
                    tile.take_chunk(in, entries() - from, products);
                    if (READ_BITS == 8 && last) copy_tile(tile);
                    if (const STATE* rows = next_folded(tile, from, last)) request(rows);
                }
                if (SINGLE_CHUNK) break;
            }
            if constexpr (READ_BITS == 4) copy_head(tile);
        }
    }
};
