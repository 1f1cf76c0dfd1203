// Key channels of 16 entries of Kimi Delta Attention in a warp's registers.
//
// Lane 4 g + t has N neighbouring channels of entries g and g + 8, so that a quad has 4 N channels of both.
#pragma once
#include "bf16_parts.cuh"
#include "lane_sums.cuh"

// A lane's part of a row.
template <int N>
struct Channels {
    float v[N];

    // Of activations as they are stored.
    __device__ __forceinline__ explicit Channels(const u32 (&words)[N / 2]) {
#pragma unroll
        for (int c = 0; c < N; ++c) v[c] = half_to_float<ACT>(words[c / 2], c % 2);
    }
    __device__ __forceinline__ explicit Channels(float value) {
#pragma unroll
        for (int c = 0; c < N; ++c) v[c] = value;
    }
    __device__ __forceinline__ Channels operator*(const Channels& other) const {
        Channels out(0.0f);
#pragma unroll
        for (int c = 0; c < N; ++c) out.v[c] = v[c] * other.v[c];
        return out;
    }
    // From another lane.
    __device__ __forceinline__ Channels from(u32 lane) const {
        Channels out(0.0f);
#pragma unroll
        for (int c = 0; c < N; ++c) out.v[c] = __shfl_sync(~0u, v[c], int(lane));
        return out;
    }
    // The sum over the quad's channels of products with `other`.
    __device__ __forceinline__ float dot_quad(const Channels& other) const {
        float sum[1] = {dot(v, other.v)};
        sum_all<4>(sum);
        return sum[0];
    }
    // To a row in memory.
    __device__ __forceinline__ void store(float* row) const {
#pragma unroll
        for (int c = 0; c < N; c += 4) store_vector<4>(row + c, v + c);
    }
};

// Both entries as operands, in bfloat16 parts.
template <int PARTS, int N>
struct ChannelParts {
    static constexpr int CHANNEL_PAIRS = N / 2;
    Parts<PARTS> v[2][CHANNEL_PAIRS];

    __device__ __forceinline__ void set(int r, const Channels<N>& x) {
#pragma unroll
        for (int n = 0; n < CHANNEL_PAIRS; ++n) v[r][n] = split_pair<PARTS>(x.v[2 * n], x.v[2 * n + 1]);
    }
    __device__ __forceinline__ void copy_high(ChannelParts<1, N>& to) const {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int n = 0; n < CHANNEL_PAIRS; ++n) to.v[r][n].v[0] = v[r][n].v[0];
    }
    // sum += (entries of these) . (entries 8 r ... 8 r + 7 of the others) over the warp's channels
    template <int OTHERS>
    __device__ __forceinline__ void multiply(Accumulator& sum, const ChannelParts<OTHERS, N>& other, int r) const {
#pragma unroll
        for (int n = 0; n < CHANNEL_PAIRS; n += 2) {
            const Parts<PARTS> rows[4] = {v[0][n], v[1][n], v[0][n + 1], v[1][n + 1]};
            mma_parts<0, (PARTS < OTHERS ? PARTS : OTHERS)>(sum, rows, other.v[r][n], other.v[r][n + 1]);
        }
    }
};
