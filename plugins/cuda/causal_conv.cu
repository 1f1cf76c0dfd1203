// replayssm::causal_conv: depthwise convolution, bias and SiLU over a ring. Contract: plugins/causal_conv.py.
//
//     y[i] = silu(bias + sum_k weight[k] x[i - (KERNEL - 1) + k])
//
// A thread owns VECTOR channels of up to CHUNK tokens of a row. Threads of later chunks find the taps before their first
// token in x; those of the first chunk find them in the ring, and being the only ones to read the ring also write it.
//
// With one token a row the weights are as many bytes as everything else, so that they too are loaded in vectors: all taps of a
// channel at once where ALIGNED (1) says that they start where such a vector may.
//
// Macros: ACT, WEIGHT (element types), CHANNELS, KERNEL, CONV_ROWS, SILU, BIAS (0 or 1), VECTOR, CHUNK, ALIGNED.
#include "scalars.cuh"
#include "step.cuh"

typedef vec<ACT, VECTOR> Channels;

// Elements of WEIGHT that are loaded at once.
constexpr int TAPS = ALIGNED ? KERNEL : 1, SHIFTS = ALIGNED ? VECTOR : 1;

// N floats from as many elements, TOGETHER at a time.
template <int TOGETHER, int N>
__device__ __forceinline__ void load_floats(const WEIGHT* from, float (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += TOGETHER) {
        const vec<WEIGHT, TOGETHER> loaded = *reinterpret_cast<const vec<WEIGHT, TOGETHER>*>(from + i);
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) to[i + j] = to_float(loaded.v[j]);
    }
}

// A 0-tap convolution has no past; the array still needs a size.
constexpr int PAST = KERNEL > 1 ? KERNEL - 1 : 1;

extern "C" __global__ void __launch_bounds__(128)
    causal_conv(const ACT* x, const WEIGHT* weight, const WEIGHT* bias, const int* step, const ACT* ring, int tokens,
                int x_stride, int ring_stride, ACT* y, ACT* ring_out) {
    const int channel = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    if (channel >= CHANNELS) return;
    const int first = blockIdx.z * CHUNK, last = min(first + CHUNK, tokens);
    const Row row = load_row(step, blockIdx.y, tokens);
    const int valid = row.slot < 0 ? 0 : row.tokens;
    const ACT* x_row = x + i64(blockIdx.y) * tokens * x_stride + channel;
    ACT* y_row = y + i64(blockIdx.y) * tokens * CHANNELS + channel;
    const i64 ring_slot = row.slot * ring_stride + channel;

    // What depends on nothing but addresses is requested first.
    Channels loaded[PAST] = {}, next = {};
#pragma unroll
    for (int k = 0; k < KERNEL - 1; ++k) {
        const int token = first - (KERNEL - 1) + k, position = row.committed + token;
        if (first < valid && position >= 0)
            loaded[k] = *reinterpret_cast<const Channels*>(token >= 0 ? x_row + i64(token) * x_stride
                                                                      : ring + ring_slot + position % CONV_ROWS * CHANNELS);
    }
    if (first < valid) next = *reinterpret_cast<const Channels*>(x_row + i64(first) * x_stride);
    float past[PAST][VECTOR], taps[VECTOR][KERNEL], shift[VECTOR] = {};
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) load_floats<TAPS>(weight + i64(channel + v) * KERNEL, taps[v]);
    if constexpr (BIAS) load_floats<SHIFTS>(bias + channel, shift);
#pragma unroll
    for (int k = 0; k < KERNEL - 1; ++k)
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) past[k][v] = to_float(loaded[k].v[v]);

    // Threads of the first chunk write the ring: the chunk's tokens as they pass, and those of later chunks.
    const int kept = first == 0 ? max(0, valid - CONV_ROWS) : valid;
    ACT* ring_to = ring_out + ring_slot;
    for (int i = max(kept, last); i < valid; ++i)
        *reinterpret_cast<Channels*>(ring_to + (row.committed + i) % CONV_ROWS * CHANNELS) =
            *reinterpret_cast<const Channels*>(x_row + i64(i) * x_stride);

#pragma unroll CHUNK < 4 ? 1 : 4
    for (int i = first; i < last; ++i) {
        const Channels current = next;
        if (i + 1 < min(last, valid)) next = *reinterpret_cast<const Channels*>(x_row + i64(i + 1) * x_stride);
        Channels out = {};
        if (i < valid) {
            if (i >= kept) *reinterpret_cast<Channels*>(ring_to + (row.committed + i) % CONV_ROWS * CHANNELS) = current;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                const float newest = to_float(current.v[v]);
                float sum = shift[v];
#pragma unroll
                for (int k = 0; k < KERNEL - 1; ++k) {
                    sum += taps[v][k] * past[k][v];
                    past[k][v] = k + 1 < KERNEL - 1 ? past[k + 1][v] : newest;
                }
                sum += taps[v][KERNEL - 1] * newest;
                out.v[v] = from_float<ACT>(SILU ? silu(sum) : sum);
            }
        }
        *reinterpret_cast<Channels*>(y_row + i64(i) * CHANNELS) = out;
    }
}
