// Private anonymous pages at chosen addresses.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elbowroom {

enum class Mapping { DONE, TAKEN, REFUSED };

size_t get_page_bytes();

// Finds an unused address range, far from where the kernel places mappings. Only its first page is mapped, without
// access, so that the next call finds another range: limits on address space and on data count mapped pages, used or
// not. Returns 0 if there is none.
uintptr_t find_addresses(size_t nbytes);

// Maps zeroed pages. TAKEN: another mapping is there. REFUSED: a limit was reached, or the machine is out of memory.
Mapping map_pages(uintptr_t begin, size_t nbytes);

// Unmaps pages, which lowers resident memory at once. Returns whether it succeeded.
bool unmap_pages(uintptr_t begin, size_t nbytes);

// Gives the whole pages of a part of a mapped file back to the system: they have the file's contents again when they are
// read.
void discard_pages(uintptr_t begin, size_t nbytes);

// Returns malloc's free pages to the system. Returns whether there were any.
bool trim_heap();

// Resident bytes of mapped pages. Cost: linear in the pages.
size_t count_resident_bytes(uintptr_t begin, size_t nbytes);

}  // namespace elbowroom
