// Attention of a decode or verify step over a slot's KV cache in float32. Formula: network/base.py, Network.attention.
//
// A block takes one tile of QUERIES queries of a key/value head (of all its query heads and the step's tokens), one share of
// the values' channels and one part of the keys; each of its warps takes 32 keys at a time by itself, and keeps a running
// maximum. For the scores a lane has a key, for the output it has channels. Keys and values are read where they were written
// and nowhere else, so that what lies behind them may be anything.
//
// Launches and partial results are those of decode_attention.cu. Macros: HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, VALUE_TILE,
// TOKENS, QUERIES, WINDOW (0: none), SCALE, PARTIAL.
#include "scalars.cuh"
#include "step.cuh"

constexpr int WARPS = 4, GROUP = HEADS / KV_HEADS, TILES = (GROUP * TOKENS + QUERIES - 1) / QUERIES, SLICES = VALUE_WIDTH / VALUE_TILE;
constexpr int CHANNELS = VALUE_TILE / 32, SHARED = QUERIES * (WIDTH > VALUE_TILE ? WIDTH : VALUE_TILE);
constexpr float SCALE_2 = SCALE * LOG2_E;
static_assert(WIDTH % 4 == 0 && VALUE_TILE % 32 == 0 && VALUE_WIDTH % VALUE_TILE == 0, "whole pieces of 16 bytes of a key");
#define INFINITE __int_as_float(0x7f800000)

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    wide_attention(const float* q, const float* k, const float* v, const int* step, int q_stride, int k_slot, int k_head,
                   int k_row, int v_slot, int v_head, int v_row, int part_keys, float* out, float* partial) {
    __shared__ __align__(16) float shared[SHARED];  // the queries, then the warps' sums
    __shared__ float shares[WARPS][32][QUERIES], maxima[WARPS][QUERIES], weights[WARPS][QUERIES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slice = blockIdx.x % SLICES, tile = blockIdx.x / SLICES % TILES, kv_head = blockIdx.x / (SLICES * TILES);
    const int row = blockIdx.y, part = blockIdx.z, parts = gridDim.z;
    const Row plan = load_row(step, row, TOKENS);
    const bool live = plan.slot >= 0;

    // Query r of the tile is query head kv_head * GROUP + r % GROUP of token r / GROUP.
    const auto token_of = [&](int r) { return (tile * QUERIES + r) / GROUP; };
    const auto head_of = [&](int r) { return kv_head * GROUP + (tile * QUERIES + r) % GROUP; };
    const auto exists = [&](int r) { return tile * QUERIES + r < GROUP * TOKENS; };
    for (int at = threadIdx.x; at < QUERIES * WIDTH; at += 32 * WARPS) {
        const int r = at / WIDTH;
        const float* from = q + (i64(row) * TOKENS + token_of(r)) * q_stride + head_of(r) * WIDTH;
        shared[at] = exists(r) ? from[at % WIDTH] : 0.0f;
    }
    __syncthreads();

    const int written = live ? plan.committed + plan.tokens : 0;
    const int end = min(written, (part + 1) * part_keys), oldest = WINDOW ? max(0, plan.committed + 1 - WINDOW) : 0;
    const int begin = max(part * part_keys, oldest / 32 * 32);
    const float* keys = k + (live ? plan.slot : 0) * k_slot + i64(kv_head) * k_head;
    const float* values = v + (live ? plan.slot : 0) * v_slot + i64(kv_head) * v_head + slice * VALUE_TILE + lane;

    float sums[QUERIES][CHANNELS] = {}, largest[QUERIES], weight[QUERIES] = {};
#pragma unroll
    for (int r = 0; r < QUERIES; ++r) largest[r] = -INFINITE;
    for (int first = begin + warp * 32; first < end; first += WARPS * 32) {
        const int key = first + lane;
        const float4* mine = reinterpret_cast<const float4*>(keys + i64(min(key, end - 1)) * k_row);
        float score[QUERIES] = {};
#pragma unroll 8
        for (int piece = 0; piece < WIDTH / 4; ++piece) {
            const float4 x = mine[piece];
#pragma unroll
            for (int r = 0; r < QUERIES; ++r) {
                const float4 y = reinterpret_cast<const float4*>(shared + r * WIDTH)[piece];
                score[r] = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, score[r]))));
            }
        }
#pragma unroll
        for (int r = 0; r < QUERIES; ++r) {
            // What a padding token sees is of no account, but was written.
            const int position = plan.committed + min(token_of(r), plan.tokens - 1);
            const bool seen = key < end && key <= position && (!WINDOW || key > position - WINDOW);
            const float logit = seen ? score[r] * SCALE_2 : -INFINITE;
            const float most = fmaxf(largest[r], warp_max(logit)), base = most == -INFINITE ? 0.0f : most;
            const float kept = exp2f(largest[r] - base), share = exp2f(logit - base);
            largest[r] = most;
            weight[r] = weight[r] * kept + share;
            shares[warp][lane][r] = share;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) sums[r][c] *= kept;
        }
        __syncwarp();
        const int count = min(32, end - first);
#pragma unroll 8
        for (int i = 0; i < count; ++i) {
            const float* from = values + i64(first + i) * v_row;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                const float x = from[32 * c];
#pragma unroll
                for (int r = 0; r < QUERIES; ++r) sums[r][c] = fmaf(shares[warp][i][r], x, sums[r][c]);
            }
        }
        __syncwarp();
    }

    // The warps' sums, brought to one maximum.
#pragma unroll
    for (int r = 0; r < QUERIES; ++r) {
        const float total = warp_sum(weight[r]);
        if (lane == 0) maxima[warp][r] = largest[r], weights[warp][r] = total;
    }
    __syncthreads();
    for (int w = 0; w < WARPS; ++w) {
        if (warp == w)
#pragma unroll
            for (int r = 0; r < QUERIES; ++r) {
                float most = maxima[0][r];
                for (int other = 1; other < WARPS; ++other) most = fmaxf(most, maxima[other][r]);
                const float factor = largest[r] == -INFINITE ? 0.0f : exp2f(largest[r] - most);
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) {
                    float* to = shared + r * VALUE_TILE + 32 * c + lane;
                    *to = sums[r][c] * factor + (w ? *to : 0.0f);
                }
            }
        __syncthreads();
    }
    for (int at = threadIdx.x; at < QUERIES * VALUE_TILE; at += 32 * WARPS) {
        const int r = at / VALUE_TILE, channel = at % VALUE_TILE;
        if (!exists(r)) break;
        float top = maxima[0][r], total = 0.0f;
        for (int w = 1; w < WARPS; ++w) top = fmaxf(top, maxima[w][r]);
        for (int w = 0; w < WARPS; ++w)
            total += maxima[w][r] == -INFINITE ? 0.0f : weights[w][r] * exp2f(maxima[w][r] - top);
        const i64 query = (i64(row) * TOKENS + token_of(r)) * HEADS + head_of(r);
        if (PARTIAL) {
            float* to = partial + (query * parts + part) * (VALUE_WIDTH + 2);
            to[slice * VALUE_TILE + channel] = shared[at];
            if (slice == 0 && channel == 0) to[VALUE_WIDTH] = top, to[VALUE_WIDTH + 1] = total;
        } else {
            out[query * VALUE_WIDTH + slice * VALUE_TILE + channel] = total > 0.0f ? shared[at] / total : 0.0f;
        }
    }
}
