// Where threads wait for each other: barriers of a block and of a cluster, and instructions of a warp.
#include <string.h>

#include "scheduler.h"

namespace emulator {

namespace {

// ---- barriers of the block -------------------------------------------------------------------------------------------

// A warp comes to a barrier as a whole.
void check_warps(const Barrier& barrier, Place place) {
    for (int w = 0; w < 32; ++w)
        if (barrier.lanes[w] && block->warps[w].alive & ~barrier.lanes[w])
            fail(place, "only lanes %08x of warp %d have come to the barrier, %08x have not", barrier.lanes[w], w,
                 block->warps[w].alive & ~barrier.lanes[w]);
}

// A block comes to __syncthreads as a whole, and at one place.
void check_block(const Barrier& barrier, Place place) {
    const int ended = launch->block_threads - block->alive;
    if (ended) fail(place, "the block comes to __syncthreads without %d threads, which have ended", ended);
    for (const Fiber* waiting : barrier.waiting)
        if (waiting->place.line != place.line || strcmp(waiting->place.file, place.file))
            fail(place, "thread %d is at another __syncthreads (%s:%d)", waiting->thread, waiting->place.file, waiting->place.line);
}

void release_if_full(Barrier& barrier, Place place) {
    if (barrier.arrived < (barrier.threads ? barrier.threads : block->alive)) return;
    check_warps(barrier, place);
    if (!barrier.threads) check_block(barrier, place);
    for (Fiber* waiting : barrier.waiting) waiting->votes = barrier.votes, make_ready(waiting);
    barrier = {};
}

Barrier& arrive(int number, int threads, Place place) {
    if (number < 0 || number > 15) fail(place, "there is no barrier number %d", number);
    if (threads % 32) fail(place, "a barrier of %d threads: whole warps are needed", threads);
    Barrier& barrier = block->barriers[number];
    if (barrier.arrived && barrier.threads != threads)
        fail(place, "barrier %d is one of %d threads here and one of %d elsewhere", number, threads, barrier.threads);
    u32& lanes = barrier.lanes[fiber->thread / 32];
    if (lanes & fiber->lane_bit()) fail(place, "the thread comes to barrier %d again before it has opened", number);
    lanes |= fiber->lane_bit();
    barrier.threads = threads;
    ++barrier.arrived;
    return barrier;
}

}  // namespace

int sync_block(int number, int threads, bool vote, Place place) {
    Barrier& barrier = arrive(number, threads, place);
    barrier.votes += vote;
    barrier.waiting.push_back(fiber);
    fiber->place = place;
    release_if_full(barrier, place);
    wait("a barrier", place);
    return fiber->votes;
}

void arrive_block(int number, int threads, Place place) { release_if_full(arrive(number, threads, place), place); }

void sync_cluster(Place place) {
    block->at_cluster.push_back(fiber);
    wait("the cluster", place);
}

// ---- warps -----------------------------------------------------------------------------------------------------------

void collective(const char* name, Collective apply, u32 mask, void* operands, Place place) {
    Warp& warp = fiber->warp();
    Fiber* const* lanes = &block->fibers[fiber->thread / 32 * 32];
    const u32 own = fiber->lane_bit();
    if (!(mask & own)) fail(place, "%s with the mask %08x, without lane %d itself", name, mask, fiber->thread % 32);
    if (mask & ~warp.alive) fail(place, "%s waits for lanes %08x, which have ended or never were", name, mask & ~warp.alive);
    const auto same = [&](const auto& other) { return other.apply == apply && other.mask == mask; };
    if (!warp.collecting) warp.apply = apply, warp.mask = mask, warp.alike = true;
    warp.alike = warp.alike && same(warp);
    for (u32 others = warp.alike ? 0 : mask & warp.collecting; others; others &= others - 1) {
        const Fiber& other = *lanes[__builtin_ctz(others)];
        if (other.mask & own && !same(other))
            fail(place, "%s with the mask %08x, where lane %d is at %s with the mask %08x (line %d)", name, mask,
                 other.thread % 32, other.waits_for, other.mask, other.place.line);
    }
    fiber->apply = apply, fiber->mask = mask, fiber->operands = operands;
    warp.collecting |= own;
    bool complete = (warp.collecting & mask) == mask;
    void* all[32] = {};
    for (u32 left = complete ? mask : 0; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        // A lane in the mask may still be at a collective of fewer lanes, whose last one will come.
        if (!same(*lanes[lane])) complete = false;
        all[lane] = lanes[lane]->operands;
    }
    if (complete) {
        warp.collecting &= ~mask;
        apply(all, mask);
        for (u32 left = mask; left; left &= left - 1) make_ready(lanes[__builtin_ctz(left)]);
    }
    wait(name, place);
}

// ---- the end of a thread ---------------------------------------------------------------------------------------------

void end_thread() {
    check_copies_of_thread();
    Warp& warp = fiber->warp();
    warp.alive &= ~fiber->lane_bit();
    --block->alive;
    for (u32 others = warp.collecting; others; others &= others - 1) {
        const Fiber& other = *block->fibers[fiber->thread / 32 * 32 + __builtin_ctz(others)];
        if (other.mask & fiber->lane_bit())
            fail(other.place, "thread %d waits at %s for lane %d, which has ended", other.thread, other.waits_for,
                 fiber->thread % 32);
    }
    for (Barrier& barrier : block->barriers)
        if (barrier.arrived && !barrier.threads) release_if_full(barrier, barrier.waiting[0]->place);
    suspend();
}

}  // namespace emulator
