// Key channels of a chunk's entries in registers, and their gates, for the prefill of Kimi Delta Attention.
#pragma once
#include "delta_prefill_chunk.cuh"
#include "ptx/arithmetic.cuh"

constexpr int CHANNELS = UNIT;  // of a lane: 8 t ... 8 t + 7 of its warp's 32, of entries g and g + 8
constexpr int PAIRS = CHANNELS / 2;

// A lane's part of a row of a matrix of activations.
struct Channels {
    float v[CHANNELS];

    __device__ __forceinline__ explicit Channels(const uint4& stored) {
        const u32 words[PAIRS] = {stored.x, stored.y, stored.z, stored.w};
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) v[c] = half_to_float<ACT>(words[c / 2], c % 2);
    }
    __device__ __forceinline__ explicit Channels(float value) {
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) v[c] = value;
    }
    __device__ __forceinline__ Channels operator*(const Channels& other) const {
        Channels out(0.0f);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) out.v[c] = v[c] * other.v[c];
        return out;
    }
    // From another lane.
    __device__ __forceinline__ Channels from(u32 lane) const {
        Channels out(0.0f);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) out.v[c] = __shfl_sync(~0u, v[c], int(lane));
        return out;
    }
    // The sum over the quad's channels of products with `other`.
    __device__ __forceinline__ float dot_quad(const Channels& other) const {
        float sum[1] = {dot(v, other.v)};
        sum_all<4>(sum);
        return sum[0];
    }
};

// Entries g and g + 8 as operands.
template <int N>
struct ChannelParts {
    Parts<N> v[2][PAIRS];

    __device__ __forceinline__ void set(int r, const Channels& x) {
#pragma unroll
        for (int n = 0; n < PAIRS; ++n) v[r][n] = split_pair<N>(x.v[2 * n], x.v[2 * n + 1]);
    }
    __device__ __forceinline__ void copy_high(ChannelParts<1>& to) const {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int n = 0; n < PAIRS; ++n) to.v[r][n].v[0] = v[r][n].v[0];
    }
    // sum += (entries of these) . (entries 8 r ... 8 r + 7 of the others) over the warp's channels
    template <int M>
    __device__ __forceinline__ void multiply(Accumulator& sum, const ChannelParts<M>& other, int r) const {
#pragma unroll
        for (int n = 0; n < PAIRS; n += 2) {
            const Parts<N> rows[4] = {v[0][n], v[1][n], v[0][n + 1], v[1][n + 1]};
            mma_parts<0, (N < M ? N : M)>(sum, rows, other.v[r][n], other.v[r][n + 1]);
        }
    }
    __device__ __forceinline__ void store(EntryUnits* to, int unit, u32 lane) const {
#pragma unroll
        for (int p = 0; p < N; ++p)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                to[p][unit_at<KEY_UNITS>(8 * r + lane / 4, unit)] = {v[r][0].v[p], v[r][1].v[p], v[r][2].v[p], v[r][3].v[p]};
    }
};

// log(1 + e^x) with few instructions and no branch: log(1 + t) = 2 atanh(t / (2 + t)) for t = e^-|x| <= 1, as its series.
__device__ __forceinline__ float short_softplus(float x) {
    const float t = power_of_2(-LOG2_E * fabsf(x)), s = t * inverse_of(2.0f + t), square = s * s;
    float series = 2.0f / 13.0f;
#pragma unroll
    for (int n = 11; n > 0; n -= 2) series = fmaf(series, square, 2.0f / n);
    return fmaxf(x, 0.0f) + s * series;
}
