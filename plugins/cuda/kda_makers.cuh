// What a chunk of Kimi Delta Attention's prefill needs that does not depend on the state; a warp makes it for 32 key channels, a chunk
// ahead.
//
// As in gated_delta_makers.cuh, with G_i a vector over channels c, and decays within the products:
//
//     A_ij = n_i^2 beta_i sum_c exp(G_ic - G_jc) k_ic k_jc,   M_ij = m_i sum_c exp(G_ic - G_jc) q_ic k_jc
//
// in the order of runs that kda_pairs.cuh explains.
#pragma once
#include "delta_prefill_inverse.cuh"
#include "kda_pairs.cuh"
#include "ptx/arithmetic.cuh"

// What warps make of their channels for sums over all of them, where the stage's written keys will be.
struct PartialSums {
    float products[MAKER_WARPS][2][3][8][8];  // of keys and of queries with keys: tiles (0, 0), (1, 0) and (1, 1)
    float entries[MAKER_WARPS][3][CHUNK];     // k . k, q . q, q . k
};
static_assert(sizeof(PartialSums) <= sizeof(EntryUnits) * WRITTEN_PARTS, "the sums take too much room");

// Entries g and g + 8 of a unit of channels, in bfloat16 parts.
template <int N>
__device__ __forceinline__ void store_parts(EntryUnits* to, const ChannelParts<N, UNIT>& parts, int unit, u32 lane) {
#pragma unroll
    for (int p = 0; p < N; ++p)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const auto& v = parts.v[r];
            to[p][unit_at<KEY_UNITS>(8 * r + lane / 4, unit)] = {v[0].v[p], v[1].v[p], v[2].v[p], v[3].v[p]};
        }
}

constexpr int CHANNELS = UNIT;  // of a lane: 8 t ... 8 t + 7 of its warp's 32, of entries g and g + 8
typedef Channels<CHANNELS> LaneChannels;

struct ChannelMaker {
    uint4 k[2], q[2], gate[2][2];  // of entries g and g + 8 as stored; of 16-bit logits the first half of `gate`
    float rate;
    int maker;  // which 32 channels

    __device__ __forceinline__ int channel(u32 lane) const { return 32 * maker + CHANNELS * (lane % 4); }

    __device__ __forceinline__ void load(const Work& w, const Chunk& chunk, u32 lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int entry = 8 * r + lane / 4;
            k[r] = q[r] = gate[r][0] = gate[r][1] = {0, 0, 0, 0};
            if (entry >= chunk.count) continue;
            k[r] = load_16_bytes(chunk.k(w, entry) + channel(lane));
            if (chunk.tokens) {
                q[r] = load_16_bytes(chunk.q(w, entry) + channel(lane));
                gate[r][0] = load_16_bytes(w.t.gate + w.token(chunk.first + entry) * w.t.gate_stride + w.gate_at(channel(lane)));
            } else {
                const float* row = w.t.ring_g + w.ring_g_at(chunk.ring_row(w, entry)) + channel(lane);
#pragma unroll
                for (int half = 0; half < 2; ++half) gate[r][half] = load_16_bytes(row + 4 * half);
            }
        }
    }

    // `loaded`: called when the registers of loads are free. `met`: returns when all makers are here; `released`: when the state has
    // answered the chunk before.
    template <typename Loaded, typename Met, typename Released>
    __device__ __forceinline__ void make(Shared& shared, Stage& stage, const Work& w, const Chunk& chunk, u32 lane, Loaded loaded,
                                         Met met, Released released) {
        auto& sums = *reinterpret_cast<PartialSums*>(stage.written);
        ChannelParts<WRITTEN_PARTS, CHANNELS> written;
        {
            RunDecays<CHANNELS> runs(decays(w, chunk, 0, lane), decays(w, chunk, 1, lane));
            const LaneChannels keys[2] = {stored(k[0]), stored(k[1])}, queries[2] = {stored(q[0]), stored(q[1])};
            if (chunk.appends(w) && w.leads_key_head()) append_keys(w, chunk, lane);
            loaded();
            add_entries(sums, keys, queries, lane);
            PairProducts key_products = {}, query_products = {};
#pragma unroll 1
            for (int b = 1; b < 8; b *= 2) {
                multiply_tiles(key_products, query_products, b, keys, queries, runs, lane);
                runs.double_runs(b, lane);
            }
            multiply_across(key_products, query_products, keys, queries, runs);
            runs.join(lane);
            key_products.store(sums.products[maker][0], lane), query_products.store(sums.products[maker][1], lane);
            ChannelParts<READ_PARTS, CHANNELS> read;
            ChannelParts<1, CHANNELS> asked;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                read.set(r, keys[r] * runs.until[r]);
                asked.set(r, queries[r] * runs.until[r]);
                written.set(r, keys[r] * runs.behind[r]);
            }
            released();
            store_parts(shared.k, read, channel(lane) / UNIT, lane);
            store_parts(&shared.q, asked, channel(lane) / UNIT, lane);
            if (lane / 4 == 7) runs.until[1].store(&stage.decay[channel(lane)]);
        }
        met();
        PairProducts products = {};  // of keys for the first maker, of queries for the second
        float squares = 0.0f, crossed = 0.0f;
        if (maker < 2) {
#pragma unroll
            for (int m = 0; m < MAKER_WARPS; ++m) {
                products.add(sums.products[m][maker], lane);
                squares += sums.entries[m][maker][lane % CHUNK], crossed += sums.entries[m][2][lane % CHUNK];
            }
        }
        met();
        store_parts(stage.written, written, channel(lane) / UNIT, lane);
        if (maker == 0) finish_keys(stage, shared.lower, products.v, squares, w, chunk, lane);
        if (maker == 1) finish_queries(stage, products.v, squares, crossed, lane);
    }

private:
    __device__ __forceinline__ static LaneChannels stored(const uint4& unit) {
        const u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
        return LaneChannels(words);
    }
    // exp(g) of entry 8 r + g; g goes to the ring on the way.
    __device__ __forceinline__ LaneChannels decays(const Work& w, const Chunk& chunk, int r, u32 lane) const {
        const int entry = 8 * r + lane / 4;
        LaneChannels g(0.0f);
        if (chunk.tokens) {
            const LaneChannels logits = stored(gate[r][0]);
            float bias[CHANNELS];
#pragma unroll
            for (int c = 0; c < CHANNELS; c += 4) load_vector<4>(w.t.dt_bias + w.gate_at(channel(lane) + c), bias + c);
            // Of logits that do not exist there are zeros, and what follows from them counts for nothing.
            const float exists = entry < chunk.count ? 1.0f : 0.0f;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) g.v[c] = exists * Work::short_log_decay(rate, logits.v[c] + bias[c]);
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4& four = gate[r][half];
                const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int c = 0; c < 4; ++c) g.v[4 * half + c] = __uint_as_float(words[c]);
            }
        }
        if (chunk.appends(w) && w.leads_head() && entry < chunk.count) {
            float* row = w.t.ring_g_out + w.ring_g_at(chunk.ring_row(w, entry)) + channel(lane);
#pragma unroll
            for (int c = 0; c < CHANNELS; c += 4) store_vector<4>(row + c, &g.v[c]);
        }
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) g.v[c] = power_of_2(LOG2_E * g.v[c]);
        return g;
    }
    __device__ __forceinline__ void append_keys(const Work& w, const Chunk& chunk, u32 lane) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int entry = 8 * r + lane / 4;
            if (entry < chunk.count)
                *reinterpret_cast<uint4*>(w.t.ring_k_out + w.ring_k_at(chunk.ring_row(w, entry)) + channel(lane)) = k[r];
        }
    }

    __device__ __forceinline__ void add_entries(PartialSums& sums, const LaneChannels (&keys)[2], const LaneChannels (&queries)[2],
                                                u32 lane) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float three[3] = {keys[r].dot_quad(keys[r]), queries[r].dot_quad(queries[r]), queries[r].dot_quad(keys[r])};
            if (lane % 4) continue;
#pragma unroll
            for (int n = 0; n < 3; ++n) sums.entries[maker][n][8 * r + lane / 4] = three[n];
        }
    }

    // Products of entries of one tile that differ first in bit b.
    __device__ __forceinline__ static void multiply_tiles(PairProducts& keys_out, PairProducts& queries_out, int b,
                                                          const LaneChannels (&keys)[2], const LaneChannels (&queries)[2],
                                                          const RunDecays<CHANNELS>& runs, u32 lane) {
        ChannelParts<2, CHANNELS> k;
        ChannelParts<1, CHANNELS> high, q;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const LaneChannels decay = runs.of_boundary(r, b, lane);
            k.set(r, keys[r] * decay), q.set(r, queries[r] * decay);
        }
        k.copy_high(high);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Accumulator of_keys = {}, of_queries = {};
            k.multiply(of_keys, k, r), q.multiply(of_queries, high, r);
            keys_out.keep(r, of_keys, b, lane), queries_out.keep(r, of_queries, b, lane);
        }
    }
    // The same of entries of the second tile with those of the first.
    __device__ __forceinline__ static void multiply_across(PairProducts& keys_out, PairProducts& queries_out, const LaneChannels (&keys)[2],
                                                           const LaneChannels (&queries)[2], const RunDecays<CHANNELS>& runs) {
        ChannelParts<2, CHANNELS> k;
        ChannelParts<1, CHANNELS> high, q = {};
        k.set(0, keys[0] * runs.behind[0]), k.set(1, keys[1] * runs.until[1]), q.set(1, queries[1] * runs.until[1]);
        k.copy_high(high);
        Accumulator of_keys = {}, of_queries = {};
        k.multiply(of_keys, k, 0), q.multiply(of_queries, high, 0);
        keys_out.keep_across(of_keys), queries_out.keep_across(of_queries);
    }

    __device__ __forceinline__ void finish_keys(Stage& stage, float (&lower)[CHUNK][CHUNK], const float (&products)[3][2], float squares,
                                                const Work& w, const Chunk& chunk, u32 lane) const {
        const bool exists = int(lane) < chunk.count;
        float beta = 0.0f;
        if (exists && chunk.tokens) {
            beta = w.beta(w.beta_logit(chunk.first + lane));
            if (chunk.appends(w) && w.leads_head()) w.t.ring_beta_out[w.ring_beta_at(chunk.ring_row(w, lane))] = beta;
        } else if (exists) {
            beta = w.t.ring_beta[w.ring_beta_at(chunk.ring_row(w, lane))];
        }
        const float norm = rsqrtf(squares + NORM_EPSILON), gain = norm * norm * beta;
        if (lane < CHUNK) stage.value_gain[lane] = norm * beta, stage.key_gain[lane] = gain;
        const int i = lane / 4, j = lane % 4 * 2;
        const float early = __shfl_sync(~0u, gain, i), late = __shfl_sync(~0u, gain, 8 + i);
        const float first[2] = {early * products[0][0], early * products[0][1]}, none[2] = {};
        const float across[2] = {late * products[1][0], late * products[1][1]}, second[2] = {late * products[2][0], late * products[2][1]};
        store_vector<2>(&lower[i][j], first), store_vector<2>(&lower[i][8 + j], none);
        store_vector<2>(&lower[8 + i][j], across), store_vector<2>(&lower[8 + i][8 + j], second);
        __syncwarp();
        if (lane < CHUNK) invert(stage.inverse, lower, lane);
        __syncwarp();
    }

    __device__ __forceinline__ static void finish_queries(Stage& stage, const float (&products)[3][2], float squares, float crossed,
                                                          u32 lane) {
        const float norm = rsqrtf(squares + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
        if (lane < CHUNK) stage.query_gain[lane] = norm;
        const int i = lane / 4, j = lane % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < 3; ++tile) {
            const int row = tile == 0 ? i : 8 + i;
            const float gain = __shfl_sync(~0u, norm, row), own = __shfl_sync(~0u, crossed, row);
            float m[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) m[e] = gain * (tile != 1 && i == j + e ? own : products[tile][e]);
            stage.reads.store(tile, lane, m[0], m[1]);
        }
    }
};
