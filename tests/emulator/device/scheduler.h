// The emulator's records of what runs.
#pragma once
#include <setjmp.h>

#include <map>
#include <vector>

#include "launch.h"

namespace emulator {

struct Copy {
    void* to;
    const void* from;
    u32 bytes;
    u64* barrier;
    Place place;
};

struct Block;
struct Warp;

struct Fiber {
    char* stack = nullptr;
    bool begun = false;  // whether `context` is set
    jmp_buf context;
    Block* block;
    int thread;

    // What it waits for.
    const char* waits_for;
    Place place;
    Collective apply;
    u32 mask;
    void* operands;
    int votes;

    // Copies of its own: those of the first `groups[0]`, then of the next, are groups; those behind belong to none yet.
    std::vector<Copy> copies;
    std::vector<size_t> groups;

    Warp& warp() const;
    u32 lane_bit() const { return 1u << thread % 32; }
};

struct Warp {
    u32 alive, ready, collecting;  // lanes
    // Of those in collectives: what the first has come to, and whether all have come to the same.
    Collective apply;
    u32 mask;
    bool alike;
};

struct Barrier {
    int threads = 0, arrived = 0, votes = 0;
    u32 lanes[32] = {};  // that have arrived, of each warp
    std::vector<Fiber*> waiting;
};

struct Mbarrier {
    bool published = false;
    int pending = 1;  // arrivals of this phase
    i64 bytes = 0;    // expected, less those that have come
    u32 parity = 0;
    std::vector<std::pair<Fiber*, u32>> waiting;
};

struct Block {
    Dim3 index;
    std::vector<Fiber*> fibers;
    Warp warps[32];
    u32 ready;  // warps with a lane that is
    int alive;
    std::vector<Fiber*> at_cluster;
    Barrier barriers[16];
    std::map<u64*, Mbarrier> mbarriers;
    std::vector<Copy> copies;  // bulk copies that have not been made
    std::vector<char> shared;  // while another block of the cluster runs
};

inline Warp& Fiber::warp() const { return block->warps[thread / 32]; }

extern Launch* launch;
extern Fiber* fiber;  // that runs
extern Block* block;  // that it is of

// ---- fibers.cpp ------------------------------------------------------------------------------------------------------

Fiber* make_fiber();
// What all threads run, and the seed of a random order.
void set_thread(void (*thread)(void*), void* values, u64 seed);
// Runs the block's threads until none is ready.
void run_until_rest();
void make_ready(Fiber* other);
// Lets others run until the fiber is made ready again.
void suspend();
void wait(const char* name, Place place);
// One of the bits, in the order of the launch.
int pick(u32 bits);
u32 random_below(u32 n);

// ---- the others ------------------------------------------------------------------------------------------------------

// Called by the fiber.
void end_thread();
void check_copies_of_thread();
// Makes a copy that a block at rest waits for: whether there was any.
bool make_awaited_copy(Block& block);
void* map_memory(size_t bytes);

}  // namespace emulator
