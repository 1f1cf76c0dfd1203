// Appends a step's keys or values to the KV cache: cache[slot][head][committed + i] = x[row][i][head] for valid tokens.
//
// A thread moves one vector. Elements are words of VECTOR bytes, whatever they hold. With TOKENS_A_BLOCK above 1 only the
// tokens that end a block are written, and a position of the cache stands for a block.
//
// Macros: HEADS, WIDTH (vectors of a head), VECTOR (bytes: 16, 8, 4 or 2), TOKENS_A_BLOCK.
#include "step.cuh"

typedef vec<u16, VECTOR / 2> Vector;

extern "C" __global__ void __launch_bounds__(128)
    cache_update(const Vector* x, const int* step, int rows, int tokens, int x_stride, int positions, int slot_stride,
                 Vector* cache) {
    const int per_token = HEADS * WIDTH, per_row = tokens * per_token;
    const int at = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (at >= per_row) return;
    const Row plan = load_row(step, row, tokens);
    const int token = at / per_token, channel = at % per_token, head = channel / WIDTH, behind = plan.committed + token + 1;
    const int position = behind / TOKENS_A_BLOCK - 1;
    if (plan.slot < 0 || token >= plan.tokens || behind % TOKENS_A_BLOCK || position >= positions) return;
    cache[plan.slot * slot_stride + (i64(head) * positions + position) * WIDTH + channel % WIDTH] =
        x[(i64(row) * tokens + token) * x_stride + channel];
}
