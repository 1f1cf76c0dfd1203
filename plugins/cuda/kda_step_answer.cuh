// The answer of several tokens of Kimi Delta Attention from a checkpoint on its way to memory (delta_step_answer.cuh).
//
// Decays are per channel, so that rows meet x itself, which the adjoint of an empty ring has left in shared memory.
#pragma once
#include "delta_step_answer.cuh"

constexpr int X_PITCH = KEY_DIM + 16;  // a token's columns and the next one's lie in different banks

struct KdaStepAnswer : StepRows<ValueCoefficients> {
    Sum products[OUTPUT_BLOCKS] = {};
    using StepRows::StepRows;

    // Of block p of 16 columns, of which the lane has 4 t ... 4 t + 3. x: of all tokens. state(half, column) is an element of either row.
    template <typename State>
    __device__ void add(const float (*x)[X_PITCH], int p, State state) {
#pragma unroll
        for (int m = 0; m < OUTPUT_BLOCKS; ++m) {
            float columns[4];
            load_vector<4>(&x[column_token(m)][16 * p + 4 * t()], columns);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float a[4] = {state(0, c), state(1, c), state(0, c + 2), state(1, c + 2)};
                if constexpr (sizeof(STATE) == 4) {
                    products[m].add<false>(Split(a[0], a[1], a[2], a[3]), columns[c], columns[c + 2]);
                } else {
                    const float upper[2] = {tf32_part(columns[c]), tf32_part(columns[c + 2])};
                    mma_tf32(products[m].rest, a, columns[c] - upper[0], columns[c + 2] - upper[1]);
                    mma_tf32(products[m].upper, a, upper[0], upper[1]);
                }
            }
        }
    }
    __device__ void finish() const {
        int spoilt[2];
        find_spoilt(spoilt);
#pragma unroll
        for (int m = 0; m < OUTPUT_BLOCKS; ++m) {
            Sum sums = products[m];
            add_values(sums, m);
            const float o[4] = {sums.get(0), sums.get(1), sums.get(2), sums.get(3)};
            store(o, spoilt, m);
        }
    }
};
