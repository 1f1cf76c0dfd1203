// Shared memory of a step that answers from the checkpoint (delta_read.cuh), and the tiles in which the state passes through it.
#pragma once
#include "delta_gram.cuh"
#include "delta_read_values.cuh"

// The product runs on tensor cores, of which a warp takes 8 rows at a time straight from memory.
constexpr int MATRIX_ROWS = 8;
constexpr bool MATRIX = GRAM && READ_TOKENS >= 4 && sizeof(STATE) == 4 && KEY_DIM <= 128 && WARP_ROWS % MATRIX_ROWS == 0;

// Everything but the state's tiles.
struct ReadInputs {
    union {
        Either<GRAM, GramInputs, ChainInputs>::type adjoint;
        alignas(16) float o[HEADS][READ_TOKENS][SLICE];
    };
    ValueInputs values;
    FloatAdjoint results;
};

constexpr int ROW_BYTES = KEY_DIM * int(sizeof(STATE));
// For tiles and their barriers: not for inputs, nor for the barrier of the chains' ring in front of them.
constexpr int TILE_ROOM = SHARED_LIMIT - BARRIER_ROOM - int(sizeof(ReadInputs));
constexpr int tiles_bytes(int rows) { return WARPS * (rows * ROW_BYTES + int(sizeof(u64))); }  // one of each warp

// A single token's product: eight lanes have a state row, 16 bytes at a time, and keep their sums until a head's rows are through.
// Tiles are small, and as many as fit are on their way.
constexpr int ROW_LANES = 8, ROWS_AT_ONCE = 32 / ROW_LANES, ROW_VECTOR = 16 / int(sizeof(STATE));
constexpr bool power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }
constexpr int small_tile_rows(int rows) { return rows > ROWS_AT_ONCE && rows * ROW_BYTES > 2048 ? small_tile_rows(rows / 2) : rows; }
constexpr int SMALL_TILE_ROWS = small_tile_rows(WARP_ROWS), SMALL_TILES = HEADS * (WARP_ROWS / SMALL_TILE_ROWS);
constexpr int SMALL_TILES_THAT_FIT = TILE_ROOM > 0 ? TILE_ROOM / tiles_bytes(SMALL_TILE_ROWS) : 0;
constexpr bool BY_EIGHTS = READ_TOKENS == 1 && KEY_DIM % (ROW_LANES * ROW_VECTOR) == 0 && KEY_DIM <= 128 &&
                           power_of_two(WARP_ROWS) && WARP_ROWS % ROWS_AT_ONCE == 0 && SMALL_TILES_THAT_FIT >= 2;

// State rows of another tile: as many as shared memory holds, 4 KB at most.
constexpr int tile_rows(int rows) {
    return rows == 0                                                                                 ? 0
           : WARP_ROWS % rows == 0 && rows * ROW_BYTES <= 4096 && 2 * tiles_bytes(rows) <= TILE_ROOM ? rows
                                                                                                     : tile_rows(rows / 2);
}
constexpr bool TILES_FIT = MATRIX ? TILE_ROOM >= 2 * (ROW_BYTES + WARPS * int(sizeof(u64))) : BY_EIGHTS || tile_rows(32) > 0;
constexpr int TILE_ROWS = MATRIX || !TILES_FIT ? 1 : BY_EIGHTS ? SMALL_TILE_ROWS : tile_rows(32);
constexpr int HEAD_TILES = WARP_ROWS / TILE_ROWS, TILES = HEADS * HEAD_TILES;
constexpr int STAGES = !BY_EIGHTS ? 2 : SMALL_TILES_THAT_FIT < SMALL_TILES ? SMALL_TILES_THAT_FIT : SMALL_TILES;

constexpr bool READS = !COPIED && TOKENS > 0 && !(TOKENS == 1 && WINDOW == 1) && WIDE && !DERIVED &&
                       VALUE_DIM % SPLIT == 0 && SLICE % 16 == 0 && TILES_FIT;

struct ReadShared {
    alignas(128) STATE tiles[MATRIX ? 1 : WARPS][STAGES][TILE_ROWS][KEY_DIM];
    alignas(16) ReadInputs in;
    u64 tile_ready[WARPS][STAGES];
};
