// Activations of the embedded engine in one pass. MODE 0: out = x * act(y). MODE 1: out = max(x, 0)^2.
//
// Macros: ACT (x and out), Y (the gate), VECTOR, MODE, SIGMOID (the gate's activation: 0 silu, 1 sigmoid).
#include "scalars.cuh"

extern "C" __global__ void __launch_bounds__(128)
    elementwise(const ACT* x, const Y* y, int width, int x_stride, int y_stride, ACT* out) {
    const int channel = (blockIdx.y * 128 + threadIdx.x) * VECTOR, token = blockIdx.x;
    if (channel >= width) return;
    auto value = *reinterpret_cast<const vec<ACT, VECTOR>*>(x + i64(token) * x_stride + channel);
    vec<Y, VECTOR> gate = {};
    if (MODE == 0) gate = *reinterpret_cast<const vec<Y, VECTOR>*>(y + i64(token) * y_stride + channel);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        const float a = to_float(value.v[v]), b = to_float(gate.v[v]), positive = positive_part(a);
        value.v[v] = from_float<ACT>(MODE == 1 ? positive * positive : a * (SIGMOID ? sigmoid(b) : silu(b)));
    }
    *reinterpret_cast<vec<ACT, VECTOR>*>(out + i64(token) * width + channel) = value;
}
