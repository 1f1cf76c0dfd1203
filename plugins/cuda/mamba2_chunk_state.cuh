// The state of mamba2_prefill, in float32 registers: a warp holds 16 rows of it and COLUMN_TILES tiles of 8 columns.
//
//     S = exp(c_last) S + sum_j w_j x_j B_j^T,   w_j = exp(c_last - c_j) dt_j
//
// The sum is formed from zero and then added to the decayed state, since the tensor cores cut off what they add up. w x counts
// in three bfloat16 parts, in two where the state itself is bfloat16.
#pragma once
#include "mamba2_chunk.cuh"

constexpr int STATE_WARPS = WARPS / (CHANNELS / 16);  // that share 16 rows
constexpr int COLUMN_TILES = STATE_SIZE / 8 > 2 * STATE_WARPS ? STATE_SIZE / 8 / STATE_WARPS : 2;
// Tiles whose sums registers hold at once, and sets of 16 entries whose operands they do.
constexpr int TILES_TOGETHER = COLUMN_TILES > 8 ? 4 : COLUMN_TILES, UPDATE_UNROLL = STATE_SIZE > 128 ? 1 : CHUNK / 16;
constexpr int UPDATE_PARTS = same_type<STATE, bf16>::value ? 2 : 3;
static_assert(WARPS % (CHANNELS / 16) == 0 && COLUMN_TILES % 2 == 0 && COLUMN_TILES % TILES_TOGETHER == 0);

struct WarpState {
    Accumulator v[COLUMN_TILES];  // rows g and g + 8, columns 8 n + 2 t and 8 n + 2 t + 1

    __device__ static int first_row() { return warp_index() / STATE_WARPS * 16; }
    __device__ static int first_column() { return warp_index() % STATE_WARPS * (8 * COLUMN_TILES); }
    // Small states have fewer columns than the block has warps for.
    __device__ static bool exists() { return 8 * COLUMN_TILES * STATE_WARPS == STATE_SIZE || first_column() < STATE_SIZE; }
    // A lane's first element among those of a head.
    __device__ static int element(const Work& w, u32 lane) {
        return (w.first_channel() + first_row() + lane / 4) * STATE_SIZE + first_column() + 2 * (lane % 4);
    }

    // `head`: the head's checkpoint, if there is one.
    __device__ __forceinline__ void load(const STATE* head, const Work& w, u32 lane) {
        const STATE* from = head + element(w, lane);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n) {
            v[n] = {};
            if (w.row.folded == 0 || !exists()) continue;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const vec<STATE, 2> pair = *reinterpret_cast<const vec<STATE, 2>*>(from + 8 * r * STATE_SIZE + 8 * n);
                v[n].v[2 * r] = to_float(pair.v[0]), v[n].v[2 * r + 1] = to_float(pair.v[1]);
            }
        }
    }

    // Two parts of the state, for the outputs of all warps.
    __device__ __forceinline__ void publish(Shared& shared, u32 lane) const {
        if (!exists()) return;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Parts<2> parts = split_pair<2>(v[n].v[2 * r], v[n].v[2 * r + 1]);
                const int at = unit_at<B_UNITS>(first_row() + lane / 4 + 8 * r, first_column() / UNIT + n);
#pragma unroll
                for (int i = 0; i < 2; ++i) reinterpret_cast<u32*>(&shared.state[i][at])[lane % 4] = parts.v[i];
            }
    }

    // Takes up the chunk.
    __device__ __forceinline__ void update(const Shared& shared, const ChunkSteps& steps, u32 lane) {
        if (!exists()) return;
#pragma unroll
        for (int first = 0; first < COLUMN_TILES; first += TILES_TOGETHER) update_tiles(first, shared, steps, lane);
    }

    // Writes the checkpoint; `head`: where the head's begins.
    __device__ __forceinline__ void store(STATE* head, const Work& w, const RandomSource& random, u32 lane) const {
        if (!exists()) return;
        STATE* to = head + element(w, lane);
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int at = 8 * r * STATE_SIZE + 8 * n;
                store_pair(to + at, v[n].v[2 * r], v[n].v[2 * r + 1], random, w.head() * HEAD_SIZE + element(w, lane) + at);
            }
    }

private:
    // Tiles first ... first + TILES_TOGETHER - 1.
    __device__ __forceinline__ void update_tiles(int first, const Shared& shared, const ChunkSteps& steps, u32 lane) {
        Accumulator large[TILES_TOGETHER] = {}, small[TILES_TOGETHER] = {};
#pragma unroll UPDATE_UNROLL
        for (int from = 0; from < CHUNK; from += 16) {
            Parts<UPDATE_PARTS> u[4];
            weigh(u, shared, steps, from, lane);
#pragma unroll
            for (int n = 0; n < TILES_TOGETHER; n += 2) {
                const Matrices b = load_transposed<B_UNITS>(shared.b, from, first_column() / UNIT + first + n, lane);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const auto b0 = exact_parts<ACT>(b.v[2 * e]), b1 = exact_parts<ACT>(b.v[2 * e + 1]);
                    mma_parts<0, 1>(large[n + e], u, b0, b1);
                    mma_parts<1, UPDATE_PARTS>(small[n + e], u, b0, b1);
                }
            }
        }
        const float decay = steps.decay;
#pragma unroll
        for (int n = 0; n < TILES_TOGETHER; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                v[first + n].v[i] = fmaf(decay, v[first + n].v[i], large[n].v[i] + small[n].v[i]);
    }
    template <typename T>
    __device__ __forceinline__ static void store_pair(T* to, float first, float second, const RandomSource& random,
                                                      int element) {
        if constexpr (STOCHASTIC && sizeof(T) == 2)
            *reinterpret_cast<u32*>(to) = pack_at_random<T>(first, second, random.pair_bits(element));
        else
            *reinterpret_cast<vec<T, 2>*>(to) = {from_float<T>(first), from_float<T>(second)};
    }
    // w_j x_j of 16 entries as an operand: rows g and g + 8, entries 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    __device__ __forceinline__ static void weigh(Parts<UPDATE_PARTS> (&u)[4], const Shared& shared, const ChunkSteps& steps,
                                                 int from, u32 lane) {
        const Matrices x = load_transposed<X_UNITS>(shared.x, from, first_row() / UNIT, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 weight = *reinterpret_cast<const float2*>(&steps.weight[from + 8 * half + 2 * (lane % 4)]);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const u32 pair = x.v[2 * m + half];
                u[2 * half + m] = split_pair<UPDATE_PARTS>(weight.x * half_to_float<ACT>(pair, false),
                                                           weight.y * half_to_float<ACT>(pair, true));
            }
        }
    }
};
