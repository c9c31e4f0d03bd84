// Pages of private memory at addresses of our own choice.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elbowroom {

enum class Mapping { DONE, TAKEN, REFUSED };

size_t get_page_bytes();

// A stretch of addresses that nobody uses, far away from where the kernel places mappings by itself. Nothing but its
// first page is mapped, without access, so that the next call finds another one: limits on address space and on data
// count mapped pages, used or not. Returns 0 if there is none.
uintptr_t find_addresses(size_t nbytes);

// Map pages of zeros. TAKEN: something else is there. REFUSED: a limit, or the machine is out of memory.
Mapping map_pages(uintptr_t begin, size_t nbytes);

// Give pages back. What the process has resident goes down at once. Returns whether the kernel did it.
bool unmap_pages(uintptr_t begin, size_t nbytes);

// Give back the pages of what malloc keeps free. Returns whether there were any.
bool trim_heap();

// Bytes of mapped pages that are in memory. Cost: linear in the pages.
size_t count_resident_bytes(uintptr_t begin, size_t nbytes);

}  // namespace elbowroom
