// replayssm::materialise: the state after a prefix of one slot, written to another slot. Contract: plugins/materialise.py.
//
// A warp owns one row of the state of one head: lane l holds columns l + 32 r. It replays the ring's entries
// [folded, prefix_len) in float32, as the recurrences do, and needs no other warp. Where the layer has a read copy, a block
// owns a whole head, its warps several rows of it, and writes the copy at the end.
//
// Macros: STATE (element type), HEADS, ROWS, COLUMNS (the state of a head is ROWS x COLUMNS), GROUPS (of heads that share an
// entry's vector of COLUMNS elements), RING_ROWS, READ_BITS (read_copy.cuh).
#pragma once
#include "read_copy.cuh"
#include "scalars.cuh"

constexpr int WARPS = READ_BITS ? 16 : 4;
constexpr int PER_LANE = (COLUMNS + 31) / 32;

struct Prefix {
    i64 source, destination;  // slots
    int folded, length;       // tokens in the source's checkpoint, and in the prefix

    __device__ int entries() const { return length - folded; }
    __device__ int ring_row(int j) const { return (folded + j) % RING_ROWS; }
};

// Which row of the state the warp works on.
struct Owner {
    int lane, head, row;

    __device__ Owner() : lane(threadIdx.x % 32) {
        const int warp = threadIdx.x / 32, unit = blockIdx.x * WARPS + warp;
        head = READ_BITS ? blockIdx.x : unit / ROWS, row = READ_BITS ? warp : unit % ROWS;
    }
    __device__ bool exists() const { return head < HEADS && row < ROWS; }
    // The warp's next row, if it has several.
    __device__ void advance() { row = READ_BITS ? row + WARPS : ROWS; }
    __device__ int group() const { return head / (HEADS / GROUPS); }
    __device__ int state_offset() const { return (head * ROWS + row) * COLUMNS; }
};

// One value for each column of a row, spread over the warp; columns that do not exist are zero.
struct Vector {
    float v[PER_LANE];

    template <typename T>
    __device__ __forceinline__ void load(const T* from, int lane) {
#pragma unroll
        for (int r = 0; r < PER_LANE; ++r) {
            const int column = lane + 32 * r;
            v[r] = column < COLUMNS ? to_float(from[column]) : 0.0f;
        }
    }
    template <typename T>
    __device__ __forceinline__ void store(T* to, int lane) const {
#pragma unroll
        for (int r = 0; r < PER_LANE; ++r) {
            const int column = lane + 32 * r;
            if (column < COLUMNS) to[column] = from_float<T>(v[r]);
        }
    }
    __device__ __forceinline__ float dot(const Vector& other) const {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < PER_LANE; ++r) sum = fmaf(v[r], other.v[r], sum);
        return warp_sum(sum);
    }
};

// The warp's row in the source's checkpoint; zero where that holds nothing.
__device__ __forceinline__ Vector load_checkpoint(const STATE* state, int stride, const Prefix& prefix, const Owner& own) {
    Vector S = {};
    if (prefix.folded > 0) S.load(state + prefix.source * stride + own.state_offset(), own.lane);
    return S;
}
