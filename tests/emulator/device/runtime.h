// What an emulated kernel asks of the emulator. A thread is a fiber: it runs until it must wait for others.
#pragma once
#include <stddef.h>
#include <string.h>

#include "integers.cuh"

template <typename To, typename From>
inline To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof(y));
    return y;
}

namespace emulator {

// Where a kernel calls the emulator; of the caller, when it is a default argument.
struct Place {
    const char* file;
    int line;
};
#define PLACE ::emulator::Place place = {__builtin_FILE(), __builtin_LINE()}

struct Dim3 {
    u32 x, y, z;
};
// Of the thread that runs. The scheduler writes them.
extern Dim3 thread_index, block_index, block_dim, grid_dim;

// Ends the launch with an error that names the thread and the place.
[[noreturn]] void fail(Place place, const char* format, ...) __attribute__((format(printf, 2, 3)));

// An instruction of several lanes of a warp. `apply` has the operands of those in `mask`, and writes the results into them.
using Collective = void (*)(void* const (&operands)[32], u32 mask);
// Waits for the lanes in `mask`. Their operands come together when all of them have arrived at the same collective.
void collective(const char* name, Collective apply, u32 mask, void* operands, Place place);

// A barrier of the block. threads: 0 for all that have not ended. Returns how many of them came with a `vote`.
int sync_block(int barrier, int threads, bool vote, Place place);
void arrive_block(int barrier, int threads, Place place);
void sync_cluster(Place place);
// Where block number `number` of the cluster has what this one has at `own`.
const void* shared_of_block(const void* own, u32 bytes, u32 number, Place place);

void* dynamic_shared();

// Copies that complete on their own (cp.async).
void copy_16(void* to, const void* from, bool present, Place place);
void commit_copies();
void wait_copy_groups(int newest);

// Barriers in shared memory and the copies that complete on them (mbarrier, cp.async.bulk).
void mbarrier_init(u64* barrier, Place place);
void mbarrier_publish();
void mbarrier_expect(u64* barrier, u32 bytes, Place place);
void mbarrier_wait(u64* barrier, u32 parity, Place place);
void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier, Place place);

// An access of `bytes` bytes must be a multiple of them; one to shared memory must lie in it.
void check_aligned(const void* at, u32 bytes, Place place);
void check_shared(const void* at, u32 bytes, Place place);

// Matrix products and rearrangements of a warp; the operands' layouts are those of ptx/mma.cuh.
struct MatrixOperands {
    float* d;
    u32 a[4], b[2];
};
void multiply_bf16(void* const (&operands)[32], u32 mask);
void multiply_f16(void* const (&operands)[32], u32 mask);
void multiply_tf32(void* const (&operands)[32], u32 mask);
struct RowOperands {
    const void* row;
    u32 v[4];
    Place place;
};
void load_rows(void* const (&operands)[32], u32 mask);
void load_transposed_rows(void* const (&operands)[32], u32 mask);
void transpose(void* const (&operands)[32], u32 mask);

// Conversions that round to the nearest, and to even between two.
float from_f16(u16 x);
u16 to_f16(float x);
u16 to_bf16(float x);
u16 f16_of_e4m3(u8 code);
u8 to_e4m3(float x);
u16 f16_of_e2m1(u8 code);
u8 to_e2m1(float x);

}  // namespace emulator
