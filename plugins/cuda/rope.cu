// Rotary embedding by tables of the step: (a, b) -> (a cos - b sin, b cos + a sin) for the pairs of a head's first DIM channels.
//
// Macros: ACT, HEADS, WIDTH (channels of a head), DIM, INTERLEAVED (pairs (2i, 2i + 1); otherwise (i, i + DIM / 2)).
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(128)
    rope(const ACT* x, const float* cosines, const float* sines, int tokens, int x_stride, ACT* y) {
    constexpr int HALF = DIM / 2, ITEMS = HALF + WIDTH - DIM;
    const int at = blockIdx.y * blockDim.x + threadIdx.x, token = blockIdx.x;
    if (at >= HEADS * ITEMS) return;
    const int head = at / ITEMS, item = at % ITEMS;
    const ACT* from = x + i64(token) * x_stride + head * WIDTH;
    ACT* to = y + (i64(token) * HEADS + head) * WIDTH;
    if (item >= HALF) {
        to[DIM + item - HALF] = from[DIM + item - HALF];
        return;
    }
    const int first = INTERLEAVED ? 2 * item : item, second = INTERLEAVED ? 2 * item + 1 : item + HALF;
    const float cosine = cosines[i64(token) * HALF + item], sine = sines[i64(token) * HALF + item];
    const float a = to_float(from[first]), b = to_float(from[second]);
    to[first] = from_float<ACT>(a * cosine - b * sine);
    to[second] = from_float<ACT>(b * cosine + a * sine);
}
