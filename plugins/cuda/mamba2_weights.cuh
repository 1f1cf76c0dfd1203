// Stage 3 of mamba2_step: what a block works out once for all its heads and warps.
//
// x of every entry is copied to shared memory, without passing a register; B . C of the group, time steps and decays become the
// weights M_ij (formula and names in mamba2_replay.cuh), which lie ready as operands when the heads are taken up.
#pragma once
#include "bf16_parts.cuh"
#include "mamba2_replay.cuh"
#include "ptx/async_copy.cuh"
#include "shared_tile.cuh"

// Rows of entries in shared memory. Where the last 16 are cut short, the last of them stand for those that are missing.
constexpr int ENTRY_ROWS = 8 * ((ENTRIES + 7) / 8);
constexpr int X_UNITS = HEAD_DIM / UNIT, B_UNITS = STATE_SIZE / UNIT;
// Units of a row in shared memory: one more than it needs, so that rows begin in different banks.
template <int UNITS>
constexpr int PITCH = UNITS + 1;
// Bfloat16 parts of a weight, and of what is added to a state: 8 bits more than a bfloat16 state has, or all of a float.
constexpr int WEIGHT_PARTS = 2, UPDATE_PARTS = same_type<STATE, bf16>::value ? 2 : 3;

struct BlockWeights {
    uint4 x[HEADS_A_BLOCK][ENTRY_ROWS * PITCH<X_UNITS>];
    // M as first operand: {hi, lo} parts of tokens 8 n + g, entries 16 b + 2 t, + 1 and 16 b + 8 + 2 t, + 1.
    uint4 m[HEADS_A_BLOCK][ENTRY_BLOCKS][TOKEN_TILES][32];
    float decay[HEADS_A_BLOCK][8 * TOKEN_TILES];  // from the checkpoint to each token
    // Of rows that fold: what an entry counts in the new checkpoint, and what is left of the old one.
    float kept[HEADS_A_BLOCK][16 * ENTRY_BLOCKS], kept_state[HEADS_A_BLOCK];
    float dt[HEADS_A_BLOCK][ENTRY_ROWS];
    float rate[HEADS_A_BLOCK], D[HEADS_A_BLOCK];
    GroupProducts bc;
};

// Block b of 16 entries of a matrix with rows of UNITS units, transposed, from unit `unit` on.
template <int UNITS>
__device__ __forceinline__ Matrices load_entries(const uint4* rows, int b, int unit, int lane) {
    const int row = 16 * b + 16 > ENTRY_ROWS ? min(16 * b + lane % 16, ENTRY_ROWS - 1) : 16 * b + lane % 16;
    return load_transposed_matrices(rows + row * PITCH<UNITS> + unit + lane / 16);
}

// Requests x of all entries; entries that do not exist become zero. A thread has one unit of entries 16 apart.
__device__ __forceinline__ void request_x(BlockWeights& out, const Sequence& seq, const Heads& heads) {
    const int unit = threadIdx.x % X_UNITS, entry = threadIdx.x / X_UNITS;
#pragma unroll
    for (int b = 0; b < ENTRY_BLOCKS; ++b) {
        if (!is_needed(b, seq.length)) continue;
        const int j = 16 * b + entry, existing = seq.existing(j), head_step = seq.x_step(existing);
        const ACT* from = seq.x(existing, heads.first) + UNIT * unit;
        const u32 at = j * PITCH<X_UNITS> + unit;
        if (j < ENTRY_ROWS)
            for (int h = 0; h < heads.count; ++h, from += head_step) copy_16_bytes(&out.x[h][at], from, j < seq.length);
    }
}

// Time steps of all entries and scalars of the heads, on their way: a thread has entries threadIdx.x + 32 WARPS i of
// [heads, ENTRY_ROWS], and head threadIdx.x. Nothing is made of them before they are stored: it would wait for memory, and all
// further requests with it.
struct RequestedSteps {
    static constexpr int N = (HEADS_A_BLOCK * ENTRY_ROWS + 32 * WARPS - 1) / (32 * WARPS);
    u32 dt[N];  // as it is stored: a float of the history, an element of a token
    float bias[N], A_log, D;

    __device__ __forceinline__ RequestedSteps(const Sequence& seq, const Heads& heads) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int at = threadIdx.x + 32 * WARPS * i, head = heads.first + at / ENTRY_ROWS, j = at % ENTRY_ROWS;
            dt[i] = 0, bias[i] = 0.0f;
            if (at >= heads.count * ENTRY_ROWS) continue;
            if (j < seq.history)
                dt[i] = __float_as_uint(seq.in.ring_dt[head * RING_ROWS + seq.ring_row(j)]);
            else if (j < seq.length)
                dt[i] = seq.in.dt[i64(j - seq.history) * seq.in.dt_stride + head].bits, bias[i] = seq.in.dt_bias[head];
        }
        if (threadIdx.x < heads.count) A_log = seq.in.A_log[heads.first + threadIdx.x], D = seq.in.D[heads.first + threadIdx.x];
    }
    // Finishes them. Those of tokens go into the ring, too.
    __device__ __forceinline__ void store(BlockWeights& out, const Sequence& seq, const Heads& heads,
                                          const RingOut& ring) const {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int at = threadIdx.x + 32 * WARPS * i, h = at / ENTRY_ROWS, j = at % ENTRY_ROWS;
            if (at >= heads.count * ENTRY_ROWS) continue;
            float step = __uint_as_float(dt[i]);
            if (j >= seq.history && j < seq.length) {
                step = clamped(softplus(late_float(ACT{u16(dt[i])}) + bias[i]), DT_MIN, DT_MAX);
                if (ring.appends) ring.dt[(heads.first + h) * RING_ROWS + seq.ring_row(j)] = step;
            }
            out.dt[h][j] = step;
        }
        if (threadIdx.x < heads.count) out.rate[threadIdx.x] = -LOG2_E * expf(A_log), out.D[threadIdx.x] = D;
    }
};

// Weights of head h of the block, by one warp.
__device__ __forceinline__ void weigh_entries(BlockWeights& out, const Sequence& seq, int h, int lane) {
    const int g = lane / 4, t = lane % 4;
    float steps[ENTRY_LANES];
#pragma unroll
    for (int b = 0; b < ENTRY_LANES; ++b) steps[b] = lane + 32 * b < ENTRY_ROWS ? out.dt[h][lane + 32 * b] : 0.0f;
    const Decays decays(steps, out.rate[h], lane);
    const float D = out.D[h];
    float sum_i[TOKEN_TILES];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
        sum_i[n] = decays.sum_at(seq.history + 8 * n + g);
        if (t == 0) out.decay[h][8 * n + g] = decays.decay(0.0f, sum_i[n]);
    }
#pragma unroll
    for (int b = 0; b < ENTRY_BLOCKS; ++b) {
        if (!is_needed(b, seq.length)) continue;
        Parts<WEIGHT_PARTS> m[TOKEN_TILES][2];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            float value[TOKEN_TILES][2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int j = 16 * b + 8 * s + 2 * t + e;
                const float sum_j = __shfl_sync(~0u, decays.sum[b / 2], j & 31);
                const float dt_j = __shfl_sync(~0u, decays.dt[b / 2], j & 31);
#pragma unroll
                for (int n = 0; n < TOKEN_TILES; ++n) {
                    const float2 products = out.bc.v[2 * b + s][n][lane];
                    const int entry = seq.history + 8 * n + g;
                    float weight = decays.decay(sum_j, sum_i[n]) * dt_j * (e == 0 ? products.x : products.y);
                    if (j == entry) weight += D;
                    value[n][e] = j > entry || entry >= seq.length ? 0.0f : weight;
                }
            }
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) m[n][s] = split_pair<WEIGHT_PARTS>(value[n][0], value[n][1]);
        }
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n)
            out.m[h][b][n][lane] = {m[n][0].v[0], m[n][1].v[0], m[n][0].v[1], m[n][1].v[1]};
    }
    if (!seq.row.folds()) return;
    const Weights kept(decays, seq.row.fold_entries(), lane);
#pragma unroll
    for (int b = 0; b < ENTRY_LANES; ++b)
        if (lane + 32 * b < 16 * ENTRY_BLOCKS) out.kept[h][lane + 32 * b] = kept.v[b];
    if (lane == 0) out.kept_state[h] = kept.decay;
}

// Stores the tokens' x of the block's heads in the ring.
__device__ __forceinline__ void append_x(const BlockWeights& in, const Sequence& seq, const Heads& heads, ACT* ring_x) {
    const int unit = threadIdx.x % X_UNITS;
#pragma unroll 1
    for (int at = threadIdx.x / X_UNITS; at < heads.count * TOKENS; at += 16) {
        const int h = at / TOKENS, i = at % TOKENS, j = seq.history + i;
        if (i >= seq.row.tokens) continue;
        ACT* to = ring_x + ((heads.first + h) * RING_ROWS + seq.ring_row(j)) * HEAD_DIM + UNIT * unit;
        *reinterpret_cast<uint4*>(to) = in.x[h][j * PITCH<X_UNITS> + unit];
    }
}

// All of it, by all warps of the block. `with_c` is called once with the group's C, while other requests are under way; what it
// stores in shared memory is there afterwards.
template <typename WithC>
__device__ __forceinline__ void weigh_sequence(BlockWeights& out, const Sequence& seq, const Heads& heads, const RingOut& ring,
                                               int warp, int lane, WithC with_c) {
    request_x(out, seq, heads);
    const RequestedSteps steps(seq, heads);
    TokenC c;
    c.load(seq, heads.group, seq.row.tokens, lane);
    for (int n = warp; n < 2 * ENTRY_BLOCKS; n += WARPS)
        if (n == 0 || 8 * n < seq.length) tile_products(out.bc, n, seq, c, heads, lane, ring);
    with_c(c);
    steps.store(out, seq, heads, ring);
    __syncthreads();
    for (int h = warp; h < heads.count; h += WARPS) weigh_entries(out, seq, h, lane);
    wait_copies();
    __syncthreads();
    if (ring.appends) append_x(out, seq, heads, ring.x);
}
