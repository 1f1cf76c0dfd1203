// Sizes of mamba2_prefill, its shared memory, and what travels there.
//
// Macros: ACT, STATE (element types; the ring has ACT), HEADS, HEAD_DIM, STATE_SIZE, GROUPS, RING_ROWS, DT_MIN, DT_MAX,
// STOCHASTIC (1: a 16-bit state is rounded at random), CHUNK (entries that are taken up at once), CHANNELS (rows of one head's
// state that a block holds), CHANNEL_PARTS (warps that share the outputs of 16 tokens), BLOCKS_AN_SM (resident blocks to
// compile for).
#pragma once
#include "bf16_parts.cuh"
#include "ptx/async_copy.cuh"
#include "rounding.cuh"
#include "scalars.cuh"
#include "shared_tile.cuh"

constexpr int INNER = HEADS * HEAD_DIM, HEADS_A_GROUP = HEADS / GROUPS, HEAD_SIZE = HEAD_DIM * STATE_SIZE;
constexpr int BLOCKS_A_HEAD = HEAD_DIM / CHANNELS;
constexpr int TOKEN_TILES = CHUNK / 16, WARPS = TOKEN_TILES * CHANNEL_PARTS, THREADS = 32 * WARPS;
constexpr int B_UNITS = STATE_SIZE / UNIT, X_UNITS = CHANNELS / UNIT;
constexpr int BLOCKS = STATE_SIZE / 32;  // of columns

static_assert(CHUNK % 32 == 0 && STATE_SIZE % 32 == 0 && HEAD_DIM % CHANNELS == 0 && CHANNELS % (16 * CHANNEL_PARTS) == 0,
              "mamba2_recurrent takes this shape");

// The same for all lanes, which the compiler does not see in the index of a thread.
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, int(threadIdx.x / 32), 0); }

// Time steps of a chunk's entries; those that do not exist have dt = 0.
struct alignas(16) ChunkSteps {
    float2 entry[CHUNK];  // log2 of the decay from the chunk's start to behind the entry, and dt
    float weight[CHUNK];  // dt times the decay from the entry to the chunk's end
    float decay;          // of the whole chunk
};

struct Shared {
    uint4 b[CHUNK * B_UNITS];
    uint4 x[CHUNK * X_UNITS];
    uint4 state[2][CHANNELS * B_UNITS];  // two bfloat16 parts of the state before the chunk
    ChunkSteps steps[2];                 // of chunks of even and of odd index
};
static_assert(sizeof(Shared) <= 48 * 1024, "the block needs too much shared memory");

// A launch's inputs as the contract names them; strides in elements.
struct Tensors {
    const ACT *xbc, *dt, *ring_x, *ring_b;
    const float* ring_dt;
    int tokens, xbc_stride, dt_stride, ring_x_stride, ring_b_stride, ring_dt_stride;
};

// What a block works on: CHANNELS rows of one head's state for one batch row. Addresses are methods, so that no register holds
// what a multiplication gives.
struct Work {
    const Tensors& t;
    Row row;

    __device__ int head() const { return blockIdx.x / BLOCKS_A_HEAD; }
    __device__ int group() const { return head() / HEADS_A_GROUP; }
    __device__ int first_channel() const { return blockIdx.x % BLOCKS_A_HEAD * CHANNELS; }
    __device__ i64 slot() const { return opaque(int(row.slot)); }
    __device__ int history_chunks() const { return (row.history() + CHUNK - 1) / CHUNK; }
    __device__ int chunks() const { return history_chunks() + (row.tokens + CHUNK - 1) / CHUNK; }
    // Chunks that the checkpoint has taken up when it is written.
    __device__ int folded_chunks() const { return !row.folds() ? 0 : row.absorbs() ? chunks() : history_chunks(); }

    __device__ i64 token(int i) const { return i64(blockIdx.y) * t.tokens + i; }
    __device__ i64 y_at(int i) const { return token(i) * INNER + head() * HEAD_DIM + first_channel(); }
    // First elements of an entry's x (of the block's channels) and B in the slot's rings, by position.
    __device__ i64 ring_x_at(int position) const {
        return slot() * t.ring_x_stride + (head() * RING_ROWS + position % RING_ROWS) * HEAD_DIM + first_channel();
    }
    __device__ i64 ring_b_at(int position) const {
        return slot() * t.ring_b_stride + (group() * RING_ROWS + position % RING_ROWS) * STATE_SIZE;
    }
    __device__ i64 ring_dt_at(int position) const {
        return slot() * t.ring_dt_stride + head() * RING_ROWS + position % RING_ROWS;
    }
};

// Entries first ... first + count - 1 of the history, or tokens of this step.
struct Chunk {
    bool tokens;
    int first, count;

    __device__ Chunk(const Work& w, int index) {
        const int of_history = w.history_chunks();
        tokens = index >= of_history;
        first = CHUNK * (tokens ? index - of_history : index);
        count = min(CHUNK, (tokens ? w.row.tokens : w.row.history()) - first);
    }
    __device__ const ACT* token(const Work& w, int i) const { return w.t.xbc + w.token(first + i) * w.t.xbc_stride; }
    __device__ int position(const Work& w, int i) const { return w.row.folded + first + i; }
    __device__ const ACT* x(const Work& w, int i) const {
        return tokens ? token(w, i) + w.head() * HEAD_DIM + w.first_channel() : w.t.ring_x + w.ring_x_at(position(w, i));
    }
    __device__ const ACT* b(const Work& w, int i) const {
        return tokens ? token(w, i) + INNER + w.group() * STATE_SIZE : w.t.ring_b + w.ring_b_at(position(w, i));
    }
    __device__ const ACT* c(const Work& w, int i) const { return token(w, i) + INNER + (GROUPS + w.group()) * STATE_SIZE; }
    // The time step as it is stored: finished in the ring, before bias and softplus in the step's tokens.
    __device__ float dt(const Work& w, int i) const {
        return tokens ? to_float(w.t.dt[w.token(first + i) * w.t.dt_stride + w.head()])
                      : w.t.ring_dt[w.ring_dt_at(position(w, i))];
    }
};

// Starts the copies of one matrix of a chunk, UNITS units a row; rows behind its end become zero. `row_at(i)`: entry i's row;
// `stride`: from one token's to the next.
template <int UNITS, typename Rows>
__device__ __forceinline__ void request_rows(uint4* to, const Chunk& chunk, int stride, Rows row_at) {
    constexpr int STEP = THREADS / UNITS;
    const u32 thread = opaque(threadIdx.x);
    const int first = thread / UNITS, unit = thread % UNITS;
    const ACT* row = row_at(first) + UNIT * unit;
#pragma unroll
    for (int from = 0; from < CHUNK; from += STEP) {
        const int i = from + first;
        if (!chunk.tokens) row = row_at(i) + UNIT * unit;
        copy_16_bytes(to + unit_at<UNITS>(i, unit), row, i < chunk.count);
        row += i64(STEP) * stride;
    }
}

// Starts the copies of a chunk's B and x.
__device__ __forceinline__ void request(Shared& shared, const Work& w, const Chunk& chunk) {
    request_rows<B_UNITS>(shared.b, chunk, w.t.xbc_stride, [&](int i) { return chunk.b(w, i); });
    request_rows<X_UNITS>(shared.x, chunk, w.t.xbc_stride, [&](int i) { return chunk.x(w, i); });
}

// Brings the rows of one matrix of a chunk's tokens into the L2 cache, a line a thread and access.
template <int ELEMENTS, typename Rows>
__device__ __forceinline__ void prefetch_rows(const Chunk& chunk, Rows row_at) {
    constexpr int LINE = 128 / sizeof(ACT), LINES = (ELEMENTS + LINE - 1) / LINE, STEP = THREADS / LINES;
    const u32 thread = opaque(threadIdx.x);
#pragma unroll
    for (int from = 0; from < CHUNK; from += STEP) {
        const int i = from + thread / LINES;
        if (i < CHUNK && i < chunk.count) prefetch_line(row_at(i) + thread % LINES * LINE);
    }
}

// Brings a chunk's tokens into the L2 cache.
__device__ __forceinline__ void prefetch(const Work& w, const Chunk& chunk) {
    if (!chunk.tokens) return;
    prefetch_rows<STATE_SIZE>(chunk, [&](int i) { return chunk.b(w, i); });
    prefetch_rows<STATE_SIZE>(chunk, [&](int i) { return chunk.c(w, i); });
    prefetch_rows<CHANNELS>(chunk, [&](int i) { return chunk.x(w, i); });
}

// The time steps of a chunk; lane l holds entries l + 32 b. One warp makes the sums from the chunk's start, another what
// remains of the entries at its end: it is a chain of dependent instructions, for which only warps with few entries have time.
struct StepMaker {
    static constexpr int PER_LANE = CHUNK / 32;
    float raw[PER_LANE];  // as stored
    float bias, rate;     // rate: log2(e) A

    __device__ __forceinline__ void load(const Work& w, const Chunk& chunk, const float* A_log, const float* dt_bias, u32 lane) {
#pragma unroll
        for (int b = 0; b < PER_LANE; ++b) {
            const int i = lane + 32 * b;
            raw[b] = i < chunk.count ? chunk.dt(w, i) : 0.0f;
        }
        bias = dt_bias[w.head()], rate = A_log[w.head()];
    }
    __device__ __forceinline__ void finish(const Chunk& chunk, u32 lane) {
        rate = -LOG2_E * expf(rate);
#pragma unroll
        for (int b = 0; b < PER_LANE; ++b) {
            // Without a branch, so that both entries' functions run side by side.
            const float x = raw[b] + bias, curved = log1pf(expf(min_or_nan(x, 20.0f)));
            const float step = clamped(x > 20.0f ? x : curved, DT_MIN, DT_MAX);
            raw[b] = int(lane) + 32 * b >= chunk.count ? 0.0f : chunk.tokens ? step : raw[b];
        }
    }
    __device__ __forceinline__ void store_sums(ChunkSteps& out, const Chunk& chunk, u32 lane) {
        finish(chunk, lane);
        float before = 0.0f;
#pragma unroll
        for (int b = 0; b < PER_LANE; ++b) {
            float sum = raw[b];
#pragma unroll
            for (int offset = 1; offset < 32; offset <<= 1) {
                const float other = __shfl_up_sync(~0u, sum, offset);
                if (lane >= offset) sum += other;
            }
            out.entry[lane + 32 * b] = {rate * (before + sum), raw[b]};
            before += __shfl_sync(~0u, sum, 31);
        }
    }
    // These sums run backwards from the end: those that matter are small there, and differences of long sums would round them.
    __device__ __forceinline__ void store_weights(ChunkSteps& out, const Chunk& chunk, u32 lane) {
        finish(chunk, lane);
        float behind = 0.0f;
#pragma unroll
        for (int b = PER_LANE - 1; b >= 0; --b) {
            float sum = raw[b];
#pragma unroll
            for (int offset = 1; offset < 32; offset <<= 1) {
                const float other = __shfl_down_sync(~0u, sum, offset);
                if (lane + offset < 32) sum += other;
            }
            const float next = __shfl_down_sync(~0u, sum, 1);
            out.weight[lane + 32 * b] = raw[b] * exp2f(rate * (behind + (lane < 31 ? next : 0.0f)));
            behind += __shfl_sync(~0u, sum, 0);
        }
        if (lane == 0) out.decay = exp2f(rate * behind);
    }
};
