// RMS norms of the embedded engine, fused with what stands beside them. Formulas: network/base.py.
//
//     SUM:         s = x + y,  out = s / sqrt(mean(s^2) + EPSILON) * weight;   s is written too
//     GATE before: s = x * act(y), out as above
//     GATE after:  s = x, out as above times act(y)
//
// A vector of WIDTH elements, one of GROUPS of a token, is read once and kept in registers by THREADS threads, of which a
// block holds as many as its size allows. Everything is computed in float32 and rounded once.
//
// Macros: X, Y, WEIGHT, OUT (element types), WIDTH, GROUPS, THREADS, VECTOR, EPSILON, ZERO_CENTRED, SHARED_WEIGHT (one
// weight [WIDTH] for all groups, or [GROUPS * WIDTH]), MODE (0 norm alone, 1 SUM, 2 GATE before, 3 GATE after), SIGMOID (the
// gate's activation: 0 silu, 1 sigmoid).
#include "scalars.cuh"

constexpr int BLOCK = THREADS > 128 ? THREADS : 128, PER_BLOCK = BLOCK / THREADS;
constexpr int STEPS = (WIDTH + THREADS * VECTOR - 1) / (THREADS * VECTOR);
constexpr bool HAS_Y = MODE != 0;

// The sum over the threads of one vector, in each of them.
__device__ __forceinline__ float vector_sum(float x) {
    x = warp_sum(x);
    if (THREADS == 32) return x;
    __shared__ float parts[BLOCK / 32];
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    const int first = threadIdx.x / THREADS * (THREADS / 32);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) total += parts[first + i];
    return total;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    rms_norm(const X* x, const Y* y, const WEIGHT* weight, int vectors, int x_stride, int y_stride, OUT* out, X* sum) {
    const int vector = blockIdx.x * PER_BLOCK + threadIdx.x / THREADS, lane = threadIdx.x % THREADS;
    // Whole vectors are absent, never threads of one: the barrier above is reached by all or not needed.
    const bool present = vector < vectors;
    const int token = vector / GROUPS, group = vector % GROUPS;
    const i64 at = i64(token) * GROUPS * WIDTH + group * WIDTH;
    const X* x_row = x + i64(token) * x_stride + group * WIDTH;
    const Y* y_row = y + i64(token) * y_stride + group * WIDTH;

    float kept[STEPS][VECTOR], gate[MODE == 3 ? STEPS : 1][VECTOR], squares = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int i = (step * THREADS + lane) * VECTOR;
        vec<X, VECTOR> a = {};
        vec<Y, VECTOR> b = {};
        const bool inside = present && i < WIDTH;
        if (inside) {
            a = *reinterpret_cast<const vec<X, VECTOR>*>(x_row + i);
            if (HAS_Y) b = *reinterpret_cast<const vec<Y, VECTOR>*>(y_row + i);
        }
        vec<X, VECTOR> rounded;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            const float second = to_float(b.v[v]), act = SIGMOID ? sigmoid(second) : silu(second);
            float value = to_float(a.v[v]);
            if (MODE == 1) {
                // The norm reads the residual stream as it is stored.
                rounded.v[v] = from_float<X>(value + second);
                value = to_float(rounded.v[v]);
            }
            if (MODE == 2) value *= act;
            if (MODE == 3) gate[step][v] = act;
            kept[step][v] = value;
            squares += value * value;
        }
        if (MODE == 1 && inside) *reinterpret_cast<vec<X, VECTOR>*>(sum + at + i) = rounded;
    }
    const float scale = rsqrtf(vector_sum(squares) / WIDTH + EPSILON);
    if (!present) return;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int i = (step * THREADS + lane) * VECTOR;
        if (i >= WIDTH) break;
        const auto w = *reinterpret_cast<const vec<WEIGHT, VECTOR>*>(weight + (SHARED_WEIGHT ? 0 : group * WIDTH) + i);
        vec<OUT, VECTOR> result;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            float value = kept[step][v] * scale * (to_float(w.v[v]) + (ZERO_CENTRED ? 1.0f : 0.0f));
            if (MODE == 3) value *= gate[step][v];
            result.v[v] = from_float<OUT>(value);
        }
        *reinterpret_cast<vec<OUT, VECTOR>*>(out + at + i) = result;
    }
}
