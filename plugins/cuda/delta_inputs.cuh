// One entry of the sequence that a row's recurrence runs over: first the ring's live rows, then the step's tokens.
#pragma once
#include "delta_lanes.cuh"

// A lane's columns of one entry as they lie in memory.
struct Entry {
    float k[LANE_COLS], q[LANE_COLS];
    float g[LANE_COLS], beta;  // logits for a token of the step; of g the first alone where the decay is a scalar
};

__device__ __forceinline__ void fetch_entry(const Work& w, int lane, int index, Entry& in) {
    if (index < w.row.history()) {
        const int row = w.history_row(index);
        load_columns(w.t.ring_k + w.ring_k_at(row), lane, in.k);
        in.beta = w.t.ring_beta[w.ring_beta_at(row)];
        if constexpr (PER_CHANNEL)
            load_columns(w.t.ring_g + w.ring_g_at(row), lane, in.g);
        else
            in.g[0] = w.t.ring_g[w.ring_g_at(row)];
    } else {
        const int token = index - w.row.history();
        load_columns(w.k(token), lane, in.k);
        load_columns(w.q(token), lane, in.q);
        in.beta = w.beta_logit(token);
        if constexpr (PER_CHANNEL)
            load_columns(w.t.gate + w.token(token) * w.t.gate_stride + w.gate_at(0), lane, in.g);
        else
            in.g[0] = w.decay_logit(token, 0);
    }
}

// v (u of a derived ring) of an entry, at a value row of the slice.
__device__ __forceinline__ float fetch_value(const Work& w, int index, int row) {
    const int history = w.row.history();
    return index < history ? to_float(w.t.ring_v[w.ring_v_at(w.history_row(index)) + row]) : to_float(w.v(index - history)[row]);
}

// What an entry's append needs to know: it is a token of the step that is not absorbed. `first_pass`: nobody else in the
// block appends it again.
__device__ __forceinline__ bool appends(const Work& w, int index, bool first_pass) {
    return first_pass && index >= w.row.history() && !w.row.absorbs();
}
__device__ __forceinline__ void append_key(const Work& w, int lane, int index, const Entry& in, bool first_pass) {
    if (appends(w, index, first_pass) && w.leads_key_head())
        store_columns(w.t.ring_k_out + w.ring_k_at(w.append_row(index - w.row.history())), lane, in.k);
}
// beta of an entry, from its logit if it is a token.
__device__ __forceinline__ float finish_beta(const Work& w, int index, float stored, bool first_pass) {
    if (index < w.row.history()) return stored;
    const float beta = w.beta(stored);
    if (appends(w, index, first_pass) && w.leads_head())
        w.t.ring_beta_out[w.ring_beta_at(w.append_row(index - w.row.history()))] = beta;
    return beta;
}
// Likewise the log decay, of one channel where decays are per channel. SHORT: as chains have it (delta_read_shape.cuh, GATES_AT_ONCE).
template <bool SHORT = false>
__device__ __forceinline__ float finish_decay(const Work& w, int index, int channel, float stored, bool first_pass) {
    if (index < w.row.history() || (PER_CHANNEL && channel >= KEY_DIM)) return stored;
    const float g = SHORT ? Work::short_log_decay(w.decay_rate(), stored + w.t.dt_bias[w.gate_at(channel)]) : w.log_decay(stored, channel);
    if (appends(w, index, first_pass) && w.leads_head())
        w.t.ring_g_out[w.ring_g_at(w.append_row(index - w.row.history())) + (PER_CHANNEL ? channel : 0)] = g;
    return g;
}

__device__ __forceinline__ void append_value(const Work& w, int index, int row, float v) {
    if (index >= w.row.history() && !w.row.absorbs())
        w.t.ring_v_out[w.ring_v_at(w.append_row(index - w.row.history())) + row] = from_float<RING>(v);
}

// Normalises k, and scales q as the contract says.
__device__ __forceinline__ void normalise(Entry& in, bool with_q) {
    float squares[2] = {dot(in.k, in.k), with_q ? dot(in.q, in.q) : 0.0f};
    sum_all<32>(squares);
    const float k_scale = rsqrtf(squares[0] + NORM_EPSILON);
    const float q_scale = rsqrtf(squares[1] + NORM_EPSILON) * rsqrtf(float(KEY_DIM));
#pragma unroll
    for (int i = 0; i < LANE_COLS; ++i) {
        in.k[i] *= k_scale;
        in.q[i] = with_q ? in.q[i] * q_scale : 0.0f;
    }
}

// exp(g) in place of what `row` of shared memory holds of a lane's columns; a few registers at a time.
template <int TOGETHER, bool SHORT>
__device__ __forceinline__ void finish_decays(const Work& w, int lane, int index, float* row, bool first_pass) {
    if (index < w.row.history()) {
#pragma unroll
        for (int i = 0; i < LANE_COLS; ++i) row[lane_column(lane, i)] = expf(row[lane_column(lane, i)]);
        return;
    }
#pragma unroll TOGETHER
    for (int i = 0; i < LANE_COLS; ++i) {
        const int channel = lane_column(lane, i);
        row[channel] = expf(finish_decay<SHORT>(w, index, channel, row[channel], first_pass));
    }
}

__device__ __forceinline__ void store_padded(float* row, int lane, const float (&from)[LANE_COLS]) {
#pragma unroll
    for (int i = 0; i < LANE_COLS; i += VEC) store_vector<VEC>(row + lane_column(lane, i), from + i);
}
