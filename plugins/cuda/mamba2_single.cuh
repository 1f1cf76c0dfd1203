// What a warp of mamba2_single reads of a row, and makes of it: names in mamba2_replay.cuh.
//
// Entries are the history, then the token; a lane has entries g and g + 8 where rows of entries meet C or the state, and entry
// `lane` of time steps. Behind the token the token stands for what is missing, and weighs nothing.
#pragma once
#include "mamba2_fold.cuh"
#include "mamba2_head.cuh"

static_assert(TOKENS == 1 && ENTRIES <= 16, "one token and one block of entries");

// 16 rows of a head's state: the channels from `channel` on.
struct Span {
    int channel, head, group;

    __device__ __forceinline__ explicit Span(int number)
        : channel(16 * number), head(channel / HEAD_DIM), group(head / HEADS_A_GROUP) {}
    __device__ __forceinline__ bool leads_head() const { return channel % HEAD_DIM == 0; }
    __device__ __forceinline__ bool leads_group() const { return channel % (HEAD_DIM * HEADS_A_GROUP) == 0; }
    // Where they lie in the rings.
    __device__ __forceinline__ int x() const { return head * RING_ROWS * HEAD_DIM + channel % HEAD_DIM; }
    __device__ __forceinline__ int b() const { return group * RING_ROWS * STATE_SIZE; }
    __device__ __forceinline__ int dt() const { return head * RING_ROWS; }
};

// First of a lane's columns in a row of STATE_SIZE 16-bit elements (rows.cuh).
__device__ __forceinline__ int first_column(int lane) { return (WIDE_STATE ? 4 : 8) * (lane % 4); }

// A lane's first elements: in the token, and in slot 0, row 0 of the rings. Worked out before the plan is there.
struct Sources {
    const ACT *token_x, *token_b, *token_c, *x, *b;
    const float* dt;
    const STATE* state;

    __device__ __forceinline__ Sources(const ACT* token, const ACT* ring_x, const ACT* ring_b, const float* ring_dt,
                                       const STATE* states, const Span& span, int lane) {
        token_x = opaque(token + span.channel + 2 * (lane % 4));
        token_b = opaque(token + INNER + span.group * STATE_SIZE + first_column(lane));
        token_c = token_b + GROUPS * STATE_SIZE;
        x = opaque(ring_x + span.x() + 2 * (lane % 4));
        b = opaque(ring_b + span.b() + first_column(lane));
        dt = opaque(ring_dt + span.dt());
        state = opaque(states + (span.channel + lane / 4) * STATE_SIZE);
    }
};

// A row's plan, on its way. Rows are taken up in their order: all are under way at once.
struct RequestedRow {
    uint4 head;
    u32 query_len;

    __device__ __forceinline__ RequestedRow(const int* step, int number)
        : head(load_16_bytes(step + number * STEP_WORDS)), query_len(load_4_bytes(step + number * STEP_WORDS + 4)) {}
    __device__ __forceinline__ Row row() const {
        return {int(head.x), int(head.y), int(head.z), int(head.w), min(int(query_len), 1)};
    }
};

// The token's scalars of a head, on their way.
struct TokenScalars {
    u16 dt;
    float bias, A_log, D;

    __device__ __forceinline__ TokenScalars(const ACT* dts, const float* A_logs, const float* biases, const float* Ds, int head)
        : dt(load_2_bytes(dts + head)),
          bias(__uint_as_float(load_4_bytes(biases + head))),
          A_log(__uint_as_float(load_4_bytes(A_logs + head))),
          D(__uint_as_float(load_4_bytes(Ds + head))) {}
    __device__ __forceinline__ float step_size() const {
        return clamped(softplus(to_float(ACT{dt}) + bias), DT_MIN, DT_MAX);
    }
    __device__ __forceinline__ float rate() const { return -LOG2_E * expf(A_log); }
};

// A lane's pairs of a row of STATE_SIZE elements, from its first column on.
template <int N>
__device__ __forceinline__ void request_pairs(Pairs (&to)[N], const ACT* first) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
        if constexpr (WIDE_STATE) {
            const uint2 low = load_8_bytes(first + 32 * k), high = load_8_bytes(first + 32 * k + 16);
            to[k] = {low.x, low.y, high.x, high.y};
        } else {
            const uint4 all = load_16_bytes(first + 32 * k);
            to[k] = {all.x, all.y, all.z, all.w};
        }
    }
}

// The same, as first operand. Pairs come one by one, each where the operand has it: else they are moved for every product.
__device__ __forceinline__ void request_operand(Pairs (&to)[BLOCKS], const ACT* first) {
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int m = operand_pair(i);
            to[k].v[i] = load_4_bytes(first + 32 * k + (WIDE_STATE ? 16 * (m / 2) + 2 * (m % 2) : 2 * m));
        }
}

// A row's entries: the history, in the rings of the row's slot, then the token.
struct Entries {
    int folded, history;
    const ACT *token_x, *token_b, *xs, *bs;
    const float* dts;

    __device__ __forceinline__ Entries(const Row& row, const Sources& from, const SlotStrides& stride)
        : folded(row.folded),
          history(row.history()),
          token_x(from.token_x),
          token_b(from.token_b),
          xs(from.x + row.slot * stride.ring_x),
          bs(from.b + row.slot * stride.ring_b),
          dts(from.dt + row.slot * stride.ring_dt) {}
    // The ring's row of an entry; of the token, the one it is appended to.
    __device__ __forceinline__ int row(int j) const { return u32(folded + j) % RING_ROWS; }
    __device__ __forceinline__ const ACT* x(int j) const {
        const ACT* in_ring = xs + row(j) * HEAD_DIM;
        return j < history ? in_ring : token_x;
    }
    __device__ __forceinline__ const ACT* b(int j) const {
        const ACT* in_ring = bs + row(j) * STATE_SIZE;
        return j < history ? in_ring : token_b;
    }
    // Time step of entry j of the history; behind it, anything.
    __device__ __forceinline__ float request_dt(int j) const { return __uint_as_float(load_4_bytes(dts + row(j))); }
};

// B of entries g and g + 8.
struct EntryB {
    Pairs v[2][BLOCKS];

    __device__ __forceinline__ void request(const Entries& entries, int lane) {
#pragma unroll
        for (int n = 0; n < 2; ++n) request_pairs(v[n], entries.b(8 * n + lane / 4));
    }
    // B . C: of entries 8 n + 2 t and the next in v[n], for every g.
    struct Products {
        float2 v[2];
    };
    __device__ __forceinline__ Products products(const Pairs (&c)[BLOCKS]) const {
        PairProducts sums[2] = {};
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
            for (int n = 0; n < 2; ++n) sums[n].add(c[k], v[n][k]);
        Products out;
#pragma unroll
        for (int n = 0; n < 2; ++n) out.v[n] = {sums[n].sum(0), sums[n].sum(1)};
        return out;
    }
    __device__ __forceinline__ void append(ACT* to, int history, int lane) const {
#pragma unroll
        for (int n = 0; n < 2; ++n)
            if (8 * n + lane / 4 == history)
#pragma unroll
                for (int k = 0; k < BLOCKS; ++k) store_pairs<WIDE_STATE>(to, k, lane % 4, v[n][k]);
    }
};

// B of the entries that are folded, 32 columns of it, read again; the others, which may be no numbers, are zero.
struct FoldedB {
    Pairs v[2];

    __device__ __forceinline__ FoldedB(const Entries& entries, int count, int block, int lane) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int j = 8 * n + lane / 4;
            Pairs pairs[1] = {};
            if (j < count) request_pairs(pairs, entries.b(j) + 32 * block);
            v[n] = pairs[0];
        }
    }
    // As SharedB has them.
    __device__ __forceinline__ Matrices get(int /*b*/, int unit, int /*lane*/) const {
        Matrices out;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < 2; ++n) out.v[2 * m + n] = transpose_8x8(v[n].v[unit % 4 + m]);
        return out;
    }
};

// x of entries g and g + 8: of the warp's channels 8 q + 2 t and the next.
struct EntryX {
    u32 v[2][2];

    __device__ __forceinline__ void request(const Entries& entries, int lane) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const ACT* at = entries.x(8 * n + lane / 4);
#pragma unroll
            for (int q = 0; q < 2; ++q) v[n][q] = load_4_bytes(at + 8 * q);
        }
    }
    __device__ __forceinline__ void append(ACT* to, int history, int lane) const {
#pragma unroll
        for (int n = 0; n < 2; ++n)
            if (8 * n + lane / 4 == history)
#pragma unroll
                for (int q = 0; q < 2; ++q) *reinterpret_cast<u32*>(to + 8 * q + 2 * (lane % 4)) = v[n][q];
    }
    // Entries 8 n + 2 t and the next of channel 8 q + g in matrix 2 q + n; behind the end, zero.
    __device__ __forceinline__ Matrices transposed(int length, int lane) const {
        Matrices out;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int q = 0; q < 2; ++q) out.v[2 * q + n] = transpose_8x8(8 * n + lane / 4 < length ? v[n][q] : 0);
        return out;
    }
};

// M of the token as first operand, the same for every g, and what is left of the checkpoint.
struct EntryWeights {
    Parts<WEIGHT_PARTS> m[4] = {};
    float decay;

    __device__ __forceinline__ EntryWeights(const Decays& decays, const EntryB::Products& products, int token, int length, float D,
                                            int lane) {
        const float last = decays.sum_at(token);
        decay = decays.decay(0.0f, last);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float value[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int j = 8 * n + 2 * (lane % 4) + e;
                const float sum_j = __shfl_sync(~0u, decays.sum[0], j), dt_j = __shfl_sync(~0u, decays.dt[0], j);
                float weight = decays.decay(sum_j, last) * dt_j * (e == 0 ? products.v[n].x : products.v[n].y);
                if (j == token) weight += D;
                value[e] = j > token || token >= length ? 0.0f : weight;
            }
            m[2 * n] = split_pair<WEIGHT_PARTS>(value[0], value[1]);
        }
    }
    // Makes the outputs of S0 C, which is no number where there is no checkpoint, and x.
    __device__ __forceinline__ void finish(Outputs& out, bool has_checkpoint, const Matrices& x) const {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
#pragma unroll
            for (int i = 0; i < 2; ++i) out.v[q].v[i] = has_checkpoint ? out.v[q].v[i] * decay : 0.0f;
            mma_parts<0, WEIGHT_PARTS>(out.v[q], m, exact_parts<ACT>(x.v[2 * q]), exact_parts<ACT>(x.v[2 * q + 1]));
        }
    }
};

// What the entries add to the warp's rows of the checkpoint, for fold_block.
struct SpanUpdates {
    EntryUpdates updates;
    float left;
    int entries;

    __device__ __forceinline__ SpanUpdates(const Decays& decays, const Matrices& x, int count, int lane) : entries(count) {
        const Weights kept(decays, count, lane);
        left = kept.decay;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const int j = 8 * s + 2 * (lane % 4);
            const float2 both = {__shfl_sync(~0u, kept.v[0], j), __shfl_sync(~0u, kept.v[0], j + 1)};
            updates.set(x, s, both, count, lane);
        }
    }
    __device__ __forceinline__ float decay() const { return left; }
    __device__ __forceinline__ EntryUpdates get(int /*b*/) const { return updates; }
};
