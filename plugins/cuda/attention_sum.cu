// Puts the parts of decode_attention together: one block a query head of a token.
//
// Macros: ACT, VALUE_WIDTH.
#include "types.cuh"

#define INFINITE __int_as_float(0x7f800000)

extern "C" __global__ void __launch_bounds__(128) attention_sum(const float* partial, int parts, ACT* out) {
    const float* mine = partial + i64(blockIdx.x) * parts * (VALUE_WIDTH + 2);
    float top = -INFINITE;
    for (int p = 0; p < parts; ++p) top = fmaxf(top, mine[p * (VALUE_WIDTH + 2) + VALUE_WIDTH]);
    for (int channel = threadIdx.x; channel < VALUE_WIDTH; channel += 128) {
        float sum = 0.0f, total = 0.0f;
        for (int p = 0; p < parts; ++p) {
            const float* part = mine + p * (VALUE_WIDTH + 2);
            const float factor = part[VALUE_WIDTH] == -INFINITE ? 0.0f : exp2f(part[VALUE_WIDTH] - top);
            sum += factor * part[channel];
            total += factor * part[VALUE_WIDTH + 1];
        }
        out[i64(blockIdx.x) * VALUE_WIDTH + channel] = from_float<ACT>(total > 0.0f ? sum / total : 0.0f);
    }
}
