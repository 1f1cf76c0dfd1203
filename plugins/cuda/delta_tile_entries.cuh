// What 16 value rows of the state that a warp holds have to do with a chunk's entries: from what keys have read of them to what is to be
// added to them (formulas and layouts: delta_chunk.cuh).
#pragma once
#include "bf16_parts.cuh"
#include "delta_pairs.cuh"

constexpr int TILE_VALUES = SLICE < 16 * WARPS ? SLICE : 16 * WARPS;  // value rows of the block's tile

struct TileEntries {
    const Work& w;
    ChunkShared& shared;
    int first;   // first value row of the tile within the slice
    int thread;  // threadIdx.x, of which the compiler knows nothing between the stages of a chunk: it saves registers

    __device__ int warp() const { return u32(thread) / 32; }
    __device__ int lane() const { return u32(thread) % 32; }
    __device__ int g() const { return u32(thread) % 32 / 4; }
    __device__ int t() const { return u32(thread) % 4; }
    __device__ int row() const { return first + 16 * warp() + g(); }  // the lane's first, within the slice
    // Entry of column g of a block of 8, and of element e of a lane's accumulator.
    __device__ int column_entry() const { return g() / 2 + 4 * (g() % 2); }
    __device__ int element_entry(int e) const { return t() + 4 * (e % 2); }

    // What has been prepared of the head.
    __device__ int prepared() const { return PREPARED_HEADS > 1 ? w.n : 0; }
    __device__ const ChunkSystem& system() const { return shared.systems[prepared()]; }
    __device__ float chunk_decay(const ChunkInputs& in) const { return in.gates[prepared()].from_start[CHUNK - 1]; }

    // sum_i x_i row[i] over the 8 entries of an accumulator.
    __device__ void add_entries(Sum& sum, const float (&x)[4], const float* row) const {
        sum.add<false>({x[0], x[2], x[1], x[3]}, row[t()], row[t() + 4]);
    }

    // v of the lane's rows. Element e of block n belongs to entry 8 n + element_entry(e) and row g + 8 (e / 2).
    template <typename T>
    __device__ void load_values(const T (*values)[VALUE_STRIDE], float (&v)[BLOCKS][4]) const {
        if constexpr (sizeof(T) == 2 && CHUNK == 16) {
            const u32 lane = u32(thread) % 32, entry = lane / 16 * 8 + lane % 8 / 2 + lane % 2 * 4;
            const Matrices pairs = load_transposed_matrices(&values[entry][first + 16 * warp() + lane / 8 % 2 * 8]);
#pragma unroll
            for (int n = 0; n < 4 * BLOCKS; ++n) v[n / 4][n % 4] = half_to_float<T>(pairs.v[n / 2], n % 2);
        } else {
#pragma unroll
            for (int n = 0; n < 4 * BLOCKS; ++n) v[n / 4][n % 4] = to_float(values[n / 4 * 8 + element_entry(n)][row() + n / 2 % 2 * 8]);
        }
    }

    // u times the norm of k, of the same entries and rows. Behind the last entry it is zero, as keys and values are.
    __device__ void solve(const ChunkInputs& in, const Sum (&stored)[BLOCKS], float (&u)[BLOCKS][4]) const {
        float r[BLOCKS][4];
        load_values(in.v, r);
#pragma unroll
        for (int n = 0; n < BLOCKS; ++n) {
            float gains[2];
            load_vector<2>(system().gains[4 * n + t()], gains);
#pragma unroll
            for (int e = 0; e < 4; ++e) r[n][e] = fmaf(-gains[e % 2], stored[n].get(e), r[n][e]);
        }
#pragma unroll
        for (int m = BLOCKS - 1; m >= 0; --m) {  // the last one first: then nothing needs its r
            Sum solved = {};
#pragma unroll
            for (int n = 0; n <= m; ++n) {
                const Split a(r[n][0], r[n][2], r[n][1], r[n][3]);
                float inverse[2];
                load_vector<2>(&system().matrix[8 * m + column_entry()][8 * n + 2 * t()], inverse);
                solved.add<false>(a, inverse[0], inverse[1]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) u[m][e] = solved.get(e);
        }
    }

    // u from behind an entry to the chunk's end.
    __device__ void decay_to_end(float (&u)[BLOCKS][4]) const {
        if constexpr (!PER_CHANNEL)
#pragma unroll
            for (int n = 0; n < BLOCKS; ++n) {
                float gains[2];
                load_vector<2>(&system().gains[4 * n + t()][2], gains);
#pragma unroll
                for (int e = 0; e < 4; ++e) u[n][e] = __fmul_rn(u[n][e], gains[e % 2]);
            }
    }

    // bfloat16 keys: all of u in three parts, as the first operand of a product over entries.
    __device__ static void split_updates(const float (&u)[BLOCKS][4], Parts<3> (&parts)[4]) {
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; ++n) parts[n] = split_pair<3>(u[n / 2][n % 2 * 2], u[n / 2][n % 2 * 2 + 1]);
    }
    // Of 8 columns and the entries in that order, b0 and b1 have the keys.
    __device__ static Accumulator multiply_updates(const Parts<3> (&u)[4], u32 b0, u32 b1) {
        const Parts<1> k[2] = {{{b0}}, {{b1}}};
        Accumulator sum = {};  // the small products first
        mma_parts<1, 3>(sum, u, k[0], k[1]);
        mma_parts<0, 1>(sum, u, k[0], k[1]);
        return sum;
    }
};
