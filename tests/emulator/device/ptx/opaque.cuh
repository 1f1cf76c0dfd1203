// Values of which the compiler knows nothing: without consequence here.
#pragma once

inline int opaque(int value) { return value; }
template <typename T>
inline T* opaque(T* address) {
    return address;
}
