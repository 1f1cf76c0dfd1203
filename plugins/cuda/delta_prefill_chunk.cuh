// Sizes of the delta rule's prefill, its shared memory, and which entries a chunk has.
//
// Macros: those of delta_shape.cuh (HEADS_A_BLOCK 1, DERIVED 0, ALIGNED 1, RING the same as ACT, SPLIT the blocks of a head),
// ROW_WARPS (warps of a block that hold 16 value rows each) and BLOCKS_AN_SM (resident blocks to compile for).
#pragma once
#include "bf16_parts.cuh"
#include "delta_shape.cuh"
#include "lane_sums.cuh"
#include "shared_tile.cuh"

constexpr int CHUNK = 16;  // entries
constexpr int TILES = CHUNK / 8, TRIANGLE_TILES = 3;
// Decays per channel are made by a warp for 32 channels.
constexpr int MAKER_WARPS = PER_CHANNEL ? KEY_DIM / 32 : 2, BLOCK_THREADS = 32 * (ROW_WARPS + MAKER_WARPS);
constexpr int KEY_UNITS = KEY_DIM / UNIT, KEY_BLOCKS = KEY_DIM / 32;
// bfloat16 parts of what becomes state: all of a float, or more than a 16-bit state keeps.
constexpr int STATE_PARTS = sizeof(STATE) == 4 ? 3 : 2;
// Keys lie in shared memory as they come, or in bfloat16 parts when decays have been multiplied into them: those that read the
// state, and those that are written.
constexpr int READ_PARTS = PER_CHANNEL ? STATE_PARTS : 1, WRITTEN_PARTS = PER_CHANNEL ? STATE_PARTS : 1;
static_assert(!PER_CHANNEL || same_type<ACT, bf16>::value, "delta_step takes this type");
static_assert(SLICE == 16 * ROW_WARPS && VALUE_DIM == SLICE * SPLIT && KEY_DIM % 64 == 0 && sizeof(ACT) == 2,
              "delta_step takes this shape");

// The same for all lanes, which the compiler does not see in the index of a thread.
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, int(threadIdx.x / 32), 0); }

// Rows of a chunk as the second operand of products over 16 of their columns from `unit` on: v[2 m] and v[2 m + 1] have columns
// 2 t, 2 t + 1 and 8 + 2 t, 9 + 2 t of row 8 m + g.
template <int UNITS>
__device__ __forceinline__ Matrices load_rows(const uint4* units, u32 unit, u32 lane) {
    return load_matrices(units + unit_at<UNITS>(lane / 16 * 8 + lane % 8, unit + lane / 8 % 2));
}

// Two accumulators as the first operand of a product over their columns, in parts.
template <int N>
__device__ __forceinline__ void split_operand(Parts<N> (&out)[4], const Accumulator& first, const Accumulator& second) {
    out[0] = split_pair<N>(first.v[0], first.v[1]), out[1] = split_pair<N>(first.v[2], first.v[3]);
    out[2] = split_pair<N>(second.v[0], second.v[1]), out[3] = split_pair<N>(second.v[2], second.v[3]);
}

// A matrix [CHUNK, CHUNK] without what is above its diagonal, in bfloat16 parts: tiles (0, 0), (1, 0) and (1, 1) of 8 x 8.
template <int PARTS>
struct alignas(16) Triangle {
    u32 v[PARTS][TRIANGLE_TILES][8][4];  // two neighbouring columns in each

    __device__ static constexpr int tile(int i, int j) { return i * (i + 1) / 2 + j; }

    // Columns 2 t and 2 t + 1 of row g of each tile of a part; the fourth matrix is the third again.
    __device__ __forceinline__ Matrices load(int part, u32 lane) const {
        return load_matrices(&v[part][0][0][0] + 4 * (lane < 24 ? lane : lane - 8));
    }
    // Two neighbours of row g.
    __device__ __forceinline__ void store(int tile, u32 lane, float first, float second) {
        const Parts<PARTS> parts = split_pair<PARTS>(first, second);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) v[p][tile][lane / 4][lane % 4] = parts.v[p];
    }
};

// Keys or queries of a chunk.
typedef uint4 EntryUnits[CHUNK * KEY_UNITS];

// What the makers of a chunk leave to the warps that hold the state.
struct Stage {
#if PER_CHANNEL
    EntryUnits written[WRITTEN_PARTS];  // keys with the decays to the chunk's end
    float decay[KEY_DIM];               // of the whole chunk
#else
    EntryUnits k[1], q;
    float to_end[CHUNK];  // the decay from behind an entry to the chunk's end
    float decay;
#endif
    Triangle<STATE_PARTS> inverse;  // of I + A
    Triangle<2> reads;              // M
    float value_gain[CHUNK], key_gain[CHUNK], query_gain[CHUNK];
};

struct Shared {
    Stage stage[2];  // of chunks of even and of odd index
#if PER_CHANNEL
    EntryUnits k[READ_PARTS], q;  // with the decays from the chunk's start; for two chunks there is no room
#else
    double sums[CHUNK];  // G, in powers of 2, from one maker to the other
#endif
    float lower[CHUNK][CHUNK];  // A
};
static_assert(sizeof(Shared) <= SHARED_LIMIT - 64, "the block needs too much shared memory");

// Two operands of a product over columns (16 entries) or over entries (16 columns): v[2 m], v[2 m + 1] belong to the m-th.
template <int STORED>
struct KeyOperands {
    static constexpr int PARTS = STORED == 1 ? EXACT_PARTS<ACT> : STORED;
    Parts<PARTS> v[4];

    template <typename Load>
    __device__ __forceinline__ KeyOperands(const EntryUnits (&keys)[STORED], Load load) {
#pragma unroll
        for (int p = 0; p < STORED; ++p) {
            const Matrices block = load(keys[p]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (STORED == 1)
                    v[i] = exact_parts<ACT>(block.v[i]);
                else
                    v[i].v[p] = block.v[i];
            }
        }
    }
};

// How a row's sequence is divided: the history, then the tokens.
__device__ __forceinline__ int history_chunks(const Row& row) { return (row.history() + CHUNK - 1) / CHUNK; }
__device__ __forceinline__ int chunk_count(const Row& row) { return history_chunks(row) + (row.tokens + CHUNK - 1) / CHUNK; }
// Chunks that the checkpoint has taken up when it is written.
__device__ __forceinline__ int folded_chunks(const Row& row) {
    return !row.folds() ? 0 : row.absorbs() ? chunk_count(row) : history_chunks(row);
}

// Entries first ... first + count - 1 of the history, or tokens of this step.
struct Chunk {
    bool tokens;
    int first, count;

    __device__ Chunk(const Work& w, int index) {
        const int of_history = history_chunks(w.row);
        tokens = index >= of_history;
        first = CHUNK * (tokens ? index - of_history : index);
        count = min(CHUNK, (tokens ? w.row.tokens : w.row.history()) - first);
    }
    __device__ bool appends(const Work& w) const { return tokens && !w.row.absorbs(); }
    // As Work has it, but in signed numbers: in unsigned ones the makers' registers spill.
    __device__ int ring_row(const Work& w, int i) const {
        return ((tokens ? w.row.committed : w.row.folded) + first + i) % RING_ROWS;
    }
    __device__ const ACT* q(const Work& w, int i) const { return w.q(first + i); }
    __device__ const ACT* k(const Work& w, int i) const {
        return tokens ? w.k(first + i) : w.t.ring_k + w.ring_k_at(ring_row(w, i));
    }
    __device__ const ACT* v(const Work& w, int i) const {
        return tokens ? w.v(first + i) : w.t.ring_v + w.ring_v_at(ring_row(w, i));
    }
};
