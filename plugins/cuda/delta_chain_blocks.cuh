// Products of neighbouring entries' keys with each other, as the chains of a step take them (delta_chains.cuh).
#pragma once
#include "delta_read_shape.cuh"
#include "ptx/arithmetic.cuh"

// Entries that a chain takes at once: ring rows, the step's tokens.
constexpr int CHAIN_BLOCK = 4, TOKEN_BLOCK = READ_TOKENS < 4 ? READ_TOKENS : 4;
constexpr int RING_BLOCKS = (READ_HISTORY + CHAIN_BLOCK - 1) / CHAIN_BLOCK, TOKEN_BLOCKS = (READ_TOKENS + TOKEN_BLOCK - 1) / TOKEN_BLOCK;

constexpr int DECAY_COLUMNS = PER_CHANNEL ? KEY_DIM : 4;  // of an entry; the first alone where the decay is a scalar

// What a block's keys have to do with each other; of entries that do not exist, zeros.
struct BlockProducts {
    alignas(16) float gain[CHAIN_BLOCK];      // beta over the square of the norm
    float norm_gain[CHAIN_BLOCK];             // beta over the norm
    float pairs[CHAIN_BLOCK * CHAIN_BLOCK / 2];  // k_m . D_nm k_n at m (m - 1) / 2 + n

    __device__ static constexpr int pair(int m, int n) { return m * (m - 1) / 2 + n; }
};

constexpr int block_sums(int block) { return block * (block + 1) / 2; }
constexpr int padded_sums(int sums) { return sums <= 1 ? 1 : sums <= 4 ? 4 : 16; }
// The sum that a lane ends with, which is an entry's norm below BLOCK.
template <int BLOCK>
__device__ __forceinline__ int block_entry(int lane) {
    return first_kept<32, padded_sums(block_sums(BLOCK))>(lane);
}

// By a warp, from the newest entry's keys, log decays and betas on, of which a lane takes that of its block_entry; `live` entries of the
// block exist. Log decays become decays on the way.
template <int BLOCK, typename T, typename Betas>
__device__ void multiply_block(BlockProducts& to, int lane, const T* keys, float* decays, Betas betas, int live) {
    constexpr int SUMS = block_sums(BLOCK), PADDED = padded_sums(SUMS);
    static_assert(SUMS <= PADDED, "more sums than room");
    float sums[PADDED] = {}, older[BLOCK][LANE_COLS];
    // From the oldest on: keys decay on their way to newer ones.
#pragma unroll
    for (int m = BLOCK - 1; m >= 0; --m) {
        float k[LANE_COLS] = {}, decay[LANE_COLS] = {};
        if (m < live) {
            load_columns(keys - m * KEY_DIM, lane, k);
            float* row = decays - m * DECAY_COLUMNS;
            if constexpr (PER_CHANNEL) {
                load_columns(row, lane, decay);
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) decay[i] = power_of_2(LOG2_E * decay[i]);
                store_columns(row, lane, decay);
            } else {
                decay[0] = power_of_2(LOG2_E * row[0]);
                __syncwarp();
                if (lane == 0) row[0] = decay[0];
            }
        }
#pragma unroll
        for (int o = BLOCK - 1; o > m; --o) {
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) older[o][i] *= decay[PER_CHANNEL ? i : 0];
            sums[BLOCK + BlockProducts::pair(o, m)] = dot(older[o], k);
        }
        sums[m] = dot(k, k);
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) older[m][i] = k[i];
    }
    sum_scattered<32>(sums, lane);
    const int sum = block_entry<BLOCK>(lane);
    if (lane % COPIES<32, PADDED> || sum >= SUMS) return;
    if (sum >= BLOCK) {
        to.pairs[sum - BLOCK] = sums[0];
    } else {
        const float norm = rsqrtf(sums[0] + NORM_EPSILON), beta = sum < live ? betas[-sum] : 0.0f;
        to.gain[sum] = beta * norm * norm;
        to.norm_gain[sum] = beta * norm;
    }
}
