// A tile in shared memory that takes up bfloat16 keys with few instructions (delta_fold.cuh).
//
// It gives the bits that ChunkTile gives of itself. Keys are interleaved (Chunk::interleave), so that ldmatrix brings them where a lane
// has its four columns of every 16, for both products. Each lane's columns are where no other needs them.
#pragma once
#include "delta_chunk.cuh"

// KEY: bfloat16.
template <typename KEY>
struct FoldTile : ChunkTile<false, true> {
    // Blocks of 16 columns that a loop takes at a time, so that loads run ahead. For compute capability 10, and without a copy, the
    // compiler would spill registers for four that are written.
    static constexpr int READ_TOGETHER = 4, WRITTEN_TOGETHER = __CUDA_ARCH__ >= 1000 || !COPIED ? 2 : 4;

    // Where the lane finds its columns and keys of the next block of 16, and its columns of that behind it.
    struct Cursor {
        STATE *even, *odd;
        const STAGED* keys;

        // Of the block n behind, which is even or odd as n is.
        __device__ STATE* columns(int n, int half) const { return (n % 2 ? odd : even) + 16 * n + half * 8 * STAGED_PITCH; }
        __device__ void load(float (&x)[2][4], int n) const {
#pragma unroll
            for (int half = 0; half < 2; ++half) load_vector<4>(columns(n, half), x[half]);
        }
        __device__ void move(int blocks) { even += 16 * blocks, odd += 16 * blocks, keys += 16 * blocks; }
    };
    // At the first block. For ldmatrix: the first halves of the block's keys, of either 8 entries in the order of an accumulator's, then
    // the other halves.
    __device__ Cursor begin(const ChunkInputs& in) const {
        const u32 lane = u32(thread) % 32, entry = lane / 8 % 2 * 8 + lane % 8 / 2 + lane % 2 * 4;
        return {own_staged(0), own_staged(1), &in.k[entry][lane / 16 * 8]};
    }

    __device__ void clear(Cursor at) const {
        const float zero[4] = {};
#pragma unroll
        for (int n = 0; n < 2 * PAIRS; ++n) store_vector<4>(at.columns(n / 2, n % 2), zero);
    }

    // As multiply_state. `at` moves behind the last block.
    __device__ void read(Cursor& at, Sum (&sums)[BLOCKS]) const {
        // The bits of tf32. Of a constant the compiler knows that the product reads no others: it would leave them on, and move whole
        // floats to where the product wants its operands.
        const u32 upper_bits = __ballot_sync(~0u, u32(thread) % 32 >= 13);
#pragma unroll 1
        for (int p = 0; p < PAIRS; p += READ_TOGETHER) {
#pragma unroll
            for (int n = 0; n < READ_TOGETHER; ++n) {
                float x[2][4];
                at.load(x, n);
                const Matrices k = load_matrices(at.keys + 16 * n);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float a[4] = {x[0][c], x[1][c], x[0][c + 2], x[1][c + 2]};
                    float upper[4], lower[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        upper[i] = sizeof(STATE) == 4 ? __uint_as_float(__float_as_uint(a[i]) & upper_bits) : a[i];
                        lower[i] = a[i] - upper[i];
                    }
#pragma unroll
                    for (int m = 0; m < BLOCKS; ++m) {
                        const float b0 = half_to_float<KEY>(k.v[m], c), b1 = half_to_float<KEY>(k.v[2 + m], c);
                        if constexpr (sizeof(STATE) == 4) mma_tf32(sums[m].rest, lower, b0, b1);
                        mma_tf32(sums[m].upper, upper, b0, b1);
                    }
                }
            }
            at.move(READ_TOGETHER);
        }
    }

    // As update_state, from behind the last block. `keeps`: the new state is wanted in shared memory, too.
    __device__ void write(Cursor at, float decay, const Parts<3> (&u)[4], bool keeps) {
        STATE* out = opaque(w.t.state_out + w.state_at(row()) + 4 * t() + KEY_DIM);
        const float* query = shared.query + (FOLD_ANSWERS ? 4 * t() + KEY_DIM : 0);
        float o[2] = {};  // the lane's share, of both rows
#pragma unroll 1
        for (int p = 0; p < PAIRS; p += WRITTEN_TOGETHER) {
            at.move(-WRITTEN_TOGETHER);
            out -= 16 * WRITTEN_TOGETHER, query -= 16 * WRITTEN_TOGETHER;
            float x[WRITTEN_TOGETHER][2][4];
#pragma unroll
            for (int n = 0; n < WRITTEN_TOGETHER; ++n) {
                at.load(x[n], n);
                const Matrices k = load_transposed_matrices(at.keys + 16 * n);
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    const Accumulator sum = multiply_updates(u, k.v[2 * b], k.v[2 * b + 1]);
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float& s = x[n][e / 2][2 * b + e % 2];
                        s = fmaf(s, decay, sum.v[e]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < 2 * WRITTEN_TOGETHER; ++n) {
                const float(&four)[4] = x[n / 2][n % 2];
                if (keeps) store_vector<4>(at.columns(n / 2, n % 2), four);
                store_four(out + n / 2 * 16 + n % 2 * 8 * KEY_DIM, four);
                if constexpr (READ_BITS == 4)
                    largest = largest_of(largest, larger_magnitude(four[0], four[1]), larger_magnitude(four[2], four[3]));
                if constexpr (FOLD_ANSWERS) {
                    float q[4];
                    load_vector<4>(query + n / 2 * 16, q);
#pragma unroll
                    for (int i = 0; i < 4; ++i) o[n % 2] = fmaf(four[i], q[i], o[n % 2]);
                }
            }
        }
        if (FOLD_ANSWERS && w.row.absorbs()) answer(o);
    }
    __device__ void answer(float (&o)[2]) const {
        sum_all<4>(o);
        if (t() < 2) w.o(0)[row() + 8 * t()] = from_float<ACT>(t() ? o[1] : o[0]);
    }

    // Of the step's tokens, from the new state in shared memory.
    __device__ void answer_step(Cursor at) const {
        StepAnswer<KEY> step(*shared.coefficients, {w.v(0), w.o(0), w.t.qkv_stride}, w.k(0), w.n, lane(), row());
#pragma unroll 1
        for (int p = 0; p < PAIRS; p += WRITTEN_TOGETHER) {
#pragma unroll
            for (int n = 0; n < WRITTEN_TOGETHER; ++n) {
                float x[2][4];
                at.load(x, n);
                step.add(x, 16 * n);
                if (STEP_BLOCKS > 1) __syncwarp();  // keeps the compiler from requesting more than registers hold
            }
            at.move(WRITTEN_TOGETHER), step.move(16 * WRITTEN_TOGETHER);
        }
        step.finish();
    }

    // As ChunkTile's.
    __device__ void read_chunk(const ChunkInputs& in, int, Sum (&stored)[BLOCKS]) {
        Cursor at = begin(in);
        if (!holds) clear(at);
        read(at, stored);
    }
    __device__ void take_chunk(const ChunkInputs& in, int, const Sum (&stored)[BLOCKS]) {
        float u[BLOCKS][4];
        solve(in, stored, u);
        decay_to_end(u);
        Parts<3> parts[4];
        split_updates(u, parts);
        Cursor at = begin(in);
        at.move(PAIRS);
        const bool asked = FOLD_ANSWERS_STEP && shared.coefficients->tokens > 0;
        write(at, chunk_decay(in), parts, asked || READ_BITS == 8 || (READ_BITS == 4 && !next_active()));
        if (asked) {
            thread = opaque(int(threadIdx.x));
            answer_step(begin(in));
        }
    }
};
