#include "pages.h"

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace elbowroom {

namespace {

constexpr int MOST_MAPPINGS = 64;

void* to_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

Mapping map(uintptr_t begin, size_t nbytes, int protection) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
  void* const found = mmap(to_pointer(begin), nbytes, protection, flags, -1, 0);
  if (found == to_pointer(begin)) return Mapping::DONE;
  if (found == MAP_FAILED) return errno == EEXIST ? Mapping::TAKEN : Mapping::REFUSED;
  munmap(found, nbytes);  // kernels before 4.17 treat the address as a hint
  return Mapping::TAKEN;
}

}  // namespace

size_t get_page_bytes() {
  static const auto nbytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return nbytes;
}

uintptr_t find_addresses(size_t nbytes) {
  // The kernel places mappings from the top down, and programs at two thirds: the middle is unused. Addresses are
  // multiples of the size; otherwise a second arena could begin before the first one's mark and overlap it.
  void* const top = mmap(nullptr, get_page_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (top == MAP_FAILED) return 0;
  munmap(top, get_page_bytes());
  uintptr_t begin = reinterpret_cast<uintptr_t>(top) / 2 / nbytes * nbytes;
  for (int tries = 0; tries < MOST_MAPPINGS; ++tries, begin += nbytes) {
    const Mapping mapping = map(begin, get_page_bytes(), PROT_NONE);
    if (mapping == Mapping::DONE) return begin;
    if (mapping == Mapping::REFUSED) break;
  }
  return 0;
}

Mapping map_pages(uintptr_t begin, size_t nbytes) { return map(begin, nbytes, PROT_READ | PROT_WRITE); }

bool unmap_pages(uintptr_t begin, size_t nbytes) { return munmap(to_pointer(begin), nbytes) == 0; }

void discard_pages(uintptr_t begin, size_t nbytes) {
  const size_t page_bytes = get_page_bytes();
  const uintptr_t first = (begin + page_bytes - 1) / page_bytes * page_bytes;
  const uintptr_t end = (begin + nbytes) / page_bytes * page_bytes;
  if (first < end) madvise(to_pointer(first), end - first, MADV_DONTNEED);
}

bool trim_heap() {
#ifdef __GLIBC__
  return malloc_trim(0) != 0;
#else
  return false;
#endif
}

size_t count_resident_bytes(uintptr_t begin, size_t nbytes) {
  const size_t page_bytes = get_page_bytes();
  std::array<unsigned char, 4096> pages{};
  size_t count = 0;
  for (size_t done = 0; done < nbytes;) {
    const size_t part = std::min(nbytes - done, pages.size() * page_bytes);
    if (mincore(to_pointer(begin + done), part, pages.data()) != 0) return 0;
    const auto end = pages.begin() + static_cast<ptrdiff_t>(part / page_bytes);
    count += static_cast<size_t>(std::count_if(pages.begin(), end, [](unsigned char page) { return page & 1; }));
    done += part;
  }
  return count * page_bytes;
}

}  // namespace elbowroom
