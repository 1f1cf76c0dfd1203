// What a step that answers from the read copy (delta_copy_read.cuh) has in shared memory, and how the copy is divided among lanes and
// requests.
#pragma once
#include "delta_copy.cuh"
#include "delta_gram.cuh"
#include "kda_read_adjoint.cuh"

constexpr int COPY_ROWS = 16;  // of a tile
constexpr int LANE_COLUMNS = KEY_DIM / 4, UNITS_A_LANE = LANE_COLUMNS / 8;
// Of a lane's columns, those that share a scale, in units of 8.
constexpr int SCALE_UNITS = (LANE_COLUMNS < COPY_BLOCK ? LANE_COLUMNS : COPY_BLOCK) / 8;
constexpr int LANE_SCALES = SCALE_UNITS > 0 ? UNITS_A_LANE / SCALE_UNITS : 1;
constexpr int UNIT_WORDS = READ_BITS / 4 > 0 ? READ_BITS / 4 : 1;  // words of 8 codes
// Bytes of a state row. Small heads have no copy, and units and scales of none.
constexpr int CODE_ROW = KEY_DIM * (READ_BITS ? READ_BITS : 8) / 8, SCALE_ROW = KEY_DIM < COPY_BLOCK ? 1 : KEY_DIM / COPY_BLOCK;

constexpr int MOST_VALUES = 512;        // in a row, of which every thread that appends it has 16 bytes at most
// A single token whose decays are per channel has an adjoint of its own, which leaves c as floats. Its values come as whole rows; those of
// others are an operand of tensor cores, for which rows begin in different banks.
constexpr bool KDA_TOKEN = PER_CHANNEL && READ_TOKENS == 1;
constexpr int VALUE_PITCH = KDA_TOKEN ? SLICE : SLICE + 8;
struct CopyReadInputs {
    Either<GRAM, GramInputs, Either<KDA_TOKEN, KdaAdjointInputs, ChainAdjointInputs>::type>::type adjoint;
    alignas(16) ACT v[HEADS][ENTRY_ROWS][VALUE_PITCH];  // ring rows, then tokens, then zeros
    Adjoint<ACT> results;
};

// Shared memory of a block of which BLOCKS_AN_SM fit: a multiprocessor has 228 KB, and a block takes one that it cannot use.
constexpr int SHARE_OF_SM = (228 * 1024 / BLOCKS_AN_SM - 1024) / 128 * 128;
constexpr int COPY_READ_LIMIT = SHARE_OF_SM < SHARED_LIMIT ? SHARE_OF_SM : SHARED_LIMIT;
// What is left of it for codes and scales. A part of a head's rows is one request: all of them, if those of all heads fit.
constexpr int PART_ROOM = COPY_READ_LIMIT - BARRIER_ROOM - int(sizeof(CopyReadInputs));
constexpr int PART_ROWS = HEADS * SLICE * (CODE_ROW + SCALE_ROW) <= PART_ROOM || SLICE % (COPY_ROWS * WARPS) ? SLICE : COPY_ROWS * WARPS;
constexpr int PARTS = HEADS * (SLICE / PART_ROWS), PARTS_THAT_FIT = PART_ROOM > 0 ? PART_ROOM / (PART_ROWS * (CODE_ROW + SCALE_ROW)) : 0;
constexpr int COPY_STAGES = PARTS_THAT_FIT < PARTS ? PARTS_THAT_FIT : PARTS;
constexpr bool READS_COPY = COPIED && TOKENS > 0 && WIDE && NARROW_INPUTS && KEY_DIM % 64 == 0 && KEY_DIM <= 128 &&
                            VALUE_DIM % SPLIT == 0 && SLICE % COPY_ROWS == 0 && SLICE <= MOST_VALUES && COPY_STAGES > 0;

struct CopyPart {
    alignas(16) u8 codes[PART_ROWS * CODE_ROW];
    alignas(16) u8 scales[PART_ROWS * SCALE_ROW];
};
struct CopyReadShared {
    alignas(128) CopyPart parts[COPY_STAGES > 0 ? COPY_STAGES : 1];
    alignas(16) CopyReadInputs in;
};
// On which they arrive, and a single token's values. A fold takes over the rest of the shared memory, but nothing else may lie where a
// barrier has been.
typedef u64 PartBarriers[(COPY_STAGES > 0 ? COPY_STAGES : 1) + KDA_TOKEN];
static_assert(!READS_COPY || (sizeof(PartBarriers) < BARRIER_ROOM && sizeof(CopyReadShared) + BARRIER_ROOM <= COPY_READ_LIMIT));
