// replayssm::mamba2 for rows of many tokens (T > 16) with 16-bit activations. Contract: plugins/mamba2.py.
//
// A block keeps CHANNELS rows of one head's state in registers, in float32, and takes the row's sequence chunk by chunk, the history
// apart from the tokens. For each chunk it forms the outputs, from the state before the chunk and from the chunk's own entries, and
// then takes the chunk up into the state. Warps divide the outputs by tokens and the state by columns; the state passes from
// one division to the other through shared memory. B and x of the next chunk travel there while the state answers C, and C of
// the next chunk to registers while this one is taken up.
//
// Stages: mamba2_chunk.cuh (inputs), mamba2_chunk_outputs.cuh, mamba2_chunk_state.cuh. Macros: mamba2_chunk.cuh.
#include "mamba2_chunk_outputs.cuh"
#include "mamba2_chunk_state.cuh"
#include "read_copy.cuh"

// C of wide states is more than registers hold beside an update.
constexpr bool EARLY_C = STATE_SIZE <= 128;

// Stores the tokens of a chunk in the ring. Only rows that do not absorb get here.
__device__ __forceinline__ void append(const Shared& shared, const ChunkSteps& steps, const Work& w, const Chunk& chunk, ACT* ring_x,
                                       ACT* ring_b, float* ring_dt) {
    const int first = w.row.committed + chunk.first;
    const bool leads_head = w.first_channel() == 0, leads_group = leads_head && w.head() % HEADS_A_GROUP == 0;
#pragma unroll 1
    for (int at = threadIdx.x; at < chunk.count * X_UNITS; at += THREADS) {
        const int i = at / X_UNITS, unit = at % X_UNITS;
        *reinterpret_cast<uint4*>(ring_x + w.ring_x_at(first + i) + UNIT * unit) = shared.x[unit_at<X_UNITS>(i, unit)];
        if (leads_head && unit == 0) ring_dt[w.ring_dt_at(first + i)] = steps.entry[i].y;
    }
    if (!leads_group) return;
#pragma unroll 1
    for (int at = threadIdx.x; at < chunk.count * B_UNITS; at += THREADS) {
        const int i = at / B_UNITS, unit = at % B_UNITS;
        *reinterpret_cast<uint4*>(ring_b + w.ring_b_at(first + i) + UNIT * unit) = shared.b[unit_at<B_UNITS>(i, unit)];
    }
}

// An nvfp4 copy has a scale of the whole head, which its blocks find together.
#if READ_BITS == 4 && HEAD_DIM > CHANNELS
#define HEAD_CLUSTER __cluster_dims__(HEAD_DIM / CHANNELS, 1, 1)
#else
#define HEAD_CLUSTER
#endif

extern "C" __global__ void HEAD_CLUSTER __launch_bounds__(THREADS, BLOCKS_AN_SM)
    mamba2_prefill(const ACT* xbc, const ACT* dt, const float* A_log, const float* dt_bias, const float* D, const int* step,
                   const STATE* state, const ACT* ring_x, const ACT* ring_b, const float* ring_dt, COPY_INPUTS int tokens,
                   int xbc_stride, int dt_stride, int state_stride, int ring_x_stride, int ring_b_stride, int ring_dt_stride,
                   COPY_STRIDES int /*heads_per_block*/, ACT* y, STATE* state_out, ACT* ring_x_out, ACT* ring_b_out,
                   float* ring_dt_out COPY_OUTPUTS) {
    __shared__ alignas(128) Shared shared;
    const u32 lane = threadIdx.x % 32;
    const Tensors t{xbc, dt, ring_x, ring_b, ring_dt, tokens, xbc_stride, dt_stride, ring_x_stride, ring_b_stride, ring_dt_stride};
    const Work w{t, load_row(step, blockIdx.y, tokens)};
    const Row& row = w.row;
    const int valid = row.slot < 0 ? 0 : row.tokens;
#pragma unroll 1
    for (int at = threadIdx.x; at < (tokens - valid) * X_UNITS; at += THREADS)
        *reinterpret_cast<uint4*>(y + w.y_at(valid + at / X_UNITS) + UNIT * (at % X_UNITS)) = {0, 0, 0, 0};
    if (row.slot < 0) return;

    const Tile own;
    Chunk chunk(w, 0);
    request(shared, w, chunk);
    prefetch(w, Chunk(w, 1));
    WarpState s;
    s.load(state + w.slot() * state_stride + w.head() * HEAD_SIZE, w, lane);
    LoadedC loaded;
    loaded.load(w, chunk, own.first_token(), lane);
    StepMaker next_steps;
    own.load_steps(next_steps, w, chunk, A_log, dt_bias, lane);
    own.store_steps(next_steps, shared.steps[0], chunk, lane);
    s.publish(shared, lane);

    const int chunks = w.chunks();
    for (int index = 0; index < chunks; ++index) {
        const ChunkSteps& steps = shared.steps[index % 2];
        const Chunk next(w, index + 1);
        const TokenC c(loaded, tokens >> 31);
        ChunkOutputs outputs;
        __syncthreads();
        if (chunk.tokens) outputs.read_state(shared, steps, c, own, opaque(lane));
        wait_copies();
        __syncthreads();
        own.load_steps(next_steps, w, next, A_log, dt_bias, opaque(lane));
        if (chunk.tokens) {
            outputs.add_entries(shared, steps, c, D[w.head()], own, opaque(lane));
            outputs.store(y + w.y_at(chunk.first), own, chunk.count, opaque(lane));
            if (!row.absorbs()) append(shared, steps, w, chunk, ring_x_out, ring_b_out, ring_dt_out);
        }
        if (EARLY_C) loaded.load(w, next, own.first_token(), opaque(lane));
        s.update(shared, steps, opaque(lane));
        if (index + 1 == w.folded_chunks())
            s.store(state_out + w.slot() * state_stride + w.head() * HEAD_SIZE, w, RandomSource{step, int(blockIdx.y)}, lane);
        if (index + 1 == chunks) break;

        own.store_steps(next_steps, shared.steps[(index + 1) % 2], next, opaque(lane));
        __syncthreads();
        request(shared, w, next);
        prefetch(w, Chunk(w, index + 2));
        s.publish(shared, opaque(lane));
        if (!EARLY_C) loaded.load(w, next, own.first_token(), opaque(lane));
        chunk = next;
    }
    if constexpr (READ_BITS > 0) {
        // The row is read again, so that nothing is kept in registers for this.
        const Row written = load_row(step, opaque(int(blockIdx.y)), tokens);
        if (!written.folds()) return;
        const int head = w.head(), first = w.first_channel();
        write_copy<CHANNELS, STATE_SIZE, THREADS, BLOCKS_A_HEAD>(
            state_out + written.slot * state_stride + head * HEAD_SIZE + first * STATE_SIZE,
            COPY_OF_SLOT(written.slot).of_head(head, HEAD_DIM, STATE_SIZE, first));
    }
}
