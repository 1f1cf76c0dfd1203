// The state of the delta rule's prefill, in float32 registers: a warp holds 16 value rows, and all that follows from them. What
// products leave in accumulators is the next product's operand as it stands (formulas: gated_delta_makers.cuh).
//
// A lane has rows g and g + 8 of the warp's 16. They are value rows 4 (g / 2) + g % 2 and two behind it, so that a quad's values of
// a token, transposed, are neighbours in memory.
#pragma once
#include "delta_prefill_chunk.cuh"

// First of a lane's four value rows of a token.
__device__ __forceinline__ int first_value_row(u32 lane) { return opaque(threadIdx.x) / 32 * 16 + lane % 4 * 4; }

__device__ __forceinline__ float2 load_pair(const float* from, int tile, u32 lane) {
    return *reinterpret_cast<const float2*>(from + 8 * tile + 2 * (lane % 4));
}

// Rows g and g + 8, entries 8 i + 2 t and 8 i + 2 t + 1 in accumulator i.
struct Entries {
    Accumulator v[TILES];

    __device__ __forceinline__ void scale(const float* gains, u32 lane) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const float2 gain = load_pair(gains, i, lane);
            v[i].v[0] *= gain.x, v[i].v[1] *= gain.y, v[i].v[2] *= gain.x, v[i].v[3] *= gain.y;
        }
    }
    __device__ __forceinline__ void add(const Entries& other) {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) v[i].v[e] += other.v[i].v[e];
    }
    // The outputs of a chunk's tokens.
    __device__ __forceinline__ void store(const Work& w, const Chunk& chunk, u32 lane) const {
        ACT* row = w.o(chunk.first + lane / 4) + first_value_row(lane);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            uint2 pairs;
            pairs.x = transpose_8x8(pack_pair<ACT>(v[i].v[0], v[i].v[1]));
            pairs.y = transpose_8x8(pack_pair<ACT>(v[i].v[2], v[i].v[3]));
            const int entry = 8 * i + lane / 4;
            if (entry < chunk.count) *reinterpret_cast<uint2*>(row + 8 * i * VALUE_HEADS * VALUE_DIM) = pairs;
        }
    }
};

// v of a chunk's entries as it comes from memory: of entry 8 i + g, value rows 4 t ... 4 t + 3 of the warp's.
struct LoadedValues {
    uint2 v[TILES];

    __device__ __forceinline__ void load(const Work& w, const Chunk& chunk, u32 lane) {
        const ACT* row = chunk.v(w, lane / 4) + first_value_row(lane);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int entry = 8 * i + lane / 4;
            v[i] = {0, 0};
            if (entry < chunk.count) v[i] = *reinterpret_cast<const uint2*>(row);
            row = chunk.tokens ? row + 8 * w.t.qkv_stride : chunk.v(w, entry + 8) + first_value_row(lane);
        }
    }
    __device__ __forceinline__ void append(const Work& w, const Chunk& chunk, u32 lane) const {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int entry = 8 * i + lane / 4;
            if (entry < chunk.count)
                *reinterpret_cast<uint2*>(w.t.ring_v_out + w.ring_v_at(chunk.ring_row(w, entry)) + first_value_row(lane)) = v[i];
        }
    }
    // From S k of the entries to n beta v - n^2 beta exp(G) S k.
    __device__ __forceinline__ void subtract(Entries& reads, const Stage& stage, u32 lane) const {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const float2 value_gain = load_pair(stage.value_gain, i, lane), key_gain = load_pair(stage.key_gain, i, lane);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 pair = transpose_8x8(r ? v[i].y : v[i].x);
                float* x = &reads.v[i].v[2 * r];
                x[0] = value_gain.x * half_to_float<ACT>(pair, false) - key_gain.x * x[0];
                x[1] = value_gain.y * half_to_float<ACT>(pair, true) - key_gain.y * x[1];
            }
        }
    }
};

// out_i += sum_j matrix_ij x_j, in terms FIRST <= a + b < ORDER of the parts' products.
template <int FIRST, int ORDER, int NA, int NB>
__device__ __forceinline__ void add_triangle(Entries& out, const Triangle<NB>& matrix, const Parts<NA> (&x)[4], u32 lane) {
    Parts<NB> tiles[TRIANGLE_TILES], none = {};
#pragma unroll
    for (int p = 0; p < NB; ++p) {
        const Matrices part = matrix.load(p, lane);
#pragma unroll
        for (int n = 0; n < TRIANGLE_TILES; ++n) tiles[n].v[p] = part.v[n];
    }
    mma_parts<FIRST, ORDER>(out.v[0], x, tiles[0], none);
    mma_parts<FIRST, ORDER>(out.v[1], x, tiles[1], tiles[2]);
}

// Sums of small terms, so that no chain of products is too long.
constexpr int SMALL_SUMS = PER_CHANNEL ? 2 : 1;

struct RowState {
    Accumulator v[KEY_UNITS];  // rows g and g + 8, columns 8 n + 2 t and 8 n + 2 t + 1

    __device__ static int row(u32 lane, int r) { return opaque(threadIdx.x) / 32 * 16 + lane / 8 * 4 + lane / 4 % 2 + 2 * r; }

    __device__ __forceinline__ void load(const Work& w, u32 lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const STATE* from = w.t.state + w.state_at(row(lane, r)) + 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < KEY_UNITS; ++n) {
                v[n].v[2 * r] = v[n].v[2 * r + 1] = 0.0f;
                if (w.row.folded) load_vector<2>(from + 8 * n, &v[n].v[2 * r]);
            }
        }
    }
    __device__ __forceinline__ void store(const Work& w, u32 lane) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            STATE* to = w.t.state_out + w.state_at(row(lane, r)) + 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < KEY_UNITS; ++n) store_vector<2>(to + 8 * n, &v[n].v[2 * r]);
        }
    }

    // S k and S q of the chunk's entries. Small terms of S k are added up apart: the tensor cores cut off sums.
    __device__ __forceinline__ void read(Entries& keys, Entries& queries, const EntryUnits (&read_keys)[READ_PARTS],
                                         const EntryUnits& asked, u32 lane) const {
        Entries small[SMALL_SUMS] = {};
        keys = {}, queries = {};
#pragma unroll
        for (int n = 0; n < KEY_UNITS; n += 2) {
            Parts<STATE_PARTS> s[4];
            split_operand(s, v[n], v[n + 1]);
            const u32 own = opaque(lane);
            const KeyOperands<READ_PARTS> k(read_keys, [&](const uint4* units) { return load_rows<KEY_UNITS>(units, n, own); });
            const Matrices q = load_rows<KEY_UNITS>(asked, n, own);
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                mma_parts<0, 1>(keys.v[i], s, k.v[2 * i], k.v[2 * i + 1]);
                mma_parts<1, STATE_PARTS>(small[n / 2 % SMALL_SUMS].v[i], s, k.v[2 * i], k.v[2 * i + 1]);
                mma_parts<0, 2>(queries.v[i], s, exact_parts<ACT>(q.v[2 * i]), exact_parts<ACT>(q.v[2 * i + 1]));
            }
        }
#pragma unroll
        for (const Entries& sum : small) keys.add(sum);
    }

    // x of a chunk's entries, and its outputs; of entries of the ring those mean nothing. `was_read`: called when the state has
    // answered keys and queries.
    template <typename Read>
    __device__ __forceinline__ void answer(Entries& x, Entries& outputs, const LoadedValues& values, const Shared& shared,
                                           const Stage& stage, u32 lane, Read was_read) const {
#if PER_CHANNEL
        read(x, outputs, shared.k, shared.q, opaque(lane));
#else
        read(x, outputs, stage.k, stage.q, opaque(lane));
#endif
        was_read();
        values.subtract(x, stage, lane);
        Parts<STATE_PARTS> parts[4];
        split_operand(parts, x.v[0], x.v[1]);
        Entries small = {};
        x = {};
        add_triangle<0, 1>(x, stage.inverse, parts, opaque(lane));
        add_triangle<1, STATE_PARTS>(small, stage.inverse, parts, lane);
        x.add(small);
        Parts<2> read_parts[4];
        split_operand(read_parts, x.v[0], x.v[1]);
        outputs.scale(stage.query_gain, lane);
        add_triangle<0, 2>(outputs, stage.reads, read_parts, lane);
    }

    // Takes up the chunk.
    __device__ __forceinline__ void update(Entries& x, const Stage& stage, u32 lane) {
        constexpr int TOGETHER = 4;
        Parts<STATE_PARTS> parts[4];
#if !PER_CHANNEL
        x.scale(stage.to_end, lane);
#endif
        split_operand(parts, x.v[0], x.v[1]);
#pragma unroll
        for (int first = 0; first < KEY_UNITS; first += TOGETHER) {
            Accumulator large[TOGETHER] = {}, small[TOGETHER] = {};
#pragma unroll
            for (int n = 0; n < TOGETHER; n += 2) {
                const KeyOperands<WRITTEN_PARTS> k(
                    written(stage), [&](const uint4* units) { return load_transposed<KEY_UNITS>(units, 0, first + n, lane); });
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    mma_parts<0, 1>(large[n + m], parts, k.v[2 * m], k.v[2 * m + 1]);
                    mma_parts<1, STATE_PARTS>(small[n + m], parts, k.v[2 * m], k.v[2 * m + 1]);
                }
            }
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const float2 decay = decays(stage, first + n, lane);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    v[first + n].v[e] = fmaf(e % 2 ? decay.y : decay.x, v[first + n].v[e], large[n].v[e] + small[n].v[e]);
            }
        }
    }

private:
#if PER_CHANNEL
    __device__ static const EntryUnits (&written(const Stage& stage))[WRITTEN_PARTS] { return stage.written; }
    __device__ static float2 decays(const Stage& stage, int tile, u32 lane) { return load_pair(stage.decay, tile, lane); }
#else
    __device__ static const EntryUnits (&written(const Stage& stage))[WRITTEN_PARTS] { return stage.k; }
    __device__ static float2 decays(const Stage& stage, int, u32) { return {stage.decay, stage.decay}; }
#endif
};
