// One kernel for the host. Macros: SOURCE, its file in quotes; SYMBOL, its name; and the kernel's own.
#include <utility>

#include "cuda.h"
#include "launch.h"

// The linker's names for the first byte of the block's shared memory (cuda.h), and for that behind its last.
extern char __bss_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));

#define __cluster_dims__(...)
namespace {
#include SOURCE

// Kernels of clusters give their size by this macro.
#undef __cluster_dims__
#define __cluster_dims__(x, y, z) *(x)
#ifndef HEAD_CLUSTER
#define HEAD_CLUSTER
#endif
constexpr int CLUSTER_BLOCKS = 1 HEAD_CLUSTER;

template <typename... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void** values, std::index_sequence<I...>) {
    kernel(*static_cast<Parameters*>(values[I])...);
}
template <typename... Parameters>
constexpr int count(void (*)(Parameters...)) {
    return sizeof...(Parameters);
}
}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED int parameters() { return count(SYMBOL); }

// values: the addresses of the parameters.
EXPORTED bool run_kernel(emulator::Launch* launch, void** values) {
    launch->cluster_blocks = CLUSTER_BLOCKS;
    launch->shared = __bss_start, launch->shared_end = _end;
    const auto thread = [](void* all) { call(SYMBOL, static_cast<void**>(all), std::make_index_sequence<count(SYMBOL)>()); };
    return emulator::run_grid(*launch, thread, values);
}
