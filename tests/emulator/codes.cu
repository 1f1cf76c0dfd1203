// Parts of copy_codes.cuh, for tests that try all values.
#include "copy_codes.cuh"

#define KERNEL extern "C" __global__ void

// How many of all fractions of x have a refined inverse other than 1 / x, from an approximation so many units in the last place off.
KERNEL wrong_inverses(const int* off, int* wrong) {
    int count = 0;
    for (u32 fraction = threadIdx.x; fraction < 1u << 23; fraction += blockDim.x) {
        const float x = __uint_as_float(0x3f800000u | fraction), inverse = __fdiv_rn(1.0f, x);
        const float approximation = __uint_as_float(__float_as_uint(inverse) + u32(*off));
        count += refined_inverse(x, approximation) != inverse;
    }
    wrong[threadIdx.x] = count;
}
