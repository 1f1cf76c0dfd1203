// Outputs of a chunk of mamba2_prefill. A warp has 16 tokens and OUT_TILES tiles of 8 channels.
//
// With c_i = A (dt_0 + ... + dt_i) from the chunk's start, and S the state before the chunk,
//
//     y_i = exp(c_i) S C_i + sum_{j <= i} M_ij x_j,   M_ij = exp(c_i - c_j) dt_j (B_j . C_i) + [i = j] D
//
// (Mamba-2, arXiv 2405.21060, section 6). Exponents are differences of sums, so none is positive and nothing overflows. S and M
// count in two bfloat16 parts, so that an output is as good as its own rounding.
#pragma once
#include "lane_sums.cuh"
#include "mamba2_chunk.cuh"
#include "ptx/arithmetic.cuh"

constexpr int PART_CHANNELS = CHANNELS / CHANNEL_PARTS, OUT_TILES = PART_CHANNELS / 8;

// Which tokens and channels of the chunk are the warp's.
struct Tile {
    int tile, part;

    // Later tokens meet more entries: tiles are dealt out so that the warps of a scheduler share them, in a block and among
    // blocks.
    __device__ Tile() {
        const int warp = warp_index(), turned = (warp + blockIdx.y) % TOKEN_TILES;
        part = warp / TOKEN_TILES;
        tile = part % 2 ? TOKEN_TILES - 1 - turned : turned;
    }
    __device__ int first_token() const { return 16 * tile; }
    __device__ int first_channel() const { return part * PART_CHANNELS; }
    // The warps with the fewest entries make the next chunk's time steps.
    __device__ bool makes_sums() const { return tile == 0 && part == 0; }
    __device__ bool makes_weights() const { return tile == 1 && part == 0; }
    __device__ void load_steps(StepMaker& maker, const Work& w, const Chunk& chunk, const float* A_log, const float* dt_bias,
                               u32 lane) const {
        if (makes_sums() || makes_weights()) maker.load(w, chunk, A_log, dt_bias, lane);
    }
    __device__ void store_steps(StepMaker& maker, ChunkSteps& out, const Chunk& chunk, u32 lane) const {
        if (makes_sums()) maker.store_sums(out, chunk, lane);
        if (makes_weights()) maker.store_weights(out, chunk, lane);
    }
};

// C of the warp's tokens g and g + 8 as it comes from memory. Lane t of a quad holds columns 8 t ... 8 t + 7 of each block of
// 32; what meets C in a product is read in the same order.
struct LoadedC {
    uint4 v[BLOCKS][2];

    __device__ __forceinline__ void load(const Work& w, const Chunk& chunk, int first, u32 lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = first + lane / 4 + 8 * r;
            const bool exists = chunk.tokens && i < chunk.count;
            const ACT* row = chunk.c(w, exists ? i : 0) + UNIT * (lane % 4);
#pragma unroll
            for (int k = 0; k < BLOCKS; ++k) {
                v[k][r] = {0, 0, 0, 0};
                if (exists) v[k][r] = load_16_bytes(row + 32 * k);
            }
        }
    }
};

// The same as operands of 16 columns each. Their registers are others than those of the loads; `zero` is one that the compiler
// does not know to be, or it would copy from these to those before every product.
struct TokenC {
    u32 v[BLOCKS][2][4];

    __device__ __forceinline__ TokenC(const LoadedC& from, u32 zero) {
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint4 c = from.v[k][r];
                v[k][0][r] = c.x | zero, v[k][0][2 + r] = c.y | zero, v[k][1][r] = c.z | zero, v[k][1][2 + r] = c.w | zero;
            }
    }
};

struct ChunkOutputs {
    Accumulator v[OUT_TILES];

    // exp(c_i) S C_i.
    __device__ __forceinline__ void read_state(const Shared& shared, const ChunkSteps& steps, const TokenC& c, const Tile& own,
                                               u32 lane) {
        const u32 g = lane / 4, t = lane % 4;
#pragma unroll
        for (int n = 0; n < OUT_TILES; ++n) v[n] = {};
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
            Parts<EXACT_PARTS<ACT>> a[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[half][i] = exact_parts<ACT>(c.v[k][half][i]);
            }
#pragma unroll
            for (int n = 0; n < OUT_TILES; ++n) {
                const int at = unit_at<B_UNITS>(own.first_channel() + 8 * n + g, 4 * k + t);
                const uint4 high = load_unit(shared.state[0], at), low = load_unit(shared.state[1], at);
                mma_parts<0, 2>(v[n], a[0], Parts<2>{{high.x, low.x}}, Parts<2>{{high.y, low.y}});
                mma_parts<0, 2>(v[n], a[1], Parts<2>{{high.z, low.z}}, Parts<2>{{high.w, low.w}});
            }
        }
        float decay[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) decay[r] = exp2f(steps.entry[own.first_token() + g + 8 * r].x);
#pragma unroll
        for (int n = 0; n < OUT_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[n].v[i] *= decay[i / 2];
    }

    // The chunk's own entries, 32 at a time.
    __device__ __forceinline__ void add_entries(const Shared& shared, const ChunkSteps& steps, const TokenC& c, float D,
                                                const Tile& own, u32 lane) {
        float sum[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = steps.entry[own.first_token() + lane / 4 + 8 * r].x;
#pragma unroll 1
        for (int from = 0; from <= own.first_token(); from += 32) {
            Accumulator bc[4] = {};
            multiply(bc, shared, c, from, lane);
#pragma unroll
            for (int block = 0; block < 2; ++block)
                add_block(shared, steps, bc[2 * block], bc[2 * block + 1], sum, D, own, from + 16 * block, lane);
        }
    }

    // `y`: at the chunk's first token and the block's first channel.
    __device__ __forceinline__ void store(ACT* y, const Tile& own, int count, u32 lane) const {
        const u32 g = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = own.first_token() + g + 8 * r;
            if (i >= count) continue;
#pragma unroll
            for (int n = 0; n < OUT_TILES; ++n)
                *reinterpret_cast<u32*>(y + i64(i) * INNER + own.first_channel() + 8 * n + 2 * t) =
                    pack_pair<ACT>(v[n].v[2 * r], v[n].v[2 * r + 1]);
        }
    }

private:
    // B_j . C_i of 32 entries.
    __device__ __forceinline__ static void multiply(Accumulator (&bc)[4], const Shared& shared, const TokenC& c, int from,
                                                    u32 lane) {
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const uint4 b = load_unit(shared.b, unit_at<B_UNITS>(from + 8 * n + lane / 4, 4 * k + lane % 4));
                mma_16bit<ACT>(bc[n], c.v[k][0], b.x, b.y);
                mma_16bit<ACT>(bc[n], c.v[k][1], b.z, b.w);
            }
    }
    // M x of the 16 entries from `first` on, whose products with C are `low` and `high`.
    __device__ __forceinline__ void add_block(const Shared& shared, const ChunkSteps& steps, const Accumulator& low,
                                              const Accumulator& high, const float (&sum)[2], float D, const Tile& own,
                                              int first, u32 lane) {
        Parts<2> m[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int j = first + 8 * half + 2 * (lane % 4);
            const float4 entries = *reinterpret_cast<const float4*>(&steps.entry[j]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own.first_token() + lane / 4 + 8 * r;
                const Accumulator& bc = half ? high : low;
                m[2 * half + r] = split_pair<2>(weight(bc.v[2 * r], sum[r] - entries.x, entries.y, D, i - j),
                                                weight(bc.v[2 * r + 1], sum[r] - entries.z, entries.w, D, i - j - 1));
            }
        }
#pragma unroll
        for (int n = 0; n < OUT_TILES; n += 2) {
            const Matrices x = load_transposed<X_UNITS>(shared.x, first, (own.first_channel() + 8 * n) / UNIT, lane);
#pragma unroll
            for (int e = 0; e < 2; ++e)
                mma_parts<0, 2>(v[n + e], m, exact_parts<ACT>(x.v[2 * e]), exact_parts<ACT>(x.v[2 * e + 1]));
        }
    }
    // M of a token and an entry `distance` before it; the difference of sums is a base-2 logarithm.
    __device__ __forceinline__ static float weight(float product, float difference, float dt, float D, int distance) {
        const float value = power_of_2(difference) * dt * product + (distance == 0 ? D : 0.0f);
        return distance < 0 ? 0.0f : value;
    }
};
