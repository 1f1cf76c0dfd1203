// Appends a step's keys or values to the KV cache: cache[slot][head][committed + i] = x[row][i][head] for valid tokens.
//
// A thread moves one vector. Elements are words of VECTOR bytes, whatever they hold.
//
// Macros: HEADS, WIDTH (vectors of a head), VECTOR (bytes: 16, 8, 4 or 2).
#include "step.cuh"

typedef vec<u16, VECTOR / 2> Vector;

extern "C" __global__ void __launch_bounds__(128)
    cache_update(const Vector* x, const int* step, int rows, int tokens, int x_stride, int positions, int slot_stride,
                 Vector* cache) {
    const int per_token = HEADS * WIDTH, per_row = tokens * per_token;
    const int at = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (at >= per_row) return;
    const Row plan = load_row(step, row, tokens);
    const int token = at / per_token, channel = at % per_token, head = channel / WIDTH, position = plan.committed + token;
    if (plan.slot < 0 || token >= plan.tokens || position >= positions) return;
    cache[plan.slot * slot_stride + (i64(head) * positions + position) * WIDTH + channel % WIDTH] =
        x[(i64(row) * tokens + token) * x_stride + channel];
}
