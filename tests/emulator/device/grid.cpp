// Blocks and clusters, one after the other; shared memory; errors.
//
// Blocks are taken up one cluster after the other; of a cluster, one block runs until all of its threads wait for the cluster
// or have ended. So the order between two barriers is fully known: forward, backward, or random by a seed.
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "scheduler.h"

namespace emulator {

Dim3 block_index, block_dim, grid_dim;
Launch* launch;
Block* block;

namespace {

constexpr size_t PAGE = 4096, MOST_DYNAMIC = 256 * 1024;

std::vector<Fiber*> fibers;  // made once, and used again by every block
std::vector<Block>* cluster;  // whose blocks run
sigjmp_buf launcher;

size_t static_shared() { return size_t(launch->shared_end - launch->shared); }

// Ends at a page that must not be touched.
char* dynamic_memory() {
    static char* const memory = [] {
        char* found = static_cast<char*>(map_memory(MOST_DYNAMIC + PAGE));
        mprotect(found + MOST_DYNAMIC, PAGE, PROT_NONE);
        return found;
    }();
    return memory + MOST_DYNAMIC - (launch->dynamic_shared + 127) / 128 * 128;
}

void begin(Block& to, Dim3 index, int first_fiber) {
    to.index = index;
    to.alive = launch->block_threads;
    for (int i = 0; i < to.alive; ++i) {
        if (first_fiber + i == int(fibers.size())) fibers.push_back(make_fiber());
        Fiber* own = fibers[first_fiber + i];
        own->block = &to, own->thread = i, own->waits_for = nullptr, own->place = {};
        own->copies.clear(), own->groups.clear();
        to.fibers.push_back(own);
        own->warp().alive |= own->lane_bit();
        make_ready(own);
    }
    to.shared.assign(static_shared() + launch->dynamic_shared, char(0xff));  // NaN
}

void exchange_shared(Block& with, bool in) {
    char* parts[2] = {launch->shared, dynamic_memory()};
    const size_t sizes[2] = {static_shared(), size_t(launch->dynamic_shared)};
    char* saved = with.shared.data();
    for (int i = 0; i < 2; saved += sizes[i++]) memcpy(in ? parts[i] : saved, in ? saved : parts[i], sizes[i]);
}

// Until none of its threads can go on.
void run(Block& next) {
    block = &next, block_index = next.index;
    exchange_shared(next, true);
    do run_until_rest();
    while (make_awaited_copy(next));
    exchange_shared(next, false);
    if (next.alive == 0 && !next.copies.empty()) {
        fiber = next.fibers[0];
        fail(next.copies[0].place, "the block ends before it has waited for this copy");
    }
}

const char* name_of(const char* path) {
    const char* slash = strrchr(path ? path : "?", '/');
    return slash ? slash + 1 : path ? path : "?";
}

[[noreturn]] void report_deadlock(const Block& stuck) {
    char text[400];
    int length = 0;
    const Fiber* last = nullptr;
    for (Fiber* own : stuck.fibers) {
        if (!own->waits_for) continue;
        const bool told = last && own->place.line == last->place.line && own->waits_for == last->waits_for;
        if (!told && length < 300)
            length += snprintf(text + length, sizeof(text) - length, "%s%d at %s:%d for %s", last ? ", " : "", own->thread,
                               name_of(own->place.file), own->place.line, own->waits_for);
        if (!last) fiber = own;
        last = own;
    }
    fail(fiber->place, "no thread can go on; there wait, of %d: %s", stuck.alive, text);
}

void run_cluster(Dim3 first) {
    const int count = launch->cluster_blocks;
    std::vector<Block> blocks(count);
    cluster = &blocks;
    for (int i = 0; i < count; ++i) begin(blocks[i], {first.x + i, first.y, first.z}, i * launch->block_threads);
    while (true) {
        for (u32 left = (1u << count) - 1; left;) {
            const int next = pick(left);
            left &= ~(1u << next);
            run(blocks[next]);
        }
        int alive = 0;
        for (Block& own : blocks) {
            alive += own.alive;
            if (own.alive != int(own.at_cluster.size())) block = &own, report_deadlock(own);
        }
        if (!alive) return;
        for (Block& own : blocks) {
            for (Fiber* waiting : own.at_cluster) make_ready(waiting);
            own.at_cluster.clear();
        }
    }
}

// Makes errors of signals while a kernel runs.
class Signals {
  public:
    Signals() {
        static char memory[64 * 1024];  // a fiber may have used up its stack
        stack_t own = {};
        own.ss_sp = memory, own.ss_size = sizeof(memory);
        sigaltstack(&own, &stack);
        struct sigaction handler = {};
        handler.sa_sigaction = fail_at, handler.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < COUNT; ++i) sigaction(NUMBERS[i], &handler, &before[i]);
    }
    ~Signals() {
        for (int i = 0; i < COUNT; ++i) sigaction(NUMBERS[i], &before[i], nullptr);
        sigaltstack(&stack, nullptr);
    }

  private:
    static constexpr int COUNT = 3, NUMBERS[COUNT] = {SIGSEGV, SIGBUS, SIGFPE};
    stack_t stack;
    struct sigaction before[COUNT];

    static void fail_at(int number, siginfo_t* information, void*) {
        if (number == SIGFPE) fail(fiber->place, "a division by zero, behind this place");
        fail(fiber->place, "an access to %p, which is no memory, behind this place", information->si_addr);
    }
};

// Of the launch, in its order.
void run_clusters() {
    const Dim3 grid = launch->grid;
    const u32 along = u32(launch->cluster_blocks), width = grid.x / along, clusters = width * grid.y * grid.z;
    std::vector<u32> order;
    for (u32 i = 0; i < clusters; ++i) order.push_back(launch->order == BACKWARD ? clusters - 1 - i : i);
    for (u32 i = clusters; i > 1 && launch->order == RANDOM; --i) std::swap(order[i - 1], order[random_below(i)]);
    for (const u32 i : order) run_cluster({i % width * along, i / width % grid.y, i / width / grid.y});
}

}  // namespace

// ---- memory ----------------------------------------------------------------------------------------------------------

void* map_memory(size_t bytes) {
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? nullptr : found;
}

void* dynamic_shared() { return dynamic_memory(); }

void check_aligned(const void* at, u32 bytes, Place place) {
    if (reinterpret_cast<size_t>(at) % bytes) fail(place, "an access of %u bytes to %p", bytes, at);
}

void check_shared(const void* at, u32 bytes, Place place) {
    const char *first = static_cast<const char*>(at), *last = first + bytes, *dynamic = dynamic_memory();
    const bool inside = (first >= launch->shared && last <= launch->shared_end) ||
                        (first >= dynamic && last <= dynamic + launch->dynamic_shared);
    if (!inside) fail(place, "%p is not in shared memory", at);
}

const void* shared_of_block(const void* own, u32 bytes, u32 number, Place place) {
    check_shared(own, bytes, place);
    if (number >= cluster->size()) fail(place, "the cluster has no block %u", number);
    const Block& other = (*cluster)[number];
    if (&other == block) return own;
    if (!other.alive) fail(place, "block %u of the cluster, whose shared memory is read, has ended", number);
    const char* at = static_cast<const char*>(own);
    const bool is_static = at >= launch->shared && at < launch->shared_end;
    return other.shared.data() + (is_static ? size_t(at - launch->shared) : static_shared() + size_t(at - dynamic_memory()));
}

// ---- errors ----------------------------------------------------------------------------------------------------------

void fail(Place place, const char* format, ...) {
    const Dim3 at = block_index;
    const int length = snprintf(launch->message, sizeof(launch->message), "block (%u, %u, %u), thread %d, %s:%d: ", at.x, at.y,
                                at.z, fiber->thread, name_of(place.file), place.line);
    va_list values;
    va_start(values, format);
    vsnprintf(launch->message + length, sizeof(launch->message) - length, format, values);
    va_end(values);
    siglongjmp(launcher, 1);
}

// ---- launches --------------------------------------------------------------------------------------------------------

bool run_grid(Launch& of, void (*thread)(void*), void* values) {
    if (of.grid.x % u32(of.cluster_blocks)) {
        snprintf(of.message, sizeof(of.message), "%u blocks do not make clusters of %d", of.grid.x, of.cluster_blocks);
        return false;
    }
    launch = &of;
    set_thread(thread, values, of.seed);
    block_dim = {u32(of.block_threads), 1, 1}, grid_dim = of.grid;
    const Signals signals;
    const bool well = !sigsetjmp(launcher, 0);
    if (well)
        run_clusters();
    else
        for (Fiber* own : fibers) own->begun = false;
    return well;
}

}  // namespace emulator
