// Bulk copies and the barriers they complete on; see plugins/cuda/ptx/bulk_copy.cuh.
#pragma once
#include "runtime.h"

inline void init_barrier(u64* barrier, PLACE) { emulator::mbarrier_init(barrier, place); }
inline void publish_barriers() { emulator::mbarrier_publish(); }
inline void expect_bytes(u64* barrier, u32 bytes, PLACE) { emulator::mbarrier_expect(barrier, bytes, place); }
inline void wait_barrier(u64* barrier, u32 parity, PLACE) { emulator::mbarrier_wait(barrier, parity, place); }
inline void stream_to_shared(void* to, const void* from, u32 bytes, u64* barrier, PLACE) {
    emulator::copy_bulk(to, from, bytes, barrier, place);
}
inline void prefetch_bulk(const void* from, u32 bytes, PLACE) {
    emulator::check_aligned(from, 16, place);
    if (bytes % 16) emulator::fail(place, "a bulk prefetch of %u bytes", bytes);
}
inline void fence_async_proxy() {}
