// Values of which the compiler knows nothing, at no cost: what follows from them is computed where it is used, instead of once
// before all loops, in registers that the state needs.
#pragma once
#include "integers.cuh"

__device__ __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}
__device__ __forceinline__ u16 opaque_16_bits(u16 value) {
    asm volatile("" : "+h"(value));
    return value;
}
// Of an address: it stays in two registers, and what is added to it is added in bytes.
template <typename T>
__device__ __forceinline__ T* opaque(T* address) {
    asm volatile("" : "+l"(address));
    return address;
}
