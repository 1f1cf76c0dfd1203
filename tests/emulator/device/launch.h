// One launch of a kernel.
#pragma once
#include "runtime.h"

namespace emulator {

enum Order : int { FORWARD, BACKWARD, RANDOM };

// Laid out as in tests/emulator/launcher.py.
struct Launch {
    Dim3 grid;
    int block_threads, dynamic_shared;
    int cluster_blocks;         // along x
    int order;                  // of threads, of warps and of blocks
    int late;                   // whether copies complete as late, or as early, as the program allows
    u64 seed;                   // of Order::RANDOM
    char *shared, *shared_end;  // the block's static shared memory
    char message[512];          // why the launch failed
};

// Runs `thread(values)` in every thread of the grid. Returns whether all went well; otherwise there is a message.
bool run_grid(Launch& launch, void (*thread)(void*), void* values);

}  // namespace emulator
