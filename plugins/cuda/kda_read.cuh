// The answer to one token of Kimi Delta Attention from the checkpoint and the ring (formulas: delta_read.cuh).
//
// Products of ring keys are formed by all warps, beside gates and what the token has to do with itself; the first warp walks along the
// ring alone.
#pragma once
#include "delta_token_product.cuh"

struct KdaTokenShared {
    alignas(128) STATE tiles[WARPS][STAGES][TILE_ROWS][KEY_DIM];
    RING_K ring_k[READ_HISTORY][KEY_DIM];
    alignas(16) float ring_g[READ_HISTORY][KEY_DIM];
    alignas(16) RING ring_v[READ_HISTORY][SLICE];
    alignas(16) float decay[KEY_DIM];  // of the token
    union {
        alignas(16) float x[KEY_DIM];
        alignas(16) STATE parts[HALF_STATES ? 2 : 1][KEY_DIM];  // of x times a power of two
    };
    BlockProducts blocks[RING_BLOCKS];  // from the newest on
    float c[READ_HISTORY + 1], unit;
    u64 keys_ready, values_ready, tiles_ready[WARPS][STAGES];
};

// What a thread holds of a head's inputs: its channel's gate, its value, and columns of the first warp's lanes.
struct HeldInputs {
    ACT logit, beta_logit, v;
    float bias, log_rate, ring_beta;
    vec<ACT, LANE_COLS> q, k;
};

// For multiply_block, of a lane that has what it takes.
struct LaneBeta {
    float beta;
    __device__ float operator[](int) const { return beta; }
};

template <typename T>
struct KdaTokenRead {
    const Work& w;
    KdaTokenShared& shared;
    const int warp, lane, history;
    TokenProduct<T> product;
    HeldInputs own;

    __device__ KdaTokenRead(const Work& work, KdaTokenShared& memory)
        : w(work), shared(memory), warp(threadIdx.x / 32), lane(threadIdx.x % 32), history(work.row.history()),
          product(work, memory.tiles, memory.tiles_ready) {}

    // ---- requests ------------------------------------------------------------------------------------------------------

    static constexpr bool WHOLE = SPLIT == 1;  // value rows of the ring
    static constexpr int KEYS_FROM = THREADS - 32, VALUES_FROM = THREADS - 64;  // threads that request the ring's rows

    // Behind it, all threads meet before one waits.
    __device__ void init() const {
        if (lane) return;
        product.init();
        if (threadIdx.x == KEYS_FROM) init_barrier(&shared.keys_ready);
        if (threadIdx.x == VALUES_FROM) init_barrier(&shared.values_ready);
        publish_barriers();
    }

    __device__ void request() {
        const int channel = threadIdx.x;
        if (channel < KEY_DIM) {
            own.logit = w.t.gate[w.token(0) * w.t.gate_stride + w.gate_at(channel)];
            own.bias = w.t.dt_bias[w.gate_at(channel)];
            own.log_rate = w.t.A_log[w.head()];
        }
        if (warp == 0) {
            own.q = *reinterpret_cast<const vec<ACT, LANE_COLS>*>(w.q(0) + LANE_COLS * lane);
            own.k = *reinterpret_cast<const vec<ACT, LANE_COLS>*>(w.k(0) + LANE_COLS * lane);
            own.beta_logit = w.t.beta[w.token(0) * w.t.beta_stride + w.head()];
        }
        own.ring_beta = ring_beta(history - 1 - first_block() * CHAIN_BLOCK);
        if (product.has_row()) own.v = w.v(0)[product.row()];
        if (threadIdx.x == KEYS_FROM) {
            expect_bytes(&shared.keys_ready, history * int(sizeof(shared.ring_k[0]) + sizeof(shared.ring_g[0])));
            for_ring_spans(w, [&](int to, int row, int count) {
                stream_to_shared(shared.ring_k[to], w.t.ring_k + w.ring_k_at(row), count * u32(sizeof(shared.ring_k[0])), &shared.keys_ready);
                stream_to_shared(shared.ring_g[to], w.t.ring_g + w.ring_g_at(row), count * u32(sizeof(shared.ring_g[0])), &shared.keys_ready);
            });
        }
        if (WHOLE && threadIdx.x == VALUES_FROM) {
            expect_bytes(&shared.values_ready, history * int(sizeof(shared.ring_v[0])));
            for_ring_spans(w, [&](int to, int row, int count) {
                stream_to_shared(shared.ring_v[to], w.t.ring_v + w.ring_v_at(row), count * u32(sizeof(shared.ring_v[0])),
                                 &shared.values_ready);
            });
        }
        if constexpr (!WHOLE)
#pragma unroll 1
            for (int j = warp; j < history; j += WARPS)
                request_row<SLICE>(shared.ring_v[j], w.t.ring_v + w.ring_v_at(w.history_row(j)), lane);
    }

    // ---- the adjoint ---------------------------------------------------------------------------------------------------

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
            shared.decay[channel] = power_of_2(LOG2_E * g);
            if (w.leads_head()) w.t.ring_g_out[w.ring_g_at(to) + channel] = g;
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
        if (w.leads_key_head()) store_columns(w.t.ring_k_out + w.ring_k_at(to), lane, k);
        if (lane) return;
        shared.c[history] = c;
        if (w.leads_head()) w.t.ring_beta_out[w.ring_beta_at(to)] = beta;
    }

    __device__ void multiply_keys() const {
        int block = first_block(), j = history - 1 - block * CHAIN_BLOCK;
        if (j < 0) return;
        float beta = own.ring_beta;
        wait_barrier(&shared.keys_ready, 0);
#pragma unroll 1
        while (true) {
            multiply_block<CHAIN_BLOCK>(shared.blocks[block], lane, shared.ring_k[j], shared.ring_g[j], LaneBeta{beta}, j + 1);
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
            load_columns(shared.ring_k[max(j - m, 0)], lane, k[m]);
            load_columns(shared.ring_g[max(j - m, 0)], lane, decay[m]);
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
            if (lane == 0) shared.c[j - m] = products.norm_gain[m] * sums[m];
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) x[i] = decay[m][i] * fmaf(-products.gain[m] * sums[m], k[m][i], x[i]);
        }
    }

    // From the token's decay to the ring's oldest entry, by the first warp.
    __device__ void walk(float (&x)[LANE_COLS]) const {
        float decay[LANE_COLS];
        load_columns(shared.decay, lane, decay);
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) x[i] *= decay[i];
#pragma unroll 1
        for (int j = history - 1, b = 0; j >= 0; j -= CHAIN_BLOCK, ++b) step_back(x, shared.blocks[b], j);
        if constexpr (!HALF_STATES) {
            store_columns(shared.x, lane, x);
        } else {
            if constexpr (same_type<STATE, fp16>::value) {
                u32 largest = 0;
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
                const Rescaling to(__uint_as_float(__reduce_max_sync(~0u, largest)), 4);
#pragma unroll
                for (int i = 0; i < LANE_COLS; ++i) x[i] *= to.factor;
                if (lane == 0) shared.unit = to.inverse;
            }
            float rest[LANE_COLS];
#pragma unroll
            for (int i = 0; i < LANE_COLS; ++i) rest[i] = x[i] - to_float(from_float<STATE>(x[i]));
            store_columns(shared.parts[0], lane, x);
            store_columns(shared.parts[1], lane, rest);
        }
    }

    // ---- the answer ----------------------------------------------------------------------------------------------------

    // sum_j c_j v_j of the lane's row; appends the token's v.
    __device__ float updates() const {
        if (!product.has_row()) return 0.0f;
        const int row = product.row();
        const float v = to_float(own.v);
        w.t.ring_v_out[w.ring_v_at(w.append_row(0)) + row] = from_float<RING>(v);
        float sum = shared.c[history] * v;
        for (int j = 0; j < history; ++j) sum = fmaf(shared.c[j], to_float(shared.ring_v[j][row]), sum);
        return sum;
    }

    __device__ void run() {
        init();
        request();
        product.request_first();
        __syncthreads();  // barriers
        float x[LANE_COLS];
        begin(x);
        multiply_keys();
        if constexpr (!WHOLE) wait_copies();
        __syncthreads();
        if (warp == 0) walk(x);
        __syncthreads();
        if (WHOLE) wait_barrier(&shared.values_ready, 0);
        float o = updates();
        if (w.row.folded > 0) {
            if constexpr (HALF_STATES)
                o += product.multiply(0, shared.parts) * (same_type<T, fp16>::value ? shared.unit : 1.0f);
            else
                o += product.multiply(0, shared.x);
        }
        if (product.has_row()) w.o(0)[product.row()] = from_float<ACT>(o);
    }
};
