// replayssm::materialise of a delta-rule layer (materialise.cuh): for every entry, with k normalised,
//
//     S = S diag(exp g),  u = beta (v - S k),  S = S + u k^T
//
// Macros: materialise.cuh (ROWS: the value size V, COLUMNS: the key size K), RING_K, RING_V (element types), PER_CHANNEL (kda:
// one decay per key channel), DERIVED (the ring's v row holds u, so that replaying is a sum).
#include "materialise.cuh"

constexpr float NORM_EPSILON = 1e-6f;  // plugins/gated_delta.py, L2_EPSILON
// 0 leaves it to the compiler. With a copy, whose blocks are large, it would choose three on sm_103a, and spill registers.
constexpr int BLOCKS_AN_SM = READ_BITS ? 2 : 0;

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_AN_SM)
    materialise_delta_rule(const STATE* state, const RING_K* ring_k, const RING_V* ring_v, const float* ring_g,
                           const float* ring_beta, COPY_INPUTS int source, int destination, int folded, int prefix_len, int state_stride,
                           int ring_k_stride, int ring_v_stride, int ring_g_stride, int ring_beta_stride,
                           COPY_STRIDES STATE* state_out COPY_OUTPUTS) {
    constexpr int GATES = PER_CHANNEL ? COLUMNS : 1;
    const Prefix prefix = {source, destination, folded, prefix_len};
    Owner own;
    for (; own.exists(); own.advance()) {
        const RING_K* keys = ring_k + prefix.source * ring_k_stride + own.group() * RING_ROWS * COLUMNS;
        const RING_V* values = ring_v + prefix.source * ring_v_stride + own.head * RING_ROWS * ROWS + own.row;
        const float* gates = ring_g + prefix.source * ring_g_stride + own.head * RING_ROWS * GATES;
        const float* betas = ring_beta + prefix.source * ring_beta_stride + own.head * RING_ROWS;

        Vector S = load_checkpoint(state, state_stride, prefix, own);
#pragma unroll 2
        for (int j = 0; j < prefix.entries(); ++j) {
            const int at = prefix.ring_row(j);
            Vector k, g;
            k.load(keys + at * COLUMNS, own.lane);
            if constexpr (PER_CHANNEL)
                g.load(gates + at * GATES, own.lane);
            else
                g.v[0] = gates[at];
            const float scale = rsqrtf(k.dot(k) + NORM_EPSILON);
#pragma unroll
            for (int r = 0; r < PER_LANE; ++r) {
                k.v[r] *= scale;
                S.v[r] *= expf(g.v[PER_CHANNEL ? r : 0]);
            }
            float u = to_float(values[at * ROWS]);
            if constexpr (!DERIVED) u = betas[at] * (u - S.dot(k));
#pragma unroll
            for (int r = 0; r < PER_LANE; ++r) S.v[r] = fmaf(u, k.v[r], S.v[r]);
        }
        S.store(state_out + prefix.destination * state_stride + own.state_offset(), own.lane);
    }
    if constexpr (READ_BITS > 0)
        write_copy<ROWS, COLUMNS, 32 * WARPS>(state_out + prefix.destination * state_stride + own.head * ROWS * COLUMNS,
                                              COPY_OF_SLOT(destination).of_head(own.head, ROWS, COLUMNS));
}
