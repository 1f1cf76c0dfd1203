// What a chunk of the delta rule's prefill needs that does not depend on the state; two warps make it, a chunk ahead.
//
// With G_i = g_0 + ... + g_i, n_i = 1 / |k_i| and m_i = K^-1/2 / |q_i|, raw keys and queries, and x_i = n_i u_i,
//
//     x = (I + A)^-1 (n_j beta_j v_j - n_j^2 beta_j exp(G_j) S k_j),   A_ij = n_i^2 beta_i exp(G_i - G_j) k_i . k_j,  j < i
//     o_i = m_i exp(G_i) S q_i + sum_{j <= i} M_ij x_j,                M_ij = m_i exp(G_i - G_j) q_i . k_j
//     S = exp(G_last) S + sum_j exp(G_last - G_j) x_j k_j^T
//
// (the chunk form of Gated DeltaNet, arXiv 2412.06464, section 3.3). Exponents are differences of sums in double, none is positive.
#pragma once
#include "delta_prefill_inverse.cuh"

// One value of every entry: entry l's is in lane l.
template <typename T>
__device__ __forceinline__ T of_entry(T value, u32 entry) {
    return __shfl_sync(~0u, value, int(entry));
}

// ---- inputs ----------------------------------------------------------------------------------------------------------

// Keys or queries of a chunk, for products over their columns: entry 8 i + g, columns 32 b + 8 t ... 32 b + 8 t + 7.
struct EntryRows {
    uint4 v[TILES][KEY_BLOCKS];

    // `row_at(i)`: entry i's row.
    template <typename Rows>
    __device__ __forceinline__ void load(const Work& w, const Chunk& chunk, u32 lane, Rows row_at) {
        const ACT* row = row_at(lane / 4) + UNIT * (lane % 4);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int entry = 8 * i + lane / 4;
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; ++b) {
                v[i][b] = {0, 0, 0, 0};
                if (entry < chunk.count) v[i][b] = load_16_bytes(row + 32 * b);
            }
            row = chunk.tokens ? row + 8 * w.t.qkv_stride : row_at(entry + 8) + UNIT * (lane % 4);
        }
    }
    __device__ __forceinline__ void store(uint4* to, u32 lane) const {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; ++b) to[unit_at<KEY_UNITS>(8 * i + lane / 4, 4 * b + lane % 4)] = v[i][b];
    }
    // A lane's columns of step p of a product, for 8 entries.
    __device__ __forceinline__ uint2 pairs(int i, int p) const {
        const uint4& unit = v[i][p / 2];
        return p % 2 ? uint2{unit.z, unit.w} : uint2{unit.x, unit.y};
    }
    // sum += these entries . 8 others
    __device__ __forceinline__ void multiply(Accumulator& sum, int p, uint2 other) const {
        const uint2 upper = pairs(0, p), lower = pairs(1, p);
        mma_16bit<ACT>(sum, {upper.x, lower.x, upper.y, lower.y}, other.x, other.y);
    }
};

// Squares of the entries from their products with the 8 first and the 8 last of them; lanes from CHUNK on repeat the others.
__device__ __forceinline__ float squares(const Accumulator (&own)[TILES], u32 lane) {
    const bool odd = lane / 4 % 2;
    const u32 owner = lane % 8 * 4 + lane % 8 / 2;
    const float first = of_entry(odd ? own[0].v[1] : own[0].v[0], owner), second = of_entry(odd ? own[1].v[3] : own[1].v[2], owner);
    return lane / 8 % 2 ? second : first;
}

// The gates of a chunk's entries. What lies behind its end neither decays nor writes.
struct Gates {
    float g, beta;  // as stored: finished in the ring, logits of tokens
    double sum;     // G in powers of 2

    __device__ __forceinline__ void load(const Work& w, const Chunk& chunk, u32 lane) {
        g = beta = 0.0f;
        if (int(lane) >= chunk.count) return;
        if (chunk.tokens) {
            g = w.decay_logit(chunk.first + lane, 0), beta = w.beta_logit(chunk.first + lane);
        } else {
            const int row = chunk.ring_row(w, lane);
            g = w.t.ring_g[w.ring_g_at(row)], beta = w.t.ring_beta[w.ring_beta_at(row)];
        }
    }
    __device__ __forceinline__ void finish(const Work& w, const Chunk& chunk, float rate, float bias, u32 lane) {
        if (chunk.tokens && int(lane) < chunk.count) g = Work::log_decay(rate, g + bias), beta = w.beta(beta);
        sum = 1.4426950408889634 * g;
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            const double other = __shfl_up_sync(~0u, sum, offset);
            if (int(lane) >= offset) sum += other;
        }
    }
    __device__ __forceinline__ void append(const Work& w, const Chunk& chunk, u32 lane) const {
        if (int(lane) >= chunk.count) return;
        const int row = chunk.ring_row(w, lane);
        w.t.ring_g_out[w.ring_g_at(row)] = g, w.t.ring_beta_out[w.ring_beta_at(row)] = beta;
    }
};

// exp(G_i - G_j) of rows 8 i + g and columns 8 j + 2 t + e, the row's entry being the later one.
struct Decays {
    double rows[TILES], columns[TILES][2];

    __device__ __forceinline__ Decays(const double (&sums)[CHUNK], u32 lane) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            rows[i] = sums[8 * i + lane / 4];
#pragma unroll
            for (int e = 0; e < 2; ++e) columns[i][e] = sums[8 * i + lane % 4 * 2 + e];
        }
    }
    __device__ __forceinline__ float operator()(int i, int j, int e) const {
        return exp2f(fminf(float(rows[i] - columns[j][e]), 0.0f));
    }
};

// ---- keys: the triangular system -----------------------------------------------------------------------------------------

struct KeyMaker {
    EntryRows keys;
    Gates gates;
    float rate, bias;

    __device__ __forceinline__ void load(const Work& w, const Chunk& chunk, u32 lane) {
        keys.load(w, chunk, lane, [&](int i) { return chunk.k(w, i); });
        gates.load(w, chunk, lane);
    }

    // `published`: called when the chunk's keys and G are in shared memory; `loaded`: when the registers of loads are free.
    template <typename Published, typename Loaded>
    __device__ __forceinline__ void make(Shared& shared, Stage& stage, const Work& w, const Chunk& chunk, u32 lane,
                                         Published published, Loaded loaded) {
        keys.store(stage.k[0], lane);
        gates.finish(w, chunk, rate, bias, lane);
        if (lane < CHUNK) shared.sums[lane] = gates.sum;
        __syncwarp();
        published();
        if (chunk.appends(w)) append(w, chunk, lane);
        Accumulator own[TILES] = {};
#pragma unroll
        for (int p = 0; p < KEY_DIM / 16; ++p)
#pragma unroll
            for (int j = 0; j < TILES; ++j) keys.multiply(own[j], p, keys.pairs(j, p));
        const float norm = rsqrtf(squares(own, lane) + NORM_EPSILON), gain = norm * gates.beta;
        loaded();
        const double last = of_entry(gates.sum, CHUNK - 1);
        if (lane < CHUNK) {
            stage.value_gain[lane] = gain;
            stage.key_gain[lane] = norm * gain * exp2f(float(gates.sum));
            stage.to_end[lane] = exp2f(float(last - gates.sum));
        }
        if (lane == 0) stage.decay = exp2f(float(last));
        weigh(own, shared.lower, norm * gain, Decays(shared.sums, lane), lane);
        __syncwarp();
        if (lane < CHUNK) invert(stage.inverse, shared.lower, lane);
        __syncwarp();
    }

private:
    __device__ __forceinline__ void append(const Work& w, const Chunk& chunk, u32 lane) const {
        if (w.leads_head()) gates.append(w, chunk, lane);
        if (!w.leads_key_head()) return;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int entry = 8 * i + lane / 4;
            if (entry >= chunk.count) break;
            ACT* row = w.t.ring_k_out + w.ring_k_at(chunk.ring_row(w, entry)) + UNIT * (lane % 4);
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; ++b) *reinterpret_cast<uint4*>(row + 32 * b) = keys.v[i][b];
        }
    }

    // From products of keys to A.
    __device__ __forceinline__ static void weigh(const Accumulator (&own)[TILES], float (&lower)[CHUNK][CHUNK], float gain,
                                                 const Decays& decays, u32 lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const float row_gain = of_entry(gain, 8 * i + g);
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                float a[2] = {};
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (j <= i && 8 * i + g > 8 * j + 2 * t + e) a[e] = row_gain * decays(i, j, e) * own[j].v[2 * i + e];
                store_vector<2>(&lower[8 * i + g][8 * j + 2 * t], a);
            }
        }
    }
};

// ---- queries: what outputs take of the chunk's own entries --------------------------------------------------------------------

struct QueryMaker {
    EntryRows queries;

    __device__ __forceinline__ void load(const Work& w, const Chunk& chunk, u32 lane) {
        if (chunk.tokens) queries.load(w, chunk, lane, [&](int i) { return chunk.q(w, i); });
    }

    // `published`: returns when the chunk's keys and G are in shared memory; `loaded`: called when registers are free. Entries of
    // the ring have no queries.
    template <typename Published, typename Loaded>
    __device__ __forceinline__ void make(const Shared& shared, Stage& stage, const Chunk& chunk, u32 lane, Published published,
                                         Loaded loaded) {
        if (!chunk.tokens) {
            published();
            return loaded();
        }
        queries.store(stage.q, lane);
        Accumulator own[TILES] = {}, products[TILES] = {};
#pragma unroll
        for (int p = 0; p < KEY_DIM / 16; ++p)
#pragma unroll
            for (int j = 0; j < TILES; ++j) queries.multiply(own[j], p, queries.pairs(j, p));
        const float norm = rsqrtf(squares(own, lane) + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
        published();
        if (lane < CHUNK) stage.query_gain[lane] = norm * exp2f(float(shared.sums[lane]));
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; ++b)
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const uint4 keys = load_unit(stage.k[0], unit_at<KEY_UNITS>(8 * j + lane / 4, 4 * b + lane % 4));
                queries.multiply(products[j], 2 * b, {keys.x, keys.y});
                queries.multiply(products[j], 2 * b + 1, {keys.z, keys.w});
            }
        const Decays decays(shared.sums, lane);
        loaded();
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const float row_gain = of_entry(norm, 8 * i + g);
#pragma unroll
            for (int j = 0; j <= i; ++j) {
                float m[2] = {};
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * i + g >= 8 * j + 2 * t + e) m[e] = row_gain * decays(i, j, e) * products[j].v[2 * i + e];
                stage.reads.store(Triangle<2>::tile(i, j), lane, m[0], m[1]);
            }
        }
    }
};
