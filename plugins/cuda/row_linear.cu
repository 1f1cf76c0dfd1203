// A product with few rows in float32: y[r] = weight x[r] (+ bias), x [rows, IN], weight [outputs, IN].
//
// A warp takes CHANNELS rows of the weight and all of x. Its lanes divide the contracted axis and keep their sums, so that the
// weight is read once, in whole lines, and many warps share what a tile of a matrix product would leave to a few.
//
// Macros: IN (a multiple of 4), ROWS (at least ``rows``), BIAS.
#include "scalars.cuh"

constexpr int WARPS = 4, CHANNELS = 2;
static_assert(IN % 4 == 0, "whole pieces of 16 bytes");

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    row_linear(const float* x, const float* weight, const float* bias, int rows, int x_stride, int outputs, float* y) {
    const int lane = threadIdx.x % 32, first = (blockIdx.x * WARPS + threadIdx.x / 32) * CHANNELS;
    if (first >= outputs) return;
    float sums[ROWS][CHANNELS] = {};
#pragma unroll 2
    for (int at = 4 * lane; at < IN; at += 128) {
        float4 w[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
            w[c] = *reinterpret_cast<const float4*>(weight + i64(min(first + c, outputs - 1)) * IN + at);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            // Rows that do not exist repeat the last one, and are not stored.
            const float4 v = *reinterpret_cast<const float4*>(x + i64(min(r, rows - 1)) * x_stride + at);
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
                sums[r][c] = fmaf(v.x, w[c].x, fmaf(v.y, w[c].y, fmaf(v.z, w[c].z, fmaf(v.w, w[c].w, sums[r][c]))));
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            const float sum = warp_sum(sums[r][c]);
            if (lane == 0 && r < rows && first + c < outputs)
                y[i64(r) * outputs + first + c] = BIAS ? sum + bias[first + c] : sum;
        }
}
