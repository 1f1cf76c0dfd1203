// Barriers of some of a block's threads, and of the blocks of a cluster. Those of threads are not the aligned form, bar.sync, to which all
// come at one place: here warps have roles, and come from as many places.
#pragma once
#include "integers.cuh"

// Waits until `threads` threads have come to barrier number `barrier` of the block. Number 0 is that of __syncthreads.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Comes there without waiting.
__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Waits for the cluster's blocks, and for what they have stored.
__device__ __forceinline__ void wait_cluster() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// The same where all lanes of a warp are known to come together.
__device__ __forceinline__ void wait_cluster_aligned() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
