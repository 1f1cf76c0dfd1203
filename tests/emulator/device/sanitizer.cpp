// What the compiler's checks call (-fsanitize=alignment,bounds): the launch ends with the place.
#include <stddef.h>

#include "runtime.h"

namespace {

struct SourceLocation {
    const char* file;
    u32 line, column;
};
struct Type {
    u16 kind, information;
    char name[1];
};
struct Mismatch {
    SourceLocation location;
    const Type* type;
    u8 log_alignment, kind;
};
struct Bounds {
    SourceLocation location;
    const Type *array, *index;
};

}  // namespace

extern "C" {
void __ubsan_handle_type_mismatch_v1_abort(Mismatch* found, size_t address) {
    emulator::fail({found->location.file, int(found->location.line)}, "an access to %s at %p: its alignment is %u",
                   found->type->name, reinterpret_cast<void*>(address), 1u << found->log_alignment);
}
void __ubsan_handle_out_of_bounds_abort(Bounds* found, size_t index) {
    emulator::fail({found->location.file, int(found->location.line)}, "index %ld of %s", long(index), found->array->name);
}
}
