// What a chunk of Kimi Delta Attention's prefill needs that does not depend on the state; a warp makes it for 32 key channels, a chunk
// ahead.
//
// As in gated_delta_makers.cuh, with G_i a vector over channels c, and decays within the products:
//
//     A_ij = n_i^2 beta_i sum_c exp(G_ic - G_jc) k_ic k_jc,   M_ij = m_i sum_c exp(G_ic - G_jc) q_ic k_jc
//
// No ratio of decays is formed. Two entries differ first in one bit of their index, b: j has it not, i has it, and between them lies the
// boundary of two neighbouring runs of b entries. Then exp(G_i - G_j) is the decay from the boundary through i times that from behind j
// to the boundary. Both are products of an entry's decays with others of its run, which double in length from b to 2 b.
#pragma once
#include "delta_prefill_inverse.cuh"
#include "kda_channels.cuh"

// What warps make of their channels for sums over all of them, where the stage's written keys will be.
struct PartialSums {
    float products[MAKER_WARPS][2][3][8][8];  // of keys and of queries with keys: tiles (0, 0), (1, 0) and (1, 1)
    float entries[MAKER_WARPS][3][CHUNK];     // k . k, q . q, q . k
};
static_assert(sizeof(PartialSums) <= sizeof(EntryUnits) * WRITTEN_PARTS, "the sums take too much room");

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
        ChannelParts<WRITTEN_PARTS> written;
        {
            Channels until[2] = {decays(w, chunk, 0, lane), decays(w, chunk, 1, lane)}, behind[2] = {Channels(1.0f), Channels(1.0f)};
            const Channels keys[2] = {Channels(k[0]), Channels(k[1])}, queries[2] = {Channels(q[0]), Channels(q[1])};
            if (chunk.appends(w) && w.leads_key_head()) append_keys(w, chunk, lane);
            loaded();
            add_entries(sums, keys, queries, lane);
            float key_products[3][2] = {}, query_products[3][2] = {};
#pragma unroll 1
            for (int b = 1; b < 8; b *= 2) {
                multiply_tiles(key_products, query_products, b, keys, queries, until, behind, lane);
                double_runs(b, until, behind, lane);
            }
            multiply_across(key_products[1], query_products[1], keys, queries, until[1], behind[0]);
            const u32 last = 28 + lane % 4;
            const Channels first = until[0].from(last);
            behind[0] = behind[0] * until[1].from(last), until[1] = until[1] * first;
            store_products(sums.products[maker], key_products, query_products, lane);
            ChannelParts<READ_PARTS> read;
            ChannelParts<1> asked;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                read.set(r, keys[r] * until[r]);
                asked.set(r, queries[r] * until[r]);
                written.set(r, keys[r] * behind[r]);
            }
            released();
            read.store(shared.k, channel(lane) / UNIT, lane);
            asked.store(&shared.q, channel(lane) / UNIT, lane);
            if (lane / 4 == 7) {
#pragma unroll
                for (int c = 0; c < CHANNELS; c += 4) store_vector<4>(&stage.decay[channel(lane) + c], &until[1].v[c]);
            }
        }
        met();
        float products[3][2] = {}, squares = 0.0f, crossed = 0.0f;
        if (maker < 2) {
            add_up(products, sums, lane);
#pragma unroll
            for (int m = 0; m < MAKER_WARPS; ++m)
                squares += sums.entries[m][maker][lane % CHUNK], crossed += sums.entries[m][2][lane % CHUNK];
        }
        met();
        written.store(stage.written, channel(lane) / UNIT, lane);
        if (maker == 0) finish_keys(stage, shared.lower, products, squares, w, chunk, lane);
        if (maker == 1) finish_queries(stage, products, squares, crossed, lane);
    }

private:
    // exp(g) of entry 8 r + g; g goes to the ring on the way.
    __device__ __forceinline__ Channels decays(const Work& w, const Chunk& chunk, int r, u32 lane) const {
        const int entry = 8 * r + lane / 4;
        Channels g(0.0f);
        if (chunk.tokens) {
            const Channels logits(gate[r][0]);
            float bias[CHANNELS];
#pragma unroll
            for (int c = 0; c < CHANNELS; c += 4) load_vector<4>(w.t.dt_bias + w.gate_at(channel(lane) + c), bias + c);
            // Of logits that do not exist there are zeros, and what follows from them counts for nothing.
            const float exists = entry < chunk.count ? 1.0f : 0.0f;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) g.v[c] = exists * log_decay(logits.v[c] + bias[c]);
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
    __device__ __forceinline__ float log_decay(float biased) const {
        return LOWER_BOUND == 0.0f ? -rate * short_softplus(biased) : Work::log_decay(rate, biased);
    }
    __device__ __forceinline__ void append_keys(const Work& w, const Chunk& chunk, u32 lane) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int entry = 8 * r + lane / 4;
            if (entry < chunk.count)
                *reinterpret_cast<uint4*>(w.t.ring_k_out + w.ring_k_at(chunk.ring_row(w, entry)) + channel(lane)) = k[r];
        }
    }

    __device__ __forceinline__ void add_entries(PartialSums& sums, const Channels (&keys)[2], const Channels (&queries)[2],
                                                u32 lane) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float three[3] = {keys[r].dot_quad(keys[r]), queries[r].dot_quad(queries[r]), queries[r].dot_quad(keys[r])};
            if (lane % 4) continue;
#pragma unroll
            for (int n = 0; n < 3; ++n) sums.entries[maker][n][8 * r + lane / 4] = three[n];
        }
    }

    // Products of entries i and j of one tile that differ first in bit b: row g, columns 2 t and 2 t + 1.
    __device__ __forceinline__ static void multiply_tiles(float (&keys_out)[3][2], float (&queries_out)[3][2], int b,
                                                          const Channels (&keys)[2], const Channels (&queries)[2],
                                                          const Channels (&until)[2], const Channels (&behind)[2], u32 lane) {
        const int i = lane / 4, j = lane % 4 * 2;
        ChannelParts<2> k;
        ChannelParts<1> high, q;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Channels decay(0.0f);
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) decay.v[c] = i & b ? until[r].v[c] : behind[r].v[c];
            k.set(r, keys[r] * decay), q.set(r, queries[r] * decay);
        }
        k.copy_high(high);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Accumulator of_keys = {}, of_queries = {};
            k.multiply(of_keys, k, r), q.multiply(of_queries, high, r);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int different = i ^ (j + e);
                const bool here = i > j + e && different >= b && different < 2 * b;
                keys_out[2 * r][e] = here ? of_keys.v[2 * r + e] : keys_out[2 * r][e];
                queries_out[2 * r][e] = here ? of_queries.v[2 * r + e] : queries_out[2 * r][e];
            }
        }
    }
    // The same of entries of the second tile with those of the first.
    __device__ __forceinline__ static void multiply_across(float (&keys_out)[2], float (&queries_out)[2], const Channels (&keys)[2],
                                                           const Channels (&queries)[2], const Channels& until, const Channels& behind) {
        ChannelParts<2> k;
        ChannelParts<1> high, q = {};
        k.set(0, keys[0] * behind), k.set(1, keys[1] * until), q.set(1, queries[1] * until);
        k.copy_high(high);
        Accumulator of_keys = {}, of_queries = {};
        k.multiply(of_keys, k, 0), q.multiply(of_queries, high, 0);
#pragma unroll
        for (int e = 0; e < 2; ++e) keys_out[e] = of_keys.v[2 + e], queries_out[e] = of_queries.v[2 + e];
    }

    // From decays within runs of b entries to those within 2 b: `until` from a run's start through an entry, `behind` from behind it to
    // the run's end.
    __device__ __forceinline__ static void double_runs(int b, Channels (&until)[2], Channels (&behind)[2], u32 lane) {
        const u32 entry = lane / 4, other = ((entry ^ b) | (b - 1)) * 4 + lane % 4;
        const bool later = entry & b;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Channels whole = until[r].from(other);
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                until[r].v[c] *= later ? whole.v[c] : 1.0f;
                behind[r].v[c] *= later ? 1.0f : whole.v[c];
            }
        }
    }

    __device__ __forceinline__ static void store_products(float (&to)[2][3][8][8], const float (&keys)[3][2], const float (&queries)[3][2],
                                                          u32 lane) {
#pragma unroll
        for (int tile = 0; tile < 3; ++tile) {
            store_vector<2>(&to[0][tile][lane / 4][lane % 4 * 2], keys[tile]);
            store_vector<2>(&to[1][tile][lane / 4][lane % 4 * 2], queries[tile]);
        }
    }
    // Products over all channels, of keys for the first maker and of queries for the second.
    __device__ __forceinline__ void add_up(float (&products)[3][2], const PartialSums& sums, u32 lane) const {
#pragma unroll
        for (int m = 0; m < MAKER_WARPS; ++m)
#pragma unroll
            for (int tile = 0; tile < 3; ++tile) {
                float part[2];
                load_vector<2>(&sums.products[m][maker][tile][lane / 4][lane % 4 * 2], part);
                products[tile][0] += part[0], products[tile][1] += part[1];
            }
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
