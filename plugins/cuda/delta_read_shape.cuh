// How many tokens, ring rows and heads a block answers for, and by which form of the adjoint (delta_read.cuh).
#pragma once
#include "delta_lanes.cuh"

constexpr int READ_TOKENS = TOKENS > 0 ? TOKENS : 1;
// Ring rows that a step may find: with drafts a whole window, without them the token that fills it is folded.
constexpr int MOST_HISTORY = RING_ROWS > WINDOW ? WINDOW : WINDOW > 1 ? WINDOW - 1 : 1;

// Keys, queries and values have one 16-bit type.
constexpr bool NARROW_INPUTS = sizeof(ACT) == 2 && same_type<ACT, RING_K>::value && same_type<ACT, RING>::value;
// Products of all keys with each other may take the place of a walk along them.
constexpr bool GRAM_KEYS = NARROW_INPUTS && WIDE && !PER_CHANNEL && !DERIVED && KEY_DIM % 64 == 0;
// Heads for which a fold through shared memory (delta_fold.cuh, kda_fold.cuh) has room.
constexpr bool SMALL_HEAD = KEY_DIM <= 128 && SLICE <= 128 && SLICE % 16 == 0 && VALUE_DIM % SPLIT == 0;
// Steps of several tokens for which there is room for those products, too. 16-bit states pass through that fold with one chunk of 16
// entries, which the whole history must be.
constexpr bool FEW_NARROW_ENTRIES =
    TOKENS > 1 && GRAM_KEYS && SMALL_HEAD && MOST_HISTORY + READ_TOKENS <= 32 && (sizeof(STATE) == 4 || MOST_HISTORY <= 16);
// Steps of several tokens of Kimi Delta Attention whose ring kda_fold.cuh takes up as one chunk. Rows that absorb their tokens, which
// are rare among them, recur.
constexpr bool KDA_VERIFIES = TOKENS > 1 && PER_CHANNEL && NARROW_INPUTS && WIDE && !DERIVED && SMALL_HEAD && MOST_HISTORY <= 16 &&
                              KEY_DIM == 32 * WARPS;
// Without a copy both answer from the checkpoint as they find it, as steps with a copy do from the copy, and fold afterwards, but for folds
// that answer on their way (delta_fold_step.cuh).
constexpr bool ANSWERS_FIRST = !COPIED && (FEW_NARROW_ENTRIES || KDA_VERIFIES);
// A single token that fills the window is answered by that fold, from the new checkpoint on its way to memory.
constexpr bool FOLD_ANSWERS =
    !COPIED && TOKENS == 1 && WINDOW > 1 && RING_ROWS <= 16 && GRAM_KEYS && SMALL_HEAD && same_type<ACT, bf16>::value;
// Other steps answer rows that fold from the new checkpoint in registers.
constexpr bool READS_ALL = COPIED || ANSWERS_FIRST || FOLD_ANSWERS;

// Where only rows that do not fold are read: advance folds when history + T > WINDOW, and a variant serves more than
// TOKENS / 2 tokens; longer histories are folded. A single token that fills the window is folded as well.
constexpr int FEWEST_TOKENS = READ_TOKENS == 1 ? 2 : READ_TOKENS / 2 + 1;
constexpr int SHORT_HISTORY = WINDOW > FEWEST_TOKENS ? WINDOW - FEWEST_TOKENS : 1;
constexpr int READ_HISTORY = READS_ALL ? MOST_HISTORY : SHORT_HISTORY;
constexpr int HEADS = HEADS_A_BLOCK;
constexpr int KEYS = HEADS > HEADS_PER_KEY ? HEADS / HEADS_PER_KEY : 1;  // key heads of the block
constexpr int HEAD_WARPS = WARPS / HEADS;                                 // warps for the chains of a head
constexpr int CHAINS = (READ_TOKENS + HEAD_WARPS - 1) / HEAD_WARPS;       // tokens of a warp
static_assert(WARPS % HEADS == 0 && (HEADS_PER_KEY % HEADS == 0 || HEADS % HEADS_PER_KEY == 0), "heads of a block");

// Chains of 16-bit inputs have a channel a thread, and take softplus with few instructions; so does a recurrence that answers in their
// place, since rings have the same bits whichever it is.
constexpr bool GATES_AT_ONCE =
    NARROW_INPUTS && PER_CHANNEL && READ_TOKENS > 1 && KEY_DIM == THREADS && HEADS == 1 && READ_HISTORY <= THREADS;

// Entries that a step has room for, and the same in the blocks of 16 that a matrix product takes. Rows that do not fold keep within
// the window.
constexpr int ENTRY_ROWS = ((READS_ALL ? MOST_HISTORY + READ_TOKENS : WINDOW) + 3) / 4 * 4;
constexpr int ENTRIES = (ENTRY_ROWS + 15) / 16 * 16;
// The adjoint is formed from products of all keys with each other (delta_gram.cuh); otherwise by chains (delta_chains.cuh).
constexpr bool GRAM = GRAM_KEYS && ENTRIES <= 32;

constexpr int WARP_ROWS = SLICE / WARPS > 0 ? SLICE / WARPS : 1;
// A single token's value is one element a lane, in a register.
constexpr bool ONE_ROW_A_LANE = READ_TOKENS == 1 && WARP_ROWS <= 32;
constexpr bool power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }
// 16-bit states are multiplied with a single token on tensor cores, by x in two parts (delta_token_product.cuh).
constexpr bool HALF_STATES = sizeof(STATE) == 2 && (GRAM || PER_CHANNEL) && ONE_ROW_A_LANE && KEY_DIM % 64 == 0 && KEY_DIM <= 128 &&
                             power_of_two(WARP_ROWS) && WARP_ROWS % 8 == 0;

// c of the history, then of the tokens.
constexpr int MOST_SUMS = GRAM ? ENTRIES : READ_HISTORY + READ_TOKENS;
typedef float StepSums[HEADS][MOST_SUMS][READ_TOKENS];

// Rows that products take with so many entries. Those behind the entries are zeros, as memory left there might be no numbers.
__device__ __forceinline__ int padded_rows(int entries) { return min((entries + 15) / 16 * 16, ENTRY_ROWS); }

// The entry of block s of 16 whose row a lane names for load_transposed_matrices, or the last that there is room for.
__device__ __forceinline__ int lane_entry(int lane, int s) {
    const int entry = 16 * s + lane % 8 + lane / 16 * 8;
    return 16 * s + 16 <= ENTRY_ROWS ? entry : min(entry, ENTRY_ROWS - 1);
}
