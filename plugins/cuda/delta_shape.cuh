// Shapes of the delta-rule kernels, from the macros of the including .cu file, and the tensors of one launch.
//
// Macros: ACT, STATE, RING (element types), KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WINDOW, RING_ROWS,
// TOKENS (most tokens that the read-out serves: 1, 2, 4, 8 or 16; 0 compiles the fold alone), HEADS_A_BLOCK (value heads of
// a block), SPLIT (blocks that share a head's value rows; 1 where a block has several heads), DERIVED (the ring's v row holds u),
// ALIGNED (rows of every tensor start on 16 bytes), PER_CHANNEL (kda: one decay per key channel), BETA_SCALE, LOWER_BOUND (kda: 0
// for the softplus gate), READ_BITS (read_copy.cuh).
#pragma once
#include "read_copy.cuh"
#include "scalars.cuh"
#include "step.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr float NORM_EPSILON = 1e-6f;  // plugins/gated_delta.py, L2_EPSILON
constexpr int HEADS_PER_KEY = VALUE_HEADS / KEY_HEADS;
constexpr int SLICE = (VALUE_DIM + SPLIT - 1) / SPLIT;  // value rows of a block
constexpr int SHARED_LIMIT = 48 * 1024;                 // static shared memory of a block
constexpr int BARRIER_ROOM = 128;                       // of it, for barriers, whose memory nothing else may use

// Key columns are spread over a warp: lane l holds VEC neighbours at VEC (l + 32 m), m = 0, 1, ...
constexpr int KEY_PADDED = (KEY_DIM + 31) / 32 * 32;
constexpr int LANE_COLS = KEY_PADDED / 32;
constexpr int VEC = LANE_COLS % 4 == 0 ? 4 : LANE_COLS % 2 == 0 ? 2 : 1;
constexpr bool WIDE = ALIGNED && KEY_DIM % 32 == 0;  // whole vectors of key columns may be loaded
// Steps answer from a copy of the checkpoint, and folds renew it.
constexpr bool COPIED = READ_BITS > 0;

#if DERIVED
typedef ACT RING_K;
#else
typedef RING RING_K;
#endif

// A launch's tensors as the contract names them; strides in elements.
struct Tensors {
    const ACT *qkv, *gate, *beta;
    const float *A_log, *dt_bias;
    const STATE* state;
    const RING_K* ring_k;
    const RING* ring_v;
    const float *ring_g, *ring_beta;
    int tokens, qkv_stride, gate_stride, beta_stride;
    int state_stride, ring_k_stride, ring_v_stride, ring_g_stride, ring_beta_stride;
    ACT* o;
    STATE* state_out;
    RING_K* ring_k_out;
    RING* ring_v_out;
    float *ring_g_out, *ring_beta_out;
    u8 *codes, *scales;  // of the read copy, if there is one
    float* head_scale;
    int codes_stride, scales_stride, head_scale_stride;
};
#if READ_BITS == 4
#define COPY_TENSORS codes, scales, head_scale, codes_stride, scales_stride, head_scale_stride
#elif READ_BITS == 8
#define COPY_TENSORS codes, scales, nullptr, codes_stride, scales_stride, 0
#else
#define COPY_TENSORS nullptr, nullptr, nullptr, 0, 0, 0
#endif

// Rows that fold come first, since a fold takes much longer than other steps, where registers are left for it: with decays per channel not
// beside a copy, nor of one token on compute capability 10.
constexpr bool IN_TURN = TOKENS > 0 && (!PER_CHANNEL || (!COPIED && (TOKENS > 1 || __CUDA_ARCH__ < 1000)));
// Folds of one token with decays per channel are bound by instructions. Rows are taken up from both ends of that order, so that such
// folds go beside rows that wait for memory.
constexpr bool FROM_BOTH_ENDS = IN_TURN && PER_CHANNEL && TOKENS == 1;
__device__ __forceinline__ int block_turn() {
    const int half = blockIdx.y / 2;
    return !FROM_BOTH_ENDS ? int(blockIdx.y) : blockIdx.y % 2 ? int(gridDim.y) - 1 - half : half;
}

// What a block works on at a time: value rows [first_row, first_row + SLICE) of one value head of one batch row.
// The pools' element offsets are methods, so that no register holds what a multiplication gives.
struct Work {
    const Tensors& t;
    RowInTurn row;
    int n;  // which of the block's heads

    // The same for the block's head n.
    __device__ Work of_head(int n) const { return {t, row, n}; }

    __device__ int batch() const { return IN_TURN ? row.number : int(blockIdx.y); }
    __device__ int head() const { return opaque(int(blockIdx.x)) / SPLIT * HEADS_A_BLOCK + n; }
    __device__ i64 slot() const { return opaque(int(row.slot)); }
    __device__ int key_head() const { return head() / HEADS_PER_KEY; }
    __device__ int first_row() const { return blockIdx.x % SPLIT * SLICE; }
    __device__ int value_rows() const { return min(SLICE, VALUE_DIM - first_row()); }
    __device__ bool leads_head() const { return first_row() == 0; }
    __device__ bool leads_key_head() const { return leads_head() && head() % HEADS_PER_KEY == 0; }
    __device__ int history_row(int j) const { return u32(row.folded + j) % RING_ROWS; }
    __device__ int append_row(int i) const { return u32(row.committed + i) % RING_ROWS; }

    // First element of a state row of the slice, and of a ring row, in their pools.
    __device__ i64 state_at(int value_row) const {
        return slot() * t.state_stride + (head() * VALUE_DIM + first_row() + value_row) * KEY_DIM;
    }
    // The copy of the slice's state rows.
    __device__ ReadCopy copy() const {
        const i64 value_row = head() * VALUE_DIM + first_row();
        return {t.codes + slot() * t.codes_stride + value_row * (KEY_DIM * READ_BITS / 8),
                t.scales + slot() * t.scales_stride + value_row * (KEY_DIM / COPY_BLOCK),
                t.head_scale + slot() * t.head_scale_stride + head()};
    }
    __device__ i64 ring_k_at(int r) const { return slot() * t.ring_k_stride + (key_head() * RING_ROWS + r) * KEY_DIM; }
    __device__ i64 ring_v_at(int r) const {
        return slot() * t.ring_v_stride + (head() * RING_ROWS + r) * VALUE_DIM + first_row();
    }
    __device__ i64 ring_g_at(int r) const {
        return slot() * t.ring_g_stride + (head() * RING_ROWS + r) * (PER_CHANNEL ? KEY_DIM : 1);
    }
    __device__ i64 ring_beta_at(int r) const { return slot() * t.ring_beta_stride + head() * RING_ROWS + r; }

    // Rows of the packed activations and of the output for token i of the batch row, and its gates.
    __device__ i64 token(int i) const { return i64(batch()) * t.tokens + i; }
    __device__ const ACT* q(int i) const { return t.qkv + token(i) * t.qkv_stride + key_head() * KEY_DIM; }
    __device__ const ACT* k(int i) const { return q(i) + KEY_HEADS * KEY_DIM; }
    __device__ const ACT* v(int i) const {
        return t.qkv + token(i) * t.qkv_stride + 2 * KEY_HEADS * KEY_DIM + head() * VALUE_DIM + first_row();
    }
    __device__ ACT* o(int i) const { return t.o + (token(i) * VALUE_HEADS + head()) * VALUE_DIM + first_row(); }
    __device__ int gate_at(int channel) const { return PER_CHANNEL ? head() * KEY_DIM + channel : head(); }
    __device__ float decay_logit(int i, int channel) const { return to_float(t.gate[token(i) * t.gate_stride + gate_at(channel)]); }
    __device__ float beta_logit(int i) const { return to_float(t.beta[token(i) * t.beta_stride + head()]); }

    // The log decay g, of key channel `channel` where decays are per channel, and beta.
    __device__ float decay_rate() const { return expf(t.A_log[head()]); }
    __device__ static float log_decay(float rate, float biased) {
        return LOWER_BOUND == 0.0f ? -rate * softplus(biased) : LOWER_BOUND * sigmoid(rate * biased);
    }
    __device__ static float short_log_decay(float rate, float biased) {
        return LOWER_BOUND == 0.0f ? -rate * short_softplus(biased) : log_decay(rate, biased);
    }
    __device__ float log_decay(float logit, int channel) const {
        return log_decay(decay_rate(), logit + t.dt_bias[gate_at(channel)]);
    }
    __device__ float beta(float logit) const { return BETA_SCALE * sigmoid(logit); }
};

// The zeros that the contract promises for padding tokens (all of them in a padding row), of all heads of the block.
__device__ __forceinline__ void zero_padding(const Work& first, int valid) {
    const int rows = first.value_rows();
    if (valid >= first.t.tokens) return;
#pragma unroll 1
    for (int n = 0; n < HEADS_A_BLOCK; ++n) {
        const Work w = first.of_head(n);
        for (int at = valid * rows + threadIdx.x; at < w.t.tokens * rows; at += THREADS)
            w.o(at / rows)[at % rows] = from_float<ACT>(0.0f);
    }
}
