// Barriers of some of a block's threads. Not the aligned form, bar.sync, to which all come at one place: here warps have roles, and
// come from as many places.
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
