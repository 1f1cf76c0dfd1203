// The inverse of the triangular system of a chunk of the delta rule's prefill.
#pragma once
#include "delta_prefill_chunk.cuh"

// A row of the inverse of I + A. CHUNK lanes come here, one for a row.
__device__ __forceinline__ void invert(Triangle<STATE_PARTS>& inverse, const float (&lower)[CHUNK][CHUNK], int row) {
    float x[CHUNK];
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) x[j] = j == row ? 1.0f : 0.0f;
#pragma unroll
    for (int i = CHUNK - 1; i > 0; --i)
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            float a[4];
            load_vector<4>(&lower[i][j], a);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (j + e < i) x[j + e] = fmaf(-x[i], a[e], x[j + e]);
        }
#pragma unroll
    for (int half = 0; half < TILES; ++half) {
        if (half > row / 8) break;
        Parts<STATE_PARTS> parts[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) parts[n] = split_pair<STATE_PARTS>(x[8 * half + 2 * n], x[8 * half + 2 * n + 1]);
        const int tile = Triangle<STATE_PARTS>::tile(row / 8, half);
#pragma unroll
        for (int p = 0; p < STATE_PARTS; ++p)
            *reinterpret_cast<uint4*>(inverse.v[p][tile][row % 8]) = {parts[0].v[p], parts[1].v[p], parts[2].v[p], parts[3].v[p]};
    }
}
