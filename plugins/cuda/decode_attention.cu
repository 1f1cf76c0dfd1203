// Attention of a decode or verify step over a slot's KV cache. Formula: network/base.py, Network.attention.
//
// The queries of one key/value head, of all its query heads and the step's tokens, are the rows of 16-row tiles. A block
// takes one tile, one share of the values' channels and one part of the keys; each of its warps takes 16 keys at a time by
// itself, straight from memory into the operands of the tensor cores, and keeps a running maximum. Keys and values are read
// where they were written and nowhere else, so that what lies behind them may be anything.
//
// Lane = 4 g + t (mma.cuh). The contracted index of the scores is a channel: a lane reads 8 adjacent ones of key g. That of
// the output is a key; its column index is a channel too, n = g standing for channels 8 g + j in the j-th product.
//
// With several parts, unnormalised sums, maxima (of scores in base 2) and weights go to ``partial`` [rows, TOKENS, HEADS,
// parts, VALUE_WIDTH + 2], and attention_sum puts them together.
//
// Macros: ACT (16 bits), HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, VALUE_TILE, TOKENS, WINDOW (0: none), SCALE, PARTIAL.
#include "mma.cuh"
#include "scalars.cuh"
#include "step.cuh"

constexpr int WARPS = 4, KEYS = 16, GROUP = HEADS / KV_HEADS, QUERIES = GROUP * TOKENS, TILES = (QUERIES + 15) / 16;
constexpr int Q_STRIDE = WIDTH + 32, SLICES = VALUE_WIDTH / VALUE_TILE, SHARED = 16 * (Q_STRIDE / 2 > VALUE_TILE ? Q_STRIDE / 2 : VALUE_TILE);
constexpr float SCALE_2 = SCALE * LOG2_E;
static_assert(WIDTH % 32 == 0 && VALUE_TILE % 64 == 0 && VALUE_WIDTH % VALUE_TILE == 0, "whole pieces of 16 bytes a lane");
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ uint4 load_piece(const ACT* from, bool present) {
    return present ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
}
__device__ __forceinline__ u32 word(const uint4& piece, int i) {
    return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    decode_attention(const ACT* q, const ACT* k, const ACT* v, const int* step, int q_stride, int k_slot, int k_head, int k_row,
                     int v_slot, int v_head, int v_row, int part_keys, ACT* out, float* partial) {
    __shared__ __align__(16) float shared[SHARED];
    __shared__ float maxima[WARPS][16], weights[WARPS][16];
    ACT* queries = reinterpret_cast<ACT*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int slice = blockIdx.x % SLICES, tile = blockIdx.x / SLICES % TILES, kv_head = blockIdx.x / (SLICES * TILES);
    const int row = blockIdx.y, part = blockIdx.z, parts = gridDim.z;
    const Row plan = load_row(step, row, TOKENS);
    const bool live = plan.slot >= 0;

    // Row r of the tile is query head kv_head * GROUP + r % GROUP of token r / GROUP.
    const auto token_of = [&](int r) { return (tile * 16 + r) / GROUP; };
    const auto query_at = [&](int r) {
        return (i64(row) * TOKENS + token_of(r)) * HEADS + kv_head * GROUP + (tile * 16 + r) % GROUP;
    };
    const auto exists = [&](int r) { return tile * 16 + r < QUERIES; };
    for (int piece = threadIdx.x; piece < 16 * (WIDTH / 8); piece += 32 * WARPS) {
        const int r = piece / (WIDTH / 8), at = piece % (WIDTH / 8) * 8;
        const ACT* from = q + (i64(row) * TOKENS + token_of(r)) * q_stride + (kv_head * GROUP + (tile * 16 + r) % GROUP) * WIDTH;
        *reinterpret_cast<uint4*>(queries + r * Q_STRIDE + at) = load_piece(from + at, exists(r));
    }
    __syncthreads();

    // Keys [from[i], upto[i]) are seen by row g + 8 i; what a padding token sees is of no account, but was written.
    int from[2], upto[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int position = plan.committed + min(token_of(g + 8 * i), plan.tokens - 1);
        upto[i] = live ? position + 1 : 0;
        from[i] = WINDOW ? max(0, position + 1 - WINDOW) : 0;
    }
    const int written = live ? plan.committed + plan.tokens : 0;
    const int end = min(written, (part + 1) * part_keys), oldest = WINDOW ? max(0, plan.committed + 1 - WINDOW) : 0;
    const int begin = max(part * part_keys, oldest / KEYS * KEYS);
    const ACT* keys = k + (live ? plan.slot : 0) * k_slot + i64(kv_head) * k_head;
    const ACT* values = v + (live ? plan.slot : 0) * v_slot + i64(kv_head) * v_head + slice * VALUE_TILE;

    Accumulator sums[VALUE_TILE / 8] = {};
    float largest[2] = {-INFINITE, -INFINITE}, weight[2] = {0.0f, 0.0f};
    for (int key = begin + warp * KEYS; key < end; key += WARPS * KEYS) {
        Accumulator scores[2] = {};
#if __CUDA_ARCH__ >= 1000
#pragma unroll 4  // where the compiler, given all, loads so far ahead that it spills registers
#else
#pragma unroll
#endif
        for (int piece = 0; piece < WIDTH / 32; ++piece) {
            const int at = piece * 32 + t * 8;
            const uint4 low = *reinterpret_cast<const uint4*>(queries + g * Q_STRIDE + at);
            const uint4 high = *reinterpret_cast<const uint4*>(queries + (g + 8) * Q_STRIDE + at);
            const u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int which = key + 8 * n + g;
                const uint4 b = load_piece(keys + i64(which) * k_row + at, which < end);
                mma_16bit<ACT>(scores[n], first, b.x, b.y);
                mma_16bit<ACT>(scores[n], second, b.z, b.w);
            }
        }
        u32 shares[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float most = largest[i], score[4];
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const int which = key + 8 * (s / 2) + 2 * t + s % 2;
                score[s] = which >= from[i] && which < upto[i] ? scores[s / 2].v[2 * i + s % 2] * SCALE_2 : -INFINITE;
                most = fmaxf(most, score[s]);
            }
            most = quad_max(most);
            const float base = most == -INFINITE ? 0.0f : most, kept = exp2f(largest[i] - base);
            largest[i] = most;
            weight[i] *= kept;
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                score[s] = exp2f(score[s] - base);
                weight[i] += score[s];
            }
            shares[i] = pack_pair<ACT>(score[0], score[1]);
            shares[i + 2] = pack_pair<ACT>(score[2], score[3]);
#pragma unroll
            for (int n = 0; n < VALUE_TILE / 8; ++n) sums[n].v[2 * i] *= kept, sums[n].v[2 * i + 1] *= kept;
        }
#pragma unroll
        for (int piece = 0; piece < VALUE_TILE / 64; ++piece) {
            uint4 b[4];
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const int which = key + 8 * (s / 2) + 2 * t + s % 2;
                b[s] = load_piece(values + i64(which) * v_row + piece * 64 + g * 8, which < end);
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const u32 halves = j % 2 ? 0x7632 : 0x5410;
                mma_16bit<ACT>(sums[piece * 8 + j], shares, __byte_perm(word(b[0], j / 2), word(b[1], j / 2), halves),
                               __byte_perm(word(b[2], j / 2), word(b[3], j / 2), halves));
            }
        }
    }

    // The warps' sums, brought to one maximum.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        weight[i] = quad_sum(weight[i]);
        if (t == 0) maxima[warp][g + 8 * i] = largest[i], weights[warp][g + 8 * i] = weight[i];
    }
    __syncthreads();
    float most[2], factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        most[i] = maxima[0][g + 8 * i];
        for (int w = 1; w < WARPS; ++w) most[i] = fmaxf(most[i], maxima[w][g + 8 * i]);
        factor[i] = largest[i] == -INFINITE ? 0.0f : exp2f(largest[i] - most[i]);
    }
    for (int w = 0; w < WARPS; ++w) {
        if (warp == w)
#pragma unroll
            for (int n = 0; n < VALUE_TILE / 8; ++n)
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    const int r = g + s / 2 * 8, channel = n / 8 * 64 + (2 * t + s % 2) * 8 + n % 8;
                    float* to = shared + r * VALUE_TILE + channel;
                    *to = sums[n].v[s] * factor[s / 2] + (w ? *to : 0.0f);
                }
        __syncthreads();
    }
    for (int at = threadIdx.x; at < 16 * VALUE_TILE; at += 32 * WARPS) {
        const int r = at / VALUE_TILE, channel = at % VALUE_TILE;
        if (!exists(r)) break;
        float top = maxima[0][r], total = 0.0f;
        for (int w = 1; w < WARPS; ++w) top = fmaxf(top, maxima[w][r]);
        for (int w = 0; w < WARPS; ++w)
            total += maxima[w][r] == -INFINITE ? 0.0f : weights[w][r] * exp2f(maxima[w][r] - top);
        if (PARTIAL) {
            float* to = partial + (query_at(r) * parts + part) * (VALUE_WIDTH + 2);
            to[slice * VALUE_TILE + channel] = shared[at];
            if (slice == 0 && channel == 0) to[VALUE_WIDTH] = top, to[VALUE_WIDTH + 1] = total;
        } else {
            out[query_at(r) * VALUE_WIDTH + slice * VALUE_TILE + channel] =
                from_float<ACT>(total > 0.0f ? shared[at] / total : 0.0f);
        }
    }
}
