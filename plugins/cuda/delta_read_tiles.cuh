// Shared memory of a step that answers from the checkpoint (delta_read.cuh), and the tiles in which the state passes through it.
#pragma once
#include "delta_read_matrix.cuh"

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
// Where tiles are few, what rounding up and the values' barrier take counts, too.
constexpr int LARGE_TILE_ROOM = TILE_ROOM - 64;
constexpr int tiles_bytes(int rows) { return WARPS * (rows * ROW_BYTES + int(sizeof(u64))); }  // one of each warp

// A single token's product: eight lanes have a state row, 16 bytes at a time, and keep their sums until a head's rows are through.
// Tiles are small, and as many as fit are on their way.
constexpr int ROW_LANES = 8, ROWS_AT_ONCE = 32 / ROW_LANES, ROW_VECTOR = 16 / int(sizeof(STATE));
constexpr int small_tile_rows(int rows) { return rows > ROWS_AT_ONCE && rows * ROW_BYTES > 2048 ? small_tile_rows(rows / 2) : rows; }
constexpr int SMALL_TILE_ROWS = small_tile_rows(WARP_ROWS), SMALL_TILES = HEADS * (WARP_ROWS / SMALL_TILE_ROWS);
// What rounding up takes counts where inputs of scalar decays are wide.
constexpr int SMALL_TILE_ROOM = GRAM || PER_CHANNEL ? TILE_ROOM : LARGE_TILE_ROOM;
constexpr int SMALL_TILES_THAT_FIT = SMALL_TILE_ROOM > 0 ? SMALL_TILE_ROOM / tiles_bytes(SMALL_TILE_ROWS) : 0;
constexpr bool BY_EIGHTS = ONE_ROW_A_LANE && KEY_DIM % (ROW_LANES * ROW_VECTOR) == 0 && KEY_DIM <= 128 &&
                           power_of_two(WARP_ROWS) && WARP_ROWS % ROWS_AT_ONCE == 0 && SMALL_TILES_THAT_FIT >= 2;

// State rows of another tile: as many as shared memory holds, 4 KB at most.
constexpr int tile_rows(int rows) {
    const bool fits = rows > 0 && WARP_ROWS % rows == 0 && rows * ROW_BYTES <= 4096 && 2 * tiles_bytes(rows) <= LARGE_TILE_ROOM;
    return fits || rows == 0 ? rows : tile_rows(rows / 2);
}
// On tensor cores, parts that are on their way at once.
constexpr int parts_on_their_way(int parts) {
    return parts > 1 && parts * int(sizeof(MatrixPart)) > LARGE_TILE_ROOM ? parts_on_their_way(parts / 2) : parts;
}
constexpr int PARTS_AHEAD = MATRIX ? parts_on_their_way(MATRIX_PARTS) : 1;
// What entries add to the answer waits in registers for the product.
constexpr bool UPDATES_FIRST = ONE_ROW_A_LANE || (MATRIX && KDA_VERIFIES && WARP_ROWS <= 32);
constexpr bool TILES_FIT = MATRIX ? int(sizeof(MatrixPart)) <= LARGE_TILE_ROOM : BY_EIGHTS || tile_rows(32) > 0;
constexpr int TILE_ROWS = MATRIX || !TILES_FIT ? 1 : BY_EIGHTS ? SMALL_TILE_ROWS : tile_rows(32);
constexpr int HEAD_TILES = WARP_ROWS / TILE_ROWS, TILES = HEADS * HEAD_TILES;
constexpr int STAGES = MATRIX ? 1 : !BY_EIGHTS ? 2 : SMALL_TILES_THAT_FIT < SMALL_TILES ? SMALL_TILES_THAT_FIT : SMALL_TILES;

constexpr bool READS = !COPIED && TOKENS > 0 && !(TOKENS == 1 && WINDOW == 1) && WIDE && !DERIVED &&
                       VALUE_DIM % SPLIT == 0 && SLICE % 16 == 0 && TILES_FIT;
// Forms of a single token's: kda_read.cuh, delta_token_read.cuh.
constexpr bool KDA_READS_TOKEN = READS && BY_EIGHTS && PER_CHANNEL && KEY_DIM % 64 == 0;
constexpr bool READS_TOKEN = READS && BY_EIGHTS && !KDA_READS_TOKEN;

// On which tiles and the ring's values arrive. Nothing else may lie where a barrier has been: a step that folds after it has read has them
// apart from what the fold takes over.
struct ReadBarriers {
    u64 tiles[WARPS][STAGES], values;
};
static_assert(!ANSWERS_FIRST || sizeof(ReadBarriers) + sizeof(u64) <= BARRIER_ROOM, "room for barriers");  // the ring's, too
struct ReadShared {
    union {
        alignas(128) STATE tiles[MATRIX ? 1 : WARPS][STAGES][TILE_ROWS][KEY_DIM];
        MatrixPart parts[PARTS_AHEAD];
    };
    alignas(16) ReadInputs in;
    ReadBarriers barriers;
};
