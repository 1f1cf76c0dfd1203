// The sum over a token's experts: out = sum_j weights_j y_j in the order of j, in float32, rounded once.
//
// Macros: ACT, WIDTH, TOP_K, VECTOR.
#include "types.cuh"

typedef vec<ACT, VECTOR> Channels;

extern "C" __global__ void __launch_bounds__(128)
    expert_sum(const ACT* products, const float* weights, ACT* out) {
    const int channel = (blockIdx.y * 128 + threadIdx.x) * VECTOR, token = blockIdx.x;
    if (channel >= WIDTH) return;
    float sum[VECTOR] = {};
#pragma unroll 4
    for (int j = 0; j < TOP_K; ++j) {
        const i64 pair = i64(token) * TOP_K + j;
        const Channels product = *reinterpret_cast<const Channels*>(products + pair * WIDTH + channel);
        const float weight = weights[pair];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) sum[v] += weight * to_float(product.v[v]);
    }
    Channels result;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) result.v[v] = from_float<ACT>(sum[v]);
    *reinterpret_cast<Channels*>(out + i64(token) * WIDTH + channel) = result;
}
