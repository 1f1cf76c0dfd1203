// What racecheck says of barriers to which warps come from different instructions, as those of the delta rule's prefills do:
//
//     nvcc -arch=sm_90a -o roles tests/gpu/roles.cu && compute-sanitizer --tool racecheck ./roles
//
// The program is right: a barrier stands between every write and another warp's read of it, and what is read is counted if it is wrong.
// What compute-sanitizer of CUDA 13.0 said of it on an H200 is in docs/performance.md, "State of the code".
#include <cstdio>

constexpr int THREADS = 128, TURNS = 20;

__device__ void sync(int barrier, int threads) { asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
__device__ void arrive(int barrier, int threads) { asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// The first warp makes something for the second, which makes something of it for the others, a turn ahead.
__global__ void roles(int* wrong) {
    __shared__ int first[32], second[2][32];
    const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0), lane = threadIdx.x % 32;
    int found = 0;
    if (warp == 0) {
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
            first[lane] = turn + lane;
            __syncwarp();
            arrive(2, 64);
            sync(1, THREADS);
        }
    } else if (warp == 1) {
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
            sync(2, 64);
            second[turn % 2][lane] = 2 * first[31 - lane];
            sync(1, THREADS);
        }
    } else {
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
            sync(1, THREADS);
            found += second[turn % 2][lane] != 2 * (turn + 31 - lane);
        }
    }
    atomicAdd(wrong, found);
}

int main() {
    int *wrong, found = 0;
    cudaMalloc(&wrong, sizeof(int));
    cudaMemset(wrong, 0, sizeof(int));
    roles<<<96, THREADS>>>(wrong);
    const cudaError_t error = cudaMemcpy(&found, wrong, sizeof(int), cudaMemcpyDeviceToHost);
    printf("%d wrong, %s\n", found, cudaGetErrorString(error));
    return error != cudaSuccess || found != 0;
}
