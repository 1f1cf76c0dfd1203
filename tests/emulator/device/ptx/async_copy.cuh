// Copies that threads do not wait for; see plugins/cuda/ptx/async_copy.cuh.
#pragma once
#include "runtime.h"

inline void copy_16_bytes(void* to, const void* from, PLACE) { emulator::copy_16(to, from, true, place); }
inline void copy_16_bytes(void* to, const void* from, bool present, PLACE) { emulator::copy_16(to, from, present, place); }
inline void end_copies() { emulator::commit_copies(); }
template <int N>
inline void wait_for_copies() {
    if constexpr (N == 0) emulator::commit_copies();
    emulator::wait_copy_groups(N);
}
inline void wait_copies() {
    emulator::commit_copies();
    emulator::wait_copy_groups(0);
}
