// Compile-time sizes of mamba2_step, from its macros:
//     ACT, STATE (element types; the ring has ACT), HEADS, HEAD_DIM, STATE_SIZE, GROUPS, RING_ROWS, DT_MIN, DT_MAX,
//     TOKENS (T, 1 to 16), ENTRIES (most history and tokens of a row), HEADS_A_BLOCK (most heads of a group that a block may
//     take: their shares of the sequence lie in shared memory), WARPS_AN_SM (resident warps to compile for), STOCHASTIC (1: a
//     16-bit state is rounded at random).
#pragma once
#include "types.cuh"

constexpr int INNER = HEADS * HEAD_DIM;
constexpr int HEADS_A_GROUP = HEADS / GROUPS;
constexpr int WARPS = HEAD_DIM / 16;
constexpr bool WIDE_STATE = sizeof(STATE) == 4;

// Blocks of 32 columns in a row of the state, and in the chunk that a warp requests at once (4 KB, if the row has as much).
constexpr int BLOCKS = STATE_SIZE / 32;
constexpr int CHUNK_LIMIT = WIDE_STATE ? 2 : 4;
constexpr int BLOCKS_A_CHUNK = BLOCKS < CHUNK_LIMIT ? BLOCKS : CHUNK_LIMIT;
constexpr int CHUNKS = BLOCKS / BLOCKS_A_CHUNK;
constexpr int CHUNK_COLUMNS = 32 * BLOCKS_A_CHUNK, HEAD_SIZE = HEAD_DIM * STATE_SIZE;

// Tiles of 8 tokens; blocks of 16 sequence entries; registers that hold one value for each entry, lane by lane.
constexpr int TOKEN_TILES = (TOKENS + 7) / 8;
constexpr int ENTRY_BLOCKS = (ENTRIES + 15) / 16;
constexpr int ENTRY_LANES = (ENTRIES + 31) / 32;

static_assert(HEAD_DIM % 16 == 0 && STATE_SIZE % (32 * BLOCKS_A_CHUNK) == 0, "mamba2_recurrent takes this shape");
