// Decays between the entries of a chunk of Kimi Delta Attention, for the products of entries with each other:
//
//     sum_c exp(G_ic - G_jc) x_ic k_jc,   i > j
//
// No ratio of decays is formed. Two entries differ first in one bit of their index, b: j has it not, i has it, and between them lies the
// boundary of two neighbouring runs of b entries. Then exp(G_i - G_j) is the decay from the boundary through i times that from behind j
// to the boundary. Both are products of an entry's decays with others of its run, which double in length from b to 2 b.
#pragma once
#include "kda_channels.cuh"

// Of the lane's entries g and g + 8: `until` from a run's start through the entry, `behind` from behind it to the run's end.
template <int N>
struct RunDecays {
    Channels<N> until[2], behind[2];

    // Runs of one entry.
    __device__ __forceinline__ RunDecays(const Channels<N>& first, const Channels<N>& second)
        : until{first, second}, behind{Channels<N>(1.0f), Channels<N>(1.0f)} {}

    // To or from the boundary between neighbouring runs of b entries.
    __device__ __forceinline__ Channels<N> of_boundary(int r, int b, u32 lane) const {
        Channels<N> decay(0.0f);
#pragma unroll
        for (int c = 0; c < N; ++c) decay.v[c] = lane / 4 & b ? until[r].v[c] : behind[r].v[c];
        return decay;
    }
    // Runs of b < 8 entries become those of 2 b.
    __device__ __forceinline__ void double_runs(int b, u32 lane) {
        const u32 entry = lane / 4, other = ((entry ^ b) | (b - 1)) * 4 + lane % 4;
        const bool later = entry & b;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Channels<N> whole = until[r].from(other);
            if (later)
                until[r] = until[r] * whole;
            else
                behind[r] = behind[r] * whole;
        }
    }
    // Runs of 8 entries become the chunk.
    __device__ __forceinline__ void join(u32 lane) {
        const u32 last = 28 + lane % 4;
        const Channels<N> first = until[0].from(last);
        behind[0] = behind[0] * until[1].from(last), until[1] = until[1] * first;
    }
};

// Products of entries over a warp's channels, in tiles (0, 0), (1, 0) and (1, 1) of 8 x 8: row g, columns 2 t and 2 t + 1.
struct PairProducts {
    float v[3][2];

    // Those of entries 8 r + i and 8 r + j that differ first in bit b, from products with entries 8 r ... 8 r + 7.
    __device__ __forceinline__ void keep(int r, const Accumulator& products, int b, u32 lane) {
        const int i = lane / 4, j = lane % 4 * 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int different = i ^ (j + e);
            const bool here = i > j + e && different >= b && different < 2 * b;
            v[2 * r][e] = here ? products.v[2 * r + e] : v[2 * r][e];
        }
    }
    // Those of entries of the second tile with those of the first.
    __device__ __forceinline__ void keep_across(const Accumulator& products) { v[1][0] = products.v[2], v[1][1] = products.v[3]; }

    __device__ __forceinline__ void add(const PairProducts& other) {
#pragma unroll
        for (int n = 0; n < 6; ++n) v[n / 2][n % 2] += other.v[n / 2][n % 2];
    }
    __device__ __forceinline__ void store(float (&to)[3][8][8], u32 lane) const {
#pragma unroll
        for (int tile = 0; tile < 3; ++tile) store_vector<2>(&to[tile][lane / 4][lane % 4 * 2], v[tile]);
    }
    __device__ __forceinline__ void add(const float (&from)[3][8][8], u32 lane) {
#pragma unroll
        for (int tile = 0; tile < 3; ++tile) {
            float part[2];
            load_vector<2>(&from[tile][lane / 4][lane % 4 * 2], part);
            v[tile][0] += part[0], v[tile][1] += part[1];
        }
    }
};
