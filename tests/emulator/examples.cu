// Small kernels with a fault each (FAULT), and without it; for the tests of the emulator. CLUSTER: its blocks come in pairs.
#include "ptx/async_copy.cuh"
#include "ptx/barriers.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mma.cuh"
#include "types.cuh"

#define KERNEL extern "C" __global__ void

// ---- barriers --------------------------------------------------------------------------------------------------------

// The block's values in reverse.
KERNEL reverse_block(const int* in, int* out) {
    __shared__ int values[64];
    values[threadIdx.x] = in[threadIdx.x];
    if (!FAULT) __syncthreads();
    out[threadIdx.x] = values[63 - threadIdx.x];
}

KERNEL reverse_warp(const int* in, int* out) {
    __shared__ int values[64];
    values[threadIdx.x] = in[threadIdx.x];
    if (!FAULT) __syncwarp();
    out[threadIdx.x] = values[threadIdx.x ^ 31];
}

// Sums of the block's values and of their squares, through one place: it must not be written again before all have read it.
KERNEL sums_through_one_place(const int* in, int* out) {
    __shared__ int value;
    int sums[2] = {};
    for (int i = 0; i < 64; ++i) {
        if (threadIdx.x == i) value = in[i];
        __syncthreads();
        sums[0] += value, sums[1] += value * value;
        if (!FAULT) __syncthreads();
    }
    out[threadIdx.x] = sums[0] + sums[1];
}

// The second warp waits for what the first one leaves.
KERNEL hand_over(const int* in, int* out) {
    __shared__ int values[32];
    if (threadIdx.x < 32) {
        values[threadIdx.x] = in[threadIdx.x];
        arrive_threads(1, 64);
        out[threadIdx.x] = 0;
    } else {
        sync_threads(1, FAULT ? 96 : 64);
        out[threadIdx.x] = values[threadIdx.x % 32];
    }
}

KERNEL barrier_of_half_a_block(const int* in, int* out) {
    out[threadIdx.x] = in[threadIdx.x];
    if (!FAULT || threadIdx.x < 32) sync_threads(1, 64);
    __syncthreads();
}

KERNEL barrier_of_half_warps(const int* in, int* out) {
    out[threadIdx.x] = in[threadIdx.x];
    if (FAULT ? threadIdx.x % 32 < 16 : threadIdx.x < 32) sync_threads(1, 32);
    __syncwarp();
}

KERNEL barrier_at_two_places(const int* in, int* out) {
    out[threadIdx.x] = in[threadIdx.x];
    if (FAULT && threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}

KERNEL barrier_of_those_left(const int* in, int* out) {
    out[threadIdx.x] = in[threadIdx.x];
    if (FAULT && threadIdx.x < 32) return;
    __syncthreads();
}

// Every block of a cluster of two reads what the other one stores.
#if CLUSTER
#define HEAD_CLUSTER __cluster_dims__(2, 1, 1)
#else
#define HEAD_CLUSTER
#endif
KERNEL HEAD_CLUSTER exchange_in_cluster(const int* in, int* out) {
    __shared__ int own;
    own = 7 * int(blockIdx.x);
    out[blockIdx.x * 64 + threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
    if (!FAULT) wait_cluster();
    const int other = out[(blockIdx.x ^ 1) * 64 + threadIdx.x];
    wait_cluster();
    out[blockIdx.x * 64 + threadIdx.x] = other + own;
}

// Every block of it reads what the other one has in shared memory, where both are still there.
KERNEL HEAD_CLUSTER shared_of_cluster(const int* in, int* out) {
    __shared__ float values[64];
    values[threadIdx.x] = float(in[blockIdx.x * 64 + threadIdx.x]);
    wait_cluster();
    out[blockIdx.x * 64 + threadIdx.x] = int(load_of_block(&values[63 - threadIdx.x], blockIdx.x ^ 1));
    if (!FAULT) wait_cluster();
}

KERNEL HEAD_CLUSTER shared_of_cluster_at_once(const int* in, int* out) {
    __shared__ float value;
    if (threadIdx.x == 0) value = float(in[blockIdx.x * 64]);
    if (!FAULT) wait_cluster();
    out[blockIdx.x * 64 + threadIdx.x] = int(load_of_block(&value, blockIdx.x ^ 1));
    wait_cluster();
}

// ---- lanes -----------------------------------------------------------------------------------------------------------

KERNEL lane_beyond_the_mask(const int* in, int* out) {
    out[threadIdx.x] = __shfl_xor_sync(FAULT ? 0xffffu : ~0u, in[threadIdx.x], 1);
}

KERNEL lanes_that_have_ended(const int* in, int* out) {
    out[threadIdx.x] = in[threadIdx.x];
    if (threadIdx.x % 32 >= 16) return;
    out[threadIdx.x] = __shfl_xor_sync(FAULT ? ~0u : 0xffffu, in[threadIdx.x], 1);
}

KERNEL collectives_of_two_kinds(const int* in, int* out) {
    const u32 mask = FAULT ? ~0u : threadIdx.x % 32 < 16 ? 0xffffu : 0xffff0000u;
    out[threadIdx.x] = threadIdx.x % 32 < 16 ? __shfl_xor_sync(mask, in[threadIdx.x], 1) : int(__ballot_sync(mask, true));
}

// ---- copies ----------------------------------------------------------------------------------------------------------

// Two groups of copies, of which the second one is read.
KERNEL wait_for_a_group(const int* in, int* out) {
    __shared__ __align__(16) int values[2][64];
    for (int group = 0; group < 2; ++group) {
        if (threadIdx.x < 16) copy_16_bytes(&values[group][4 * threadIdx.x], in + 4 * threadIdx.x);
        end_copies();
    }
    wait_for_copies<FAULT>();
    __syncthreads();
    out[threadIdx.x] = values[1][threadIdx.x];
    wait_copies();
}

// WAITS: the second copy is waited for. BYTES: what its barrier expects.
template <bool WAITS, int BYTES>
__device__ void stream_twice(const int* in, int* out) {
    __shared__ __align__(16) int values[64];
    __shared__ u64 barrier;
    if (threadIdx.x == 0) init_barrier(&barrier), publish_barriers();
    for (int turn = 0; turn < 2; ++turn) {
        __syncthreads();
        if (threadIdx.x == 0) expect_bytes(&barrier, BYTES), stream_to_shared(values, in + 64 * turn, 256, &barrier);
        if (WAITS || turn == 0) wait_barrier(&barrier, turn);
    }
    out[threadIdx.x] = values[threadIdx.x];
}
KERNEL bulk_copy_without_wait(const int* in, int* out) { stream_twice<!FAULT, 256>(in, out); }
KERNEL bulk_copy_of_other_size(const int* in, int* out) { stream_twice<true, FAULT ? 512 : 256>(in, out); }

KERNEL barrier_without_init(const int* in, int* out) {
    __shared__ u64 barrier;
    if (threadIdx.x == 0 && !FAULT) init_barrier(&barrier);
    __syncthreads();
    if (threadIdx.x == 0) expect_bytes(&barrier, 0);
    wait_barrier(&barrier, 0);
    out[threadIdx.x] = in[threadIdx.x];
}

// ---- accesses --------------------------------------------------------------------------------------------------------

KERNEL misaligned_load(const int* in, int* out) {
    const uint4 four = *reinterpret_cast<const uint4*>(in + (FAULT ? 2 : 4) * (threadIdx.x / 4));
    const u32 words[4] = {four.x, four.y, four.z, four.w};
    out[threadIdx.x] = int(words[threadIdx.x % 4]);
}

KERNEL misaligned_copy(const int* in, int* out) {
    __shared__ __align__(16) int values[72];
    copy_16_bytes(values + (FAULT ? 2 : 4) * (threadIdx.x / 4), in + 4 * (threadIdx.x / 4));
    wait_copies();
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

KERNEL index_beyond_the_array(const int* in, int* out) {
    __shared__ int values[64];
    values[threadIdx.x + (FAULT ? 1 : 0)] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

KERNEL memory_that_is_none(const int* in, int* out) {
    __syncwarp();
    out[threadIdx.x] = in[threadIdx.x + (FAULT ? i64(1) << 40 : 0)];
}
