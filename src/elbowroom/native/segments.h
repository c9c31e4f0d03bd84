// The arena's address range, divided into contiguous segments, and search trees of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elbowroom {

// LIVE: allocated. MAPPED: free, and its pages may be resident. UNMAPPED: free, without pages, and page-aligned. LOST:
// occupied by another mapping.
enum class State : uint8_t { LIVE, MAPPED, UNMAPPED, LOST };

struct Segment;

struct Children {
  Segment* left = nullptr;
  Segment* right = nullptr;
};

struct Segment {
  uintptr_t begin = 0;
  size_t nbytes = 0;
  State state = State::UNMAPPED;
  uint32_t priority = 0;
  Segment* before = nullptr;  // its neighbours
  Segment* after = nullptr;
  Children by_address;
  Children by_size;

  uintptr_t end() const { return begin + nbytes; }
};

struct AddressOrder {
  static Children& children(Segment& segment) { return segment.by_address; }
  static bool is_before(const Segment& one, const Segment& other) { return one.begin < other.begin; }
};

// By size; equal sizes by address.
struct SizeOrder {
  static Children& children(Segment& segment) { return segment.by_size; }
  static bool is_before(const Segment& one, const Segment& other) {
    return one.nbytes != other.nbytes ? one.nbytes < other.nbytes : one.begin < other.begin;
  }
};

// A treap: a search tree that is also a heap by random priorities, which keeps it flat.
template <typename Order>
class SegmentTree {
 public:
  void insert(Segment* segment) {
    Segment** link = &root_;
    while (*link != nullptr && (*link)->priority >= segment->priority) link = descend(*link, *segment);
    Segment* rest = *link;
    *link = segment;
    Segment** low = &Order::children(*segment).left;
    Segment** high = &Order::children(*segment).right;
    while (rest != nullptr) {
      if (Order::is_before(*rest, *segment)) {
        *low = rest;
        low = &Order::children(*rest).right;
        rest = *low;
      } else {
        *high = rest;
        high = &Order::children(*rest).left;
        rest = *high;
      }
    }
    *low = nullptr;
    *high = nullptr;
  }

  void remove(Segment* segment) {
    Segment** link = &root_;
    while (*link != segment) link = descend(*link, *segment);
    Segment* low = Order::children(*segment).left;
    Segment* high = Order::children(*segment).right;
    while (low != nullptr && high != nullptr) {
      if (low->priority >= high->priority) {
        *link = low;
        link = &Order::children(*low).right;
        low = *link;
      } else {
        *link = high;
        link = &Order::children(*high).left;
        high = *link;
      }
    }
    *link = low != nullptr ? low : high;
  }

  // Returns the first segment for which `reaches`, which is monotonic, is true.
  template <typename Predicate>
  Segment* find_first(Predicate reaches) const {
    Segment* found = nullptr;
    for (Segment* here = root_; here != nullptr;) {
      const bool is_there = reaches(*here);
      found = is_there ? here : found;
      here = is_there ? Order::children(*here).left : Order::children(*here).right;
    }
    return found;
  }

  // Returns the last segment for which `reaches` is false.
  template <typename Predicate>
  Segment* find_last_before(Predicate reaches) const {
    Segment* found = nullptr;
    for (Segment* here = root_; here != nullptr;) {
      const bool is_there = reaches(*here);
      found = is_there ? found : here;
      here = is_there ? Order::children(*here).left : Order::children(*here).right;
    }
    return found;
  }

  Segment* get_last() const {
    return find_last_before([](const Segment&) { return false; });
  }

  Segment* get_previous(const Segment& segment) const {
    return find_last_before([&](const Segment& each) { return !Order::is_before(each, segment); });
  }

 private:
  static Segment** descend(Segment* here, const Segment& segment) {
    Children& children = Order::children(*here);
    return Order::is_before(*here, segment) ? &children.right : &children.left;
  }

  Segment* root_ = nullptr;
};

// Pool of segments in memory of its own.
class SegmentPool {
 public:
  SegmentPool() = default;
  SegmentPool(const SegmentPool&) = delete;
  SegmentPool& operator=(const SegmentPool&) = delete;
  ~SegmentPool();

  // Prepares `count` calls of `make`. Returns false if memory is exhausted.
  bool reserve(size_t count);

  // Returns a segment with a random priority. Only after `reserve`.
  Segment* make();

  void drop(Segment* segment);

 private:
  struct Chunk;

  Chunk* chunks_ = nullptr;
  Segment* unused_ = nullptr;  // linked by `after`
  size_t unused_count_ = 0;
  uint32_t random_ = 2463534242U;
};

}  // namespace elbowroom
