// Allocator of larger CPU blocks that keeps the mapped bytes close to the live bytes.
//
//   request --> is a free mapped segment large enough?
//                 | yes: the smallest          | no
//                 |                            v
//                 |        map the missing pages of the largest free segment that can grow into unmapped neighbours;
//                 |        above the limit, unmap pages of other free segments, the largest first
//                 v                            v
//     |live|mapped|live|..unmapped..|live|mapped|..unmapped..
//
// Blocks are always mapped, and unmapped segments have no pages. So the mapped bytes are an upper bound of the resident
// bytes (huge pages included), and are equal to them if every block is written to. Limits on data and on address space
// count exactly these bytes: nothing is reserved ahead. Pages are unmapped, not marked by MADV_FREE, which leaves them
// resident until the kernel needs them.
//
// The limit is the peak of live bytes so far plus a sixty-fourth of it, at least 1 MiB. It never refuses a request:
// holes between blocks cost page faults, not memory, except for pages that a block shares with a hole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "pages.h"
#include "segments.h"

namespace elbowroom {

struct ArenaStatistics {
  size_t live_bytes;         // blocks, each rounded up to the alignment
  size_t live_peak_bytes;
  size_t mapped_bytes;       // live and free, in whole pages
  size_t mapped_peak_bytes;  // at the end of a request
  size_t limit_bytes;        // current limit of `mapped_bytes`
  size_t blocks;
  // Totals:
  size_t requests;           // requests served
  size_t reused;             // of these, served from mapped pages
  size_t failed;             // requests not served
  size_t newly_mapped_bytes;
  size_t given_back_bytes;
};

class Arena {
 public:
  static constexpr size_t ALIGNMENT = 64;  // PyTorch's

  Arena();
  ~Arena();  // unmaps everything, including live blocks
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The arena of this process, which works after a fork. Never destroyed, since blocks may outlive other statics.
  static Arena& get();

  // Returns an aligned block; null for 0 bytes, or if the kernel refuses memory.
  void* allocate(size_t nbytes);

  // Returns false, without effect, if no block begins at the address.
  bool free(void* address);

  // Returns whether a block begins at the address.
  bool owns(const void* address) const;

  // Lowers the peak that sets the limit to at most `nbytes`, and unmaps pages beyond the new limit.
  void forget_peak(size_t nbytes);

  // Unmaps free pages, the largest segments first, until at most `keep_bytes` free bytes are mapped. Returns the bytes.
  size_t trim(size_t keep_bytes);

  void reset_peaks();
  ArenaStatistics get_statistics() const;

  // Resident bytes according to the kernel. Cost: linear in the pages.
  size_t count_resident_bytes() const;

  // For tests: all segments, and the invariant that they violate (null if none).
  std::vector<Segment> list_segments() const;
  const char* check() const;

 private:
  // arena.cpp
  void* hand_out(Segment* segment, size_t nbytes);
  Segment* grow(size_t nbytes);
  Segment* find_growing(size_t nbytes) const;
  bool find_room(size_t nbytes, size_t tries);
  size_t find_limit() const;
  size_t give_back(size_t most_mapped_bytes);

  // arena_segments.cpp
  SegmentTree<SizeOrder>& find_tree(const Segment& segment);
  Segment* find_segment(uintptr_t address) const;
  Segment* add_after(Segment* segment, uintptr_t begin, size_t nbytes);
  Segment* cut(Segment* segment, uintptr_t begin, size_t nbytes);
  Segment* settle(Segment* segment, State state);
  void merge(Segment* segment, Segment* after);
  Mapping map_part(Segment*& segment, uintptr_t begin, size_t nbytes);
  Mapping extend(Segment*& segment, size_t nbytes);
  size_t give_back_part(Segment* segment, size_t nbytes);

  const size_t page_bytes_;
  uintptr_t begin_ = 0;  // of the address range; 0 if none was found
  uintptr_t end_ = 0;

  mutable std::mutex mutex_;
  SegmentPool pool_;
  Segment* first_ = nullptr;
  SegmentTree<AddressOrder> segments_;
  SegmentTree<SizeOrder> mapped_;
  SegmentTree<SizeOrder> unmapped_;
  size_t highest_live_bytes_ = 0;
  ArenaStatistics counts_{};
};

}  // namespace elbowroom
