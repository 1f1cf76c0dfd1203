// Copies that complete later than they are asked for: as late as the program allows, or at once.
#include <string.h>

#include "scheduler.h"

namespace emulator {

namespace {

// What lies in shared memory where a barrier is.
u64 mark_of(const u64* barrier) { return 0x6d62617272696572u ^ reinterpret_cast<u64>(barrier); }

// A copy of which nothing is known but that it will come.
void begin_copy(const Copy& copy) {
    if (launch->late) memset(copy.to, 0xff, copy.bytes);
}

void make_copy(const Copy& copy) {
    if (copy.from)
        memcpy(copy.to, copy.from, copy.bytes);
    else
        memset(copy.to, 0, copy.bytes);
}

// ---- barriers in shared memory ---------------------------------------------------------------------------------------

Mbarrier& known(u64* barrier, Place place) {
    const auto found = block->mbarriers.find(barrier);
    if (found == block->mbarriers.end()) fail(place, "nobody has initialised the barrier at %p", static_cast<void*>(barrier));
    if (*barrier != mark_of(barrier)) fail(place, "the barrier at %p has been overwritten", static_cast<void*>(barrier));
    return found->second;
}

void end_phase_if_complete(Mbarrier& of) {
    if (of.pending || of.bytes) return;
    of.parity ^= 1, of.pending = 1;
    auto waiting = std::move(of.waiting);
    of.waiting.clear();
    for (auto& [other, parity] : waiting) {
        if (parity != of.parity)
            make_ready(other);
        else
            of.waiting.emplace_back(other, parity);
    }
}

void complete(const Copy& copy) {
    make_copy(copy);
    Mbarrier& on = known(copy.barrier, copy.place);
    on.bytes -= copy.bytes;
    end_phase_if_complete(on);
}

}  // namespace

// ---- cp.async --------------------------------------------------------------------------------------------------------

void copy_16(void* to, const void* from, bool present, Place place) {
    check_shared(to, 16, place);
    check_aligned(to, 16, place), check_aligned(from, 16, place);
    const Copy copy{to, present ? from : nullptr, 16, nullptr, place};
    begin_copy(copy);
    if (launch->late)
        fiber->copies.push_back(copy);
    else
        make_copy(copy);
}

void commit_copies() { fiber->groups.push_back(fiber->copies.size()); }

void wait_copy_groups(int newest) {
    const size_t done = fiber->groups.size() > size_t(newest) ? fiber->groups.size() - size_t(newest) : 0;
    if (!done) return;
    const size_t made = fiber->groups[done - 1];
    for (size_t i = 0; i < made; ++i) make_copy(fiber->copies[i]);
    fiber->copies.erase(fiber->copies.begin(), fiber->copies.begin() + long(made));
    fiber->groups.erase(fiber->groups.begin(), fiber->groups.begin() + long(done));
    for (size_t& group : fiber->groups) group -= made;
}

void check_copies_of_thread() {
    if (!fiber->copies.empty()) fail(fiber->copies[0].place, "the thread ends before it has waited for this copy");
}

// ---- cp.async.bulk ---------------------------------------------------------------------------------------------------

void mbarrier_init(u64* barrier, Place place) {
    check_shared(barrier, 8, place), check_aligned(barrier, 8, place);
    block->mbarriers[barrier] = {};
    *barrier = mark_of(barrier);
}

void mbarrier_publish() {
    for (auto& [address, own] : block->mbarriers) own.published = true;
}

void mbarrier_expect(u64* barrier, u32 bytes, Place place) {
    Mbarrier& own = known(barrier, place);
    if (!own.pending) fail(place, "more arrivals than the barrier's phase has");
    --own.pending, own.bytes += bytes;
    end_phase_if_complete(own);
}

void mbarrier_wait(u64* barrier, u32 parity, Place place) {
    if (parity > 1) fail(place, "a parity of %u", parity);
    Mbarrier& own = known(barrier, place);
    if (own.parity != parity) return;
    own.waiting.emplace_back(fiber, parity);
    wait("a barrier in shared memory", place);
}

void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier, Place place) {
    check_shared(to, bytes, place);
    check_aligned(to, 16, place), check_aligned(from, 16, place);
    if (bytes % 16) fail(place, "a bulk copy of %u bytes", bytes);
    if (!known(barrier, place).published) fail(place, "the copy's barrier has not been made visible to the copy engine");
    const Copy copy{to, from, bytes, barrier, place};
    begin_copy(copy);
    if (launch->late)
        block->copies.push_back(copy);
    else
        complete(copy);
}

bool make_awaited_copy(Block& of) {
    for (size_t i = 0; i < of.copies.size(); ++i) {
        const Copy copy = of.copies[i];
        if (of.mbarriers[copy.barrier].waiting.empty()) continue;
        of.copies.erase(of.copies.begin() + long(i));
        complete(copy);
        return true;
    }
    return false;
}

}  // namespace emulator
