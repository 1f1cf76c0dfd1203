// See plugins/cuda/ptx/cluster.cuh.
#pragma once
#include "runtime.h"

inline void wait_cluster(PLACE) { emulator::sync_cluster(place); }
inline float load_of_block(const float* own, u32 block, PLACE) {
    return *static_cast<const float*>(emulator::shared_of_block(own, sizeof(float), block, place));
}
