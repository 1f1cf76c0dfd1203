// Stage 3 of mamba2_step: y_i = exp(c_e) S0 C_i + sum_j M_ij x_j (formula and names in mamba2_replay.cuh).
#pragma once
#include "mamba2_replay.cuh"

// S0 C of a head, accumulated chunk by chunk: tile n holds state rows g and g + 8, tokens 8 n + 2 t and 8 n + 2 t + 1.
// Two accumulators a tile halve the chain of dependent instructions.
struct StateProducts {
    Accumulator v[TOKEN_TILES][2];

    __device__ __forceinline__ void add(const Chunk& s, const TokenC& c, int chunk) {
#pragma unroll
        for (int k = 0; k < BLOCKS_A_CHUNK; ++k)
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) add_block(v[n], s.v[k], c.v[n][chunk * BLOCKS_A_CHUNK + k]);
    }

private:
    static __device__ __forceinline__ void add_block(Accumulator (&out)[2], const StatePairs<STATE> (&s)[2], const Pairs& c) {
        if constexpr (same_type<STATE, ACT>::value) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 a[4] = {s[0].v[2 * half], s[1].v[2 * half], s[0].v[2 * half + 1], s[1].v[2 * half + 1]};
                mma_16bit<ACT>(out[half], a, c.v[2 * half], c.v[2 * half + 1]);
            }
        } else {
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const float a[4] = {s[0].get(m, 0), s[1].get(m, 0), s[0].get(m, 1), s[1].get(m, 1)};
                const float first = half_to_float<ACT>(c.v[m], false), second = half_to_float<ACT>(c.v[m], true);
                if constexpr (WIDE_STATE)
                    mma_split_a(out[m & 1], a, first, second);
                else
                    mma_tf32(out[m & 1], a, first, second);
            }
        }
    }
};

__device__ __forceinline__ void read_out(const StateProducts& s, const GroupProducts& bc, const HeadInputs& in,
                                         const Decays& decays, const Sequence& seq, int lane, ACT* y) {
    const int g = lane / 4, t = lane % 4, tokens = seq.length - seq.history;
    Accumulator out[TOKEN_TILES];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float decay = decays.decay(0.0f, decays.sum_at(seq.history + 8 * n + 2 * t + e));
            out[n].v[e] = decay * (s.v[n][0].v[e] + s.v[n][1].v[e]);
            out[n].v[2 + e] = decay * (s.v[n][0].v[2 + e] + s.v[n][1].v[2 + e]);
        }
    float sum_i[TOKEN_TILES];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) sum_i[n] = decays.sum_at(seq.history + 8 * n + g);
#pragma unroll
    for (int b = 0; b < ENTRY_BLOCKS; ++b) {
        if (16 * b >= seq.length) continue;
        const TransposedX x(in.x[b]);
#pragma unroll
        for (int s8 = 0; s8 < 2; ++s8) {
            float a[4], sum_j[2], dt_j[2];
            x.operand(a, s8, 1.0f, 1.0f);
            const int j0 = 16 * b + 8 * s8 + 2 * t;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                sum_j[e] = __shfl_sync(~0u, decays.sum[b / 2], (j0 + e) & 31);
                dt_j[e] = __shfl_sync(~0u, decays.dt[b / 2], (j0 + e) & 31);
            }
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) {
                const int i = 8 * n + g, entry = seq.history + i;
                float m[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float product = bc.v[2 * b + s8].v[2 * n + e];
                    m[e] = decays.decay(sum_j[e], sum_i[n]) * dt_j[e] * product + (j0 + e == entry ? in.D : 0.0f);
                    if (j0 + e > entry || i >= tokens) m[e] = 0.0f;
                }
                mma_split_b(out[n], a, m[0], m[1]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int i = 8 * n + 2 * t + e;
            if (i >= TOKENS) continue;
            ACT* to = y + i * INNER + state_row(g);
            to[0] = from_float<ACT>(i < tokens ? out[n].v[e] : 0.0f);
            to[2] = from_float<ACT>(i < tokens ? out[n].v[2 + e] : 0.0f);
        }
}
