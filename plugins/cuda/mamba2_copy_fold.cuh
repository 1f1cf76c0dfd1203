// Folds a row's ring into the checkpoint of several heads, and writes their read copies.
//
// A warp owns 16 rows of each head and keeps them in registers until the head's largest magnitude is known and their codes
// are stored. The next head's rows are requested block by block as registers become free.
#pragma once
#include "mamba2_copy.cuh"
#include "mamba2_fold.cuh"

// Largest magnitudes of the warps' rows, of even and odd heads: one barrier a head keeps them apart.
struct WarpMagnitudes {
    float v[2][WARPS];
};

// `state` and `copy` are the slot's. All warps of the block take part, and none reads the copy any more.
__device__ __forceinline__ void fold_heads(const Row& row, const BlockWeights& block, const Heads& heads, STATE* state,
                                           const ReadCopy& copy, const RandomSource& random, WarpMagnitudes& magnitudes,
                                           const SharedB& b) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int own_row = 16 * warp + g, entries = row.fold_entries();
    const bool has_checkpoint = row.folded > 0;
    state += heads.first * HEAD_SIZE + own_row * STATE_SIZE;

    StateTile<STATE> tile;
    const auto load = [&](int k, int r) {
        if (has_checkpoint)
            tile[k][r].template load<true>(state + 8 * r * STATE_SIZE, k, t);
        else
            tile[k][r].clear();
    };
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) load(k, 0), load(k, 1);

    for (int h = 0; h < heads.count; ++h) {
        const HeadUpdates updates(block, entries, h, warp, lane);
        const int element = (heads.first + h) * HEAD_SIZE + own_row * STATE_SIZE;
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            tile[k][0].keep(), tile[k][1].keep();
            fold_block(tile[k], tile[k], updates, b, k, lane, state, k, random, element);
        }
        HeadScale head;
        if constexpr (READ_BITS == 4) {
            float amax = tile_magnitude<STATE>(tile);
            if (lane == 0) magnitudes.v[h % 2][warp] = amax;
            __syncthreads();
#pragma unroll
            for (int w = 0; w < WARPS; ++w) amax = larger_magnitude(amax, magnitudes.v[h % 2][w]);
            head = HeadScale(amax);
        }
        const ReadCopy written = copy.of_head(heads.first + h, HEAD_DIM, STATE_SIZE);
        if (READ_BITS == 4 && threadIdx.x == 0) *written.head_scale = head.value;
        state += HEAD_SIZE;
#pragma unroll
        for (int k = 0; k < BLOCKS; k += COPY_STORE_BLOCKS) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                CopyStore<STATE> codes;
#pragma unroll
                for (int i = 0; i < COPY_STORE_BLOCKS; ++i) {
                    codes.set(i, CopyColumns(tile[k + i][r]), head, t);
                    if (h + 1 < heads.count) load(k + i, r);
                }
                codes.store(written, own_row + 8 * r, k, t);
            }
        }
    }
}
