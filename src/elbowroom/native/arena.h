// CPU memory for blocks of some size, in few pages: what is mapped stays close to what is live.
//
//   request --> is a free segment with pages large enough?
//                 | yes: the smallest          | no
//                 |                            v
//                 |        the largest one that can grow over free addresses beside it gets the pages that are missing;
//                 |        where that maps more than the limit, other free segments give pages back, the largest first
//                 v                            v
//     |live|mapped|live|..unmapped..|live|mapped|..unmapped..
//
// Blocks are mapped when they are handed out, and what is free and unmapped has no pages. So the mapped bytes are an
// upper bound of the resident ones whatever the kernel does (huge pages included), and are equal to them if every block
// is written to. Limits on data and on address space count just these bytes: nothing is reserved ahead. Pages are
// unmapped (and not marked by MADV_FREE, which leaves them resident until the kernel needs them).
//
// The limit is the highest live bytes so far and a sixty-fourth of them, at least 1 MiB. It never refuses a request:
// holes between blocks cost page faults, not memory, except for the pages that a block shares with a hole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "pages.h"
#include "segments.h"

namespace elbowroom {

struct ArenaStatistics {
  size_t live_bytes;         // of the blocks, each rounded up to the alignment
  size_t live_peak_bytes;
  size_t mapped_bytes;       // live ones and free ones, in whole pages
  size_t mapped_peak_bytes;  // when a request was done
  size_t limit_bytes;        // of `mapped_bytes`, now
  size_t blocks;
  // Counted from the beginning:
  size_t requests;           // served
  size_t reused;             // of these: from pages that were mapped
  size_t failed;             // not served
  size_t newly_mapped_bytes;
  size_t given_back_bytes;
};

class Arena {
 public:
  static constexpr size_t ALIGNMENT = 64;  // PyTorch's

  Arena();
  ~Arena();  // unmaps all, live blocks too
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The one of this process, which survives forks. It is never destroyed: blocks may outlive everything else.
  static Arena& get();

  // A block at a multiple of the alignment. Null for no bytes, and if the kernel gives no memory.
  void* allocate(size_t nbytes);

  // Returns false, and does nothing, if no block begins there.
  bool free(void* address);

  // Whether a block begins there.
  bool owns(const void* address) const;

  // Live bytes of the past count for no more than this towards the limit, and pages beyond it are given back.
  void forget_peak(size_t nbytes);

  // Give free pages back, the largest segments first, until at most so many free bytes are mapped. Returns the bytes.
  size_t trim(size_t keep_bytes);

  void reset_peaks();
  ArenaStatistics get_statistics() const;

  // What the kernel says of the mapped bytes. Cost: linear in the pages.
  size_t count_resident_bytes() const;

  // For tests: all segments, and which rule they break (null: none).
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
  uintptr_t begin_ = 0;  // of the addresses that blocks have; 0 if there are none
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
