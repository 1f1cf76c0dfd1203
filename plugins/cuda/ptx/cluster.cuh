// Blocks of a cluster.
#pragma once
#include "ptx/memory.cuh"

// Waits for the cluster's blocks, and for what they have stored.
__device__ __forceinline__ void wait_cluster() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// What block number `block` of the cluster has in shared memory where this one has `own`. That block must neither have stored it since
// the cluster last waited, nor have ended.
__device__ __forceinline__ float load_of_block(const float* own, u32 block) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(block));
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}
