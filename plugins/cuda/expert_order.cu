// Pairs (token, choice) sorted by expert, for the grouped products. One block.
//
//     order[ends[e - 1] .. ends[e])   the pairs of expert e, a pair being token * top_k + choice
//     active[0 .. E)                  experts that have pairs, then -1
//
// Within an expert the order is arbitrary: every pair's product is computed from its own row alone.
//
// Macros: EXPERTS (1024 at most).
#include "types.cuh"

constexpr int BLOCK = 1024;
static_assert(EXPERTS <= BLOCK, "a thread counts one expert");

extern "C" __global__ void __launch_bounds__(BLOCK)
    expert_order(const int* indices, int pairs, int* order, int* ends, int* active) {
    __shared__ int next[EXPERTS], sums[BLOCK / 32], used[BLOCK / 32];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    if (thread < EXPERTS) next[thread] = 0;
    __syncthreads();
    for (int pair = thread; pair < pairs; pair += BLOCK) atomicAdd(&next[indices[pair]], 1);
    __syncthreads();

    const int count = thread < EXPERTS ? next[thread] : 0;
    int sum = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int before = __shfl_up_sync(~0u, sum, offset);
        if (lane >= offset) sum += before;
    }
    const u32 present = __ballot_sync(~0u, count > 0);
    if (lane == 31) sums[warp] = sum;
    if (lane == 0) used[warp] = __popc(present);
    __syncthreads();
    int base = 0, rank = __popc(present & ((1u << lane) - 1)), total = 0;
    for (int w = 0; w < BLOCK / 32; ++w) {
        if (w < warp) base += sums[w], rank += used[w];
        total += used[w];
    }
    if (thread < EXPERTS) {
        ends[thread] = base + sum;
        next[thread] = base + sum - count;
        if (count) active[rank] = thread;
        if (thread >= total) active[thread] = -1;
    }
    __syncthreads();
    for (int pair = thread; pair < pairs; pair += BLOCK) order[atomicAdd(&next[indices[pair]], 1)] = pair;
}
