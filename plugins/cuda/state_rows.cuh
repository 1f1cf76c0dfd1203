// A warp's rows of a state [ROWS, COLUMNS] of a head, in registers as they are stored, for kernels that read and write each
// element once.
//
// A row is spread over LANES lanes, 16 bytes of it for a lane and access; a lane holds HELD neighbouring rows.
#pragma once
#include "lane_sums.cuh"
#include "rounding.cuh"
#include "step.cuh"

template <typename T, int ROWS, int COLUMNS>
struct StateRows {
    static constexpr int VECTOR = 16 / sizeof(T);  // elements of an access
    static constexpr int LANES = COLUMNS / VECTOR < 32 ? COLUMNS / VECTOR : 32;
    static constexpr int PER_LANE = COLUMNS / LANES, ACCESSES = PER_LANE / VECTOR;
    static constexpr int held(int most) { return ROWS % (32 / LANES * most) == 0 ? most : held(most / 2); }
    // 16-bit elements take twice their registers when they are worked on.
    static constexpr int MOST = 2 * sizeof(T) / ACCESSES, HELD = held(MOST < 1 ? 1 : MOST);
    static constexpr int WARP_ROWS = 32 / LANES * HELD;
    static_assert(COLUMNS % VECTOR == 0 && 32 % LANES == 0 && PER_LANE % VECTOR == 0 && ROWS % WARP_ROWS == 0);

    uint4 stored[HELD][ACCESSES];

    // First column of a lane's access, and its first row among the warp's.
    __device__ static int column(int lane, int access) { return VECTOR * (lane % LANES + LANES * access); }
    __device__ static int row(int lane) { return lane / LANES * HELD; }

    // `rows`: the warp's first row.
    __device__ __forceinline__ void load(const T* rows, int lane) {
#pragma unroll
        for (int r = 0; r < HELD; ++r)
#pragma unroll
            for (int a = 0; a < ACCESSES; ++a)
                stored[r][a] = load_16_bytes(rows + (row(lane) + r) * COLUMNS + column(lane, a));
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < HELD; ++r)
#pragma unroll
            for (int a = 0; a < ACCESSES; ++a) stored[r][a] = {0, 0, 0, 0};
    }
    // A lane's columns of its row r.
    __device__ __forceinline__ void get(int r, float (&x)[PER_LANE]) const {
#pragma unroll
        for (int a = 0; a < ACCESSES; ++a) {
            const u32 words[4] = {stored[r][a].x, stored[r][a].y, stored[r][a].z, stored[r][a].w};
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) x[VECTOR * a + e] = element<T>(words, e);
        }
    }
    // Stores the lane's row r; `rows` is element `first` of the slot's state. AT_RANDOM: a 16-bit state is rounded at random.
    template <bool AT_RANDOM>
    __device__ __forceinline__ static void store(T* rows, int r, const float (&x)[PER_LANE], int lane,
                                                 const RandomSource& random, int first) {
#pragma unroll
        for (int a = 0; a < ACCESSES; ++a) {
            const int at = (row(lane) + r) * COLUMNS + column(lane, a);
            *reinterpret_cast<uint4*>(rows + at) = packed<T, AT_RANDOM>(&x[VECTOR * a], random, first + at);
        }
    }
    // A lane's columns of a vector of COLUMNS elements.
    template <typename U>
    __device__ __forceinline__ static void load_columns(float (&to)[PER_LANE], const U* from, int lane) {
        constexpr int WIDTH = 16 / int(sizeof(U)) < VECTOR ? 16 / int(sizeof(U)) : VECTOR;
#pragma unroll
        for (int i = 0; i < PER_LANE; i += WIDTH) load_vector<WIDTH>(from + column(lane, i / VECTOR) + i % VECTOR, to + i);
    }

private:
    template <typename U>
    __device__ __forceinline__ static float element(const u32 (&words)[4], int e) {
        if constexpr (sizeof(U) == 4)
            return __uint_as_float(words[e]);
        else
            return half_to_float<U>(words[e / 2], e % 2);
    }
    template <typename U, bool AT_RANDOM>
    __device__ __forceinline__ static uint4 packed(const float* x, const RandomSource& random, int first) {
        if constexpr (sizeof(U) == 4) {
            return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
        } else if constexpr (AT_RANDOM) {
            const RandomBits bits = random.bits(first);
            return {pack_at_random<U>(x[0], x[1], bits.v[0]), pack_at_random<U>(x[2], x[3], bits.v[1]),
                    pack_at_random<U>(x[4], x[5], bits.v[2]), pack_at_random<U>(x[6], x[7], bits.v[3])};
        } else {
            return {pack_pair<U>(x[0], x[1]), pack_pair<U>(x[2], x[3]), pack_pair<U>(x[4], x[5]),
                    pack_pair<U>(x[6], x[7])};
        }
    }
};

// One value for each of a lane's rows, of which sum_scattered leaves a lane KEPT sums, those of rows `first` and on. Lanes whose
// `owns` is false have the same ones as another.
template <typename Rows>
struct OwnedRows {
    static constexpr int COUNT = KEPT<Rows::LANES, Rows::HELD>;
    int first;
    bool owns;

    __device__ __forceinline__ explicit OwnedRows(int lane)
        : first(first_kept<Rows::LANES, Rows::HELD>(lane)), owns(lane % COPIES<Rows::LANES, Rows::HELD> == 0) {}
    // Value of row r of this lane's, from the lane that owns it.
    __device__ __forceinline__ static float of_row(const float* owned, int r, int lane) {
        const int owner = lane / Rows::LANES * Rows::LANES + r / COUNT * COPIES<Rows::LANES, Rows::HELD>;
        return __shfl_sync(~0u, owned[r % COUNT], owner);
    }
};

// A warp's share of a batch row's step in the ordinary recurrences, which a block of WARPS warps and a row of the grid take on:
// some rows of the state of all heads, one output each.
template <typename Rows, int WARPS>
struct WarpRows {
    int lane, first;
    OwnedRows<Rows> own;
    Row row;

    __device__ __forceinline__ explicit WarpRows(const int* step)
        : lane(threadIdx.x % 32),
          first((blockIdx.x * WARPS + threadIdx.x / 32) * Rows::WARP_ROWS),
          own(lane),
          row(load_row(step, blockIdx.y, 1)) {}
    // The first of the rows that the lane holds.
    __device__ __forceinline__ int held() const { return first + Rows::row(lane); }
    // The state as it was, zero where there is none. `rows`: the warp's first row.
    template <typename T>
    __device__ __forceinline__ void load(Rows& S, const T* rows) const {
        if (row.folded > 0)
            S.load(rows, lane);
        else
            S.clear();
    }
    // Stores the sums that the lane owns as outputs of the batch row.
    template <typename U>
    __device__ __forceinline__ void answer(U* outputs, const float (&sums)[Rows::HELD]) const {
        if (!own.owns) return;
#pragma unroll
        for (int i = 0; i < own.COUNT; ++i) outputs[held() + own.first + i] = from_float<U>(sums[i]);
    }
};
