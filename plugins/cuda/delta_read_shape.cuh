// How many tokens, ring rows and heads a block answers for, and by which form of the adjoint (delta_read.cuh).
#pragma once
#include "delta_lanes.cuh"

constexpr int READ_TOKENS = TOKENS > 0 ? TOKENS : 1;
// Ring rows that a step may find: with drafts a whole window, without them the token that fills it is folded.
constexpr int MOST_HISTORY = RING_ROWS > WINDOW ? WINDOW : WINDOW > 1 ? WINDOW - 1 : 1;
// Without a copy only rows that do not fold are read. advance folds when history + T > WINDOW, and a variant serves more than
// TOKENS / 2 tokens; longer histories are folded. A single token that fills the window is folded as well.
constexpr int FEWEST_TOKENS = READ_TOKENS == 1 ? 2 : READ_TOKENS / 2 + 1;
constexpr int SHORT_HISTORY = WINDOW > FEWEST_TOKENS ? WINDOW - FEWEST_TOKENS : 1;
constexpr int READ_HISTORY = COPIED ? MOST_HISTORY : SHORT_HISTORY;
constexpr int HEADS = HEADS_A_BLOCK;
constexpr int KEYS = HEADS > HEADS_PER_KEY ? HEADS / HEADS_PER_KEY : 1;  // key heads of the block
constexpr int HEAD_WARPS = WARPS / HEADS;                                 // warps for the chains of a head
constexpr int CHAINS = (READ_TOKENS + HEAD_WARPS - 1) / HEAD_WARPS;       // tokens of a warp
static_assert(WARPS % HEADS == 0 && (HEADS_PER_KEY % HEADS == 0 || HEADS % HEADS_PER_KEY == 0), "heads of a block");

// Keys, queries and values have one 16-bit type.
constexpr bool NARROW_INPUTS = sizeof(ACT) == 2 && same_type<ACT, RING_K>::value && same_type<ACT, RING>::value;
// Entries that a step has room for, and the same in the blocks of 16 that a matrix product takes. Without a copy, rows that do not
// fold keep within the window.
constexpr int ENTRY_ROWS = ((COPIED ? MOST_HISTORY + READ_TOKENS : WINDOW) + 3) / 4 * 4;
constexpr int ENTRIES = (ENTRY_ROWS + 15) / 16 * 16;
// The adjoint is formed from products of all keys with each other (delta_gram.cuh); otherwise by chains (delta_chains.cuh).
constexpr bool GRAM = NARROW_INPUTS && WIDE && !PER_CHANNEL && !DERIVED && KEY_DIM % 64 == 0 && ENTRIES <= 32;

// c of the history, then of the tokens.
constexpr int MOST_SUMS = GRAM ? ENTRIES : READ_HISTORY + READ_TOKENS;
typedef float StepSums[HEADS][MOST_SUMS][READ_TOKENS];
