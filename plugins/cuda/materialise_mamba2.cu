// replayssm::materialise of a Mamba-2 layer: S = exp(A dt) S + dt x B^T for every entry (materialise.cuh).
//
// Macros: materialise.cuh (ROWS: the head size P, COLUMNS: the state size N), RING (element type of x and B).
#include "materialise.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    materialise_mamba2(const float* A, const STATE* state, const RING* ring_x, const RING* ring_b, const float* ring_dt,
                       COPY_INPUTS int source, int destination, int folded, int prefix_len, int state_stride, int ring_x_stride,
                       int ring_b_stride, int ring_dt_stride, COPY_STRIDES STATE* state_out COPY_OUTPUTS) {
    const Prefix prefix = {source, destination, folded, prefix_len};
    Owner own;
    for (; own.exists(); own.advance()) {
        const RING* x = ring_x + prefix.source * ring_x_stride + own.head * RING_ROWS * ROWS + own.row;
        const RING* b = ring_b + prefix.source * ring_b_stride + own.group() * RING_ROWS * COLUMNS;
        const float* dt = ring_dt + prefix.source * ring_dt_stride + own.head * RING_ROWS;
        const float rate = A[own.head];

        Vector S = load_checkpoint(state, state_stride, prefix, own);
#pragma unroll 4
        for (int j = 0; j < prefix.entries(); ++j) {
            const int at = prefix.ring_row(j);
            Vector B;
            B.load(b + at * COLUMNS, own.lane);
            const float decay = expf(rate * dt[at]), scaled = dt[at] * to_float(x[at * ROWS]);
#pragma unroll
            for (int r = 0; r < PER_LANE; ++r) S.v[r] = decay * S.v[r] + scaled * B.v[r];
        }
        S.store(state_out + prefix.destination * state_stride + own.state_offset(), own.lane);
    }
    if constexpr (READ_BITS > 0)
        write_copy<ROWS, COLUMNS, 32 * WARPS>(state_out + prefix.destination * state_stride + own.head * ROWS * COLUMNS,
                                              COPY_OF_SLOT(destination).of_head(own.head, ROWS, COLUMNS));
}
