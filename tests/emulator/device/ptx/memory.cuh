// Loads and stores with their alignment checked; see plugins/cuda/ptx/memory.cuh.
#pragma once
#include "runtime.h"

template <typename T>
inline T load_checked(const void* at, emulator::Place place) {
    emulator::check_aligned(at, sizeof(T), place);
    T v;
    memcpy(&v, at, sizeof(T));
    return v;
}
template <typename T>
inline void store_checked(void* at, T v, emulator::Place place) {
    emulator::check_aligned(at, sizeof(T), place);
    memcpy(at, &v, sizeof(T));
}

inline uint4 load_16_bytes(const void* at, PLACE) { return load_checked<uint4>(at, place); }
inline uint2 load_8_bytes(const void* at, PLACE) { return load_checked<uint2>(at, place); }
inline u32 load_4_bytes(const void* at, PLACE) { return load_checked<u32>(at, place); }
inline u16 load_2_bytes(const void* at, PLACE) { return load_checked<u16>(at, place); }
inline uint4 stream_16_bytes(const void* at, PLACE) { return load_checked<uint4>(at, place); }
inline uint2 stream_8_bytes(const void* at, PLACE) { return load_checked<uint2>(at, place); }
inline u32 stream_4_bytes(const void* at, PLACE) { return load_checked<u32>(at, place); }
inline void store_16_bytes(void* at, uint4 v, PLACE) { store_checked(at, v, place); }
inline void store_8_bytes(void* at, uint2 v, PLACE) { store_checked(at, v, place); }
inline void prefetch_line(const void*) {}

inline uint2 load_shared_8_bytes(const void* at, PLACE) {
    emulator::check_shared(at, sizeof(uint2), place);
    return load_checked<uint2>(at, place);
}
