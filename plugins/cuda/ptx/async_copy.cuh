// Copies from global to shared memory that pass no register and that threads do not wait for (cp.async).
#pragma once
#include "ptx/memory.cuh"

// 16 bytes. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_16_bytes(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// The same, or zeros where nothing is to be read.
__device__ __forceinline__ void copy_16_bytes(void* to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(present ? 16 : 0)
                 : "memory");
}

// Waits for all copies of this thread.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Ends a group of copies.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the newest N, or for all of its copies if N is 0.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
    if constexpr (N == 0)
        wait_copies();
    else
        asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
