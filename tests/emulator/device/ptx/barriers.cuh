// See plugins/cuda/ptx/barriers.cuh.
#pragma once
#include "runtime.h"

inline void sync_threads(int barrier, int threads, PLACE) { emulator::sync_block(barrier, threads, false, place); }
inline void arrive_threads(int barrier, int threads, PLACE) { emulator::arrive_block(barrier, threads, place); }
