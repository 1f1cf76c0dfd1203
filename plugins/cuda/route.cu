// The experts of each token: scores, group limit, choice and weights. Formula: network/base.py, Network.route.
//
// One warp a token; lane l holds experts l, l + 32, ... Ties go to the lower index. NaN counts as the smallest number, so
// that every index is one of an expert whatever the logits are.
//
// Macros: EXPERTS, TOP_K (32 at most), N_GROUP, TOPK_GROUP, SOFTMAX (0: sigmoid), BIAS, NORMALISE, SCALE.
#include "scalars.cuh"

constexpr int WARPS = 4, HELD = (EXPERTS + 31) / 32, SIZE = EXPERTS / N_GROUP;
constexpr float LOWEST = -3.4028235e38f;
#define INFINITE __int_as_float(0x7f800000)

// The largest value and its index over the warp.
__device__ __forceinline__ void warp_argmax(float& value, int& index) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
        const float other = __shfl_xor_sync(~0u, value, offset);
        const int at = __shfl_xor_sync(~0u, index, offset);
        if (other > value || (other == value && at < index)) value = other, index = at;
    }
}

// Bit g: group g is one of the TOPK_GROUP whose two best scores add up to most. choice: [EXPERTS] of one token.
__device__ __forceinline__ u32 kept_groups(const float* choice, int lane) {
    float best = LOWEST, second = LOWEST;
    if (lane < N_GROUP)
        for (int i = 0; i < SIZE; ++i) {
            const float value = choice[lane * SIZE + i];
            second = value > best ? best : fmaxf(second, value);
            best = fmaxf(best, value);
        }
    const float total = lane < N_GROUP ? best + second : LOWEST;
    int before = 0;
    for (int g = 0; g < N_GROUP; ++g) {
        const float other = __shfl_sync(~0u, total, g);
        before += other > total || (other == total && g < lane);
    }
    return __ballot_sync(~0u, lane < N_GROUP && before < TOPK_GROUP);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    route(const float* logits, const float* bias, int tokens, int* indices, float* weights) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x * WARPS + warp;
    if (token >= tokens) return;
    const float* row = logits + i64(token) * EXPERTS;
    float score[HELD], choice[HELD], largest = LOWEST, total = 0.0f;
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int expert = h * 32 + lane;
        score[h] = expert < EXPERTS ? row[expert] : LOWEST;
        largest = fmaxf(largest, score[h]);
    }
    largest = warp_max(largest);
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const bool there = h * 32 + lane < EXPERTS;
        if (SOFTMAX) score[h] = there ? expf(score[h] - largest) : 0.0f;
        total += score[h];
    }
    total = SOFTMAX ? warp_sum(total) : 1.0f;
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int expert = h * 32 + lane;
        score[h] = SOFTMAX ? score[h] / total : sigmoid(score[h]);
        const float biased = score[h] + (BIAS && expert < EXPERTS ? bias[expert] : 0.0f);
        choice[h] = expert < EXPERTS ? fmaxf(biased, LOWEST) : -INFINITE;
    }
    if (N_GROUP > 1) {
        __shared__ float shared[WARPS][EXPERTS];
#pragma unroll
        for (int h = 0; h < HELD; ++h)
            if (h * 32 + lane < EXPERTS) shared[warp][h * 32 + lane] = choice[h];
        __syncwarp();
        const u32 kept = kept_groups(shared[warp], lane);
#pragma unroll
        for (int h = 0; h < HELD; ++h)
            if (!(kept >> ((h * 32 + lane) / SIZE % 32) & 1)) choice[h] = -INFINITE;
    }

    // Lane j keeps the j-th choice.
    int mine = 0;
    float weight = 0.0f;
    for (int j = 0; j < TOP_K; ++j) {
        float value = -INFINITE;
        int index = EXPERTS;
#pragma unroll
        for (int h = 0; h < HELD; ++h)
            if (choice[h] > value) value = choice[h], index = h * 32 + lane;
        warp_argmax(value, index);
        float chosen = 0.0f;
#pragma unroll
        for (int h = 0; h < HELD; ++h)
            if (index == h * 32 + lane) chosen = score[h], choice[h] = -INFINITE;
        chosen = __shfl_sync(~0u, chosen, index % 32);
        if (lane == j) mine = min(index, EXPERTS - 1), weight = chosen;
    }
    if (NORMALISE) weight /= warp_sum(weight);
    if (lane < TOP_K) {
        indices[i64(token) * TOP_K + lane] = mine;
        weights[i64(token) * TOP_K + lane] = weight * SCALE;
    }
}
