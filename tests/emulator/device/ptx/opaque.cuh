// Values of which the compiler knows nothing: without consequence here.
#pragma once

inline int opaque(int value) { return value; }
inline unsigned short opaque_16_bits(unsigned short value) { return value; }
template <typename T>
inline T* opaque(T* address) {
    return address;
}
