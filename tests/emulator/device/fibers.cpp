// The threads of a block as fibers of one thread of the host, and the order in which they run.
#include <sys/mman.h>
#include <ucontext.h>

#include "scheduler.h"

namespace emulator {

Dim3 thread_index;
Fiber* fiber;

namespace {

constexpr size_t PAGE = 4096, STACK = 64 * PAGE;

jmp_buf scheduler;
u64 random_state;
void (*run_thread)(void*);
void* arguments;

void fiber_main() {
    while (true) {
        run_thread(arguments);
        end_thread();
    }
}

// Runs the next ready fiber, or returns to the scheduler when there is none.
[[noreturn]] void run_next() {
    if (!block->ready) _longjmp(scheduler, 1);
    const int w = pick(block->ready);
    Warp& warp = block->warps[w];
    const int lane = pick(warp.ready);
    warp.ready &= ~(1u << lane);
    if (!warp.ready) block->ready &= ~(1u << w);
    fiber = block->fibers[32 * w + lane];
    thread_index = {u32(fiber->thread), 0, 0};
    if (fiber->begun) _longjmp(fiber->context, 1);

    // The stack's lowest page must not be touched. Tops differ in their cache lines.
    fiber->begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber->stack;
    context.uc_stack.ss_size = STACK - size_t(fiber->thread) % 64 * 64;
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
    setcontext(&context);
    __builtin_unreachable();
}

}  // namespace

void suspend() {
    if (!_setjmp(fiber->context)) run_next();
}

void wait(const char* name, Place place) {
    fiber->waits_for = name, fiber->place = place;
    suspend();
    fiber->waits_for = nullptr;
}

void make_ready(Fiber* other) {
    other->warp().ready |= other->lane_bit();
    other->block->ready |= 1u << other->thread / 32;
}

Fiber* make_fiber() {
    Fiber* own = new Fiber;
    // Below the stack lies a page that must not be touched. With it, their number is odd: stacks do not meet in one cache set.
    own->stack = static_cast<char*>(map_memory(STACK + PAGE)) + PAGE;
    mprotect(own->stack - PAGE, PAGE, PROT_NONE);
    return own;
}

void set_thread(void (*thread)(void*), void* values, u64 seed) {
    run_thread = thread, arguments = values, random_state = seed * 2 + 1;
}

void run_until_rest() {
    while (block->ready)
        if (!_setjmp(scheduler)) run_next();
}

// ---- order -----------------------------------------------------------------------------------------------------------

u32 random_below(u32 n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return u32((random_state >> 33) * n >> 31);
}

int pick(u32 bits) {
    if (launch->order == FORWARD) return __builtin_ctz(bits);
    if (launch->order == BACKWARD) return 31 - __builtin_clz(bits);
    for (u32 skipped = random_below(u32(__builtin_popcount(bits))); skipped; --skipped) bits &= bits - 1;
    return __builtin_ctz(bits);
}

}  // namespace emulator
