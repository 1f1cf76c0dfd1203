// The adjoint of one token of Kimi Delta Attention (formulas: delta_chains.cuh), with few stages that wait for each other.
//
// Its inputs are requested at once. Products of ring keys are formed by all warps, beside gates and what the token has to do with itself;
// the first warp walks along the ring alone.
#pragma once
#include "delta_adjoint.cuh"

struct KdaAdjointInputs {
    RING_K ring_k[READ_HISTORY][KEY_DIM];
    alignas(16) float ring_g[READ_HISTORY][KEY_DIM];
    alignas(16) float decay[KEY_DIM];   // of the token
    BlockProducts blocks[RING_BLOCKS];  // from the newest on
    float c[READ_HISTORY + 1];
};

// What a thread holds of the token's inputs: its channel's gate, and columns of the first warp's lanes.
struct HeldInputs {
    ACT logit, beta_logit;
    float bias, log_rate;
    vec<ACT, LANE_COLS> q, k;

    // Needs nothing of the row's plan.
    __device__ void request(const Work& w) {
        const int channel = threadIdx.x, lane = threadIdx.x % 32;
        if (channel < KEY_DIM) {
            logit = w.t.gate[w.token(0) * w.t.gate_stride + w.gate_at(channel)];
            bias = w.t.dt_bias[w.gate_at(channel)];
            log_rate = w.t.A_log[w.head()];
        }
        if (threadIdx.x < 32) {
            q = *reinterpret_cast<const vec<ACT, LANE_COLS>*>(w.q(0) + LANE_COLS * lane);
            k = *reinterpret_cast<const vec<ACT, LANE_COLS>*>(w.k(0) + LANE_COLS * lane);
            beta_logit = w.t.beta[w.token(0) * w.t.beta_stride + w.head()];
        }
    }
};

// For multiply_block, of a lane that has what it takes.
struct LaneBeta {
    float beta;
    __device__ float operator[](int) const { return beta; }
};

struct KdaAdjoint {
    const Work& w;
    KdaAdjointInputs& in;
    u64& keys_ready;  // on which the ring's keys and decays arrive
    const int warp, lane, history;
    HeldInputs own;
    float own_beta;  // of multiply_keys' first block

    __device__ KdaAdjoint(const Work& work, KdaAdjointInputs& inputs, u64& barrier)
        : w(work), in(inputs), keys_ready(barrier), warp(threadIdx.x / 32), lane(threadIdx.x % 32), history(work.row.history()) {}

    __device__ void request_beta() { own_beta = ring_beta(history - 1 - first_block() * CHAIN_BLOCK); }

    static constexpr int KEYS_FROM = THREADS - 32;  // the thread that requests the ring's keys
    __device__ void request_ring() const {
        if (threadIdx.x != KEYS_FROM) return;
        expect_bytes(&keys_ready, history * int(sizeof(in.ring_k[0]) + sizeof(in.ring_g[0])));
        for_ring_spans(w, [&](int to, int row, int count) {
            stream_to_shared(in.ring_k[to], w.t.ring_k + w.ring_k_at(row), count * u32(sizeof(in.ring_k[0])), &keys_ready);
            stream_to_shared(in.ring_g[to], w.t.ring_g + w.ring_g_at(row), count * u32(sizeof(in.ring_g[0])), &keys_ready);
        });
    }

    // Whether the token goes to the ring: of what is read without a copy, always.
    __device__ bool kept() const { return !READS_ALL || !w.row.absorbs(); }
    // Ring blocks go round the warps from the last one on.
    __device__ int first_block() const { return WARPS - 1 - warp; }
    // What the lane takes to the products of the ring block whose newest entry is j.
    __device__ float ring_beta(int j) const {
        const int entry = j - block_entry<CHAIN_BLOCK>(lane);
        return entry >= 0 ? w.t.ring_beta[w.ring_beta_at(w.history_row(entry))] : 0.0f;
    }

    // Gates and their appends; of the first warp, x and c of the token itself but for its decay.
    __device__ void begin(float (&x)[LANE_COLS]) const {
        const int channel = threadIdx.x, to = w.append_row(0);
        if (channel < KEY_DIM) {
            const float g = w.log_decay(expf(own.log_rate), to_float(own.logit) + own.bias);
            in.decay[channel] = power_of_2(LOG2_E * g);
            if (kept() && w.leads_head()) w.t.ring_g_out[w.ring_g_at(to) + channel] = g;
        }
        if (warp) return;
        float k[LANE_COLS];
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) x[i] = late_float(own.q.v[i]), k[i] = late_float(own.k.v[i]);
        float sums[3] = {dot(x, x), dot(k, k), dot(x, k)};
        sum_all<32>(sums);
        const float beta = w.beta(late_float(own.beta_logit)), norm = rsqrtf(sums[1] + NORM_EPSILON);
        const float scale = rsqrtf(sums[0] + NORM_EPSILON) * rsqrtf(float(KEY_DIM)), c = beta * norm * (sums[2] * scale);
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) x[i] = fmaf(x[i], scale, -c * norm * k[i]);
        if (kept() && w.leads_key_head()) store_columns(w.t.ring_k_out + w.ring_k_at(to), lane, k);
        if (lane) return;
        in.c[history] = c;
        if (kept() && w.leads_head()) w.t.ring_beta_out[w.ring_beta_at(to)] = beta;
    }

    __device__ void multiply_keys() const {
        int block = first_block(), j = history - 1 - block * CHAIN_BLOCK;
        if (j < 0) return;
        float beta = own_beta;
        wait_barrier(&keys_ready, 0);
#pragma unroll 1
        while (true) {
            multiply_block<CHAIN_BLOCK>(in.blocks[block], lane, in.ring_k[j], in.ring_g[j], LaneBeta{beta}, j + 1);
            block += WARPS, j -= WARPS * CHAIN_BLOCK;
            if (RING_BLOCKS <= WARPS || j < 0) return;
            beta = ring_beta(j);
        }
    }

    // The entries of a ring block, whose newest is j; those before the ring's first have no part in anything but k . x.
    __device__ void step_back(float (&x)[LANE_COLS], const BlockProducts& products, int j) const {
        float k[CHAIN_BLOCK][LANE_COLS], decay[CHAIN_BLOCK][LANE_COLS], sums[CHAIN_BLOCK], carried[LANE_COLS];
#pragma unroll
        for (int m = 0; m < CHAIN_BLOCK; ++m) {
            load_columns(in.ring_k[max(j - m, 0)], lane, k[m]);
            load_columns(in.ring_g[max(j - m, 0)], lane, decay[m]);
        }
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) carried[i] = x[i];
#pragma unroll
        for (int m = 0; m < CHAIN_BLOCK; ++m) {
            sums[m] = dot(k[m], carried);
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) carried[i] *= decay[m][i];
        }
        sum_all<32>(sums);
#pragma unroll
        for (int m = 0; m < CHAIN_BLOCK; ++m) {
            if (m > j) break;
#pragma unroll
            for (int n = 0; n < m; ++n) sums[m] = fmaf(-products.gain[n] * sums[n], products.pairs[BlockProducts::pair(m, n)], sums[m]);
            if (lane == 0) in.c[j - m] = products.norm_gain[m] * sums[m];
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) x[i] = decay[m][i] * fmaf(-products.gain[m] * sums[m], k[m][i], x[i]);
        }
    }

    // From the token's decay to the ring's oldest entry, by the first warp.
    __device__ void walk(float (&x)[LANE_COLS]) const {
        float decay[LANE_COLS];
        load_columns(in.decay, lane, decay);
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) x[i] *= decay[i];
#pragma unroll 1
        for (int j = history - 1, b = 0; j >= 0; j -= CHAIN_BLOCK, ++b) step_back(x, in.blocks[b], j);
    }
};

// For products with the read copy, as Gram (delta_gram.cuh); the token's inputs have been requested.
struct KdaCopyAdjoint : KdaAdjoint {
    Adjoint<ACT>& out;

    __device__ KdaCopyAdjoint(const Work& work, KdaAdjointInputs& inputs, Adjoint<ACT>& results)
        : KdaAdjoint(work, inputs, ring_ready()), out(results) {}

    // A fold makes room for itself where inputs were, but nothing may lie where a barrier has been.
    __device__ static u64& ring_ready() {
        __shared__ u64 barrier;
        return barrier;
    }

    __device__ bool appends() const { return kept(); }
    __device__ bool solves() const { return warp == 0; }
    __device__ int solved_head() const { return 0; }

    __device__ void request() {
        if (threadIdx.x == KEYS_FROM) {
            init_barrier(&keys_ready);
            publish_barriers();
        }
        request_beta();
        request_ring();
    }

    template <typename Append>
    __device__ void run(float unit, Append append) const {
        __syncthreads();  // barriers
        float x[LANE_COLS];
        begin(x);
        multiply_keys();
        wait_copies();
        __syncthreads();
        append();
        if (warp) return;
        walk(x);
        const Rescaling to = rescaling(x);
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) out.store(0, 0, lane_column(lane, i), x[i] * to.factor);
        if (lane == 0) out.unit[0][0] = unit * to.inverse;
    }
};
