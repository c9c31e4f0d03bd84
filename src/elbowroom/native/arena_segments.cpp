// Splits, merges, maps and unmaps the arena's segments, and checks their invariants.
#include <algorithm>

#include "arena.h"

namespace elbowroom {

namespace {

bool is_free(State state) { return state == State::MAPPED || state == State::UNMAPPED; }

bool has_pages(State state) { return state == State::MAPPED || state == State::LIVE; }

bool can_merge(const Segment* one, const Segment* next) {
  return one != nullptr && next != nullptr && one->state == next->state;
}

bool is_unmapped(const Segment* neighbour) { return neighbour != nullptr && neighbour->state == State::UNMAPPED; }

}  // namespace

SegmentTree<SizeOrder>& Arena::find_tree(const Segment& segment) {
  return segment.state == State::MAPPED ? mapped_ : unmapped_;
}

// Returns the segment that contains an address.
Segment* Arena::find_segment(uintptr_t address) const {
  return segments_.find_last_before([&](const Segment& each) { return each.begin > address; });
}

// Inserts a segment in the state of the one before it. `pool_` must have one.
Segment* Arena::add_after(Segment* segment, uintptr_t begin, size_t nbytes) {
  Segment* const made = pool_.make();
  made->begin = begin;
  made->nbytes = nbytes;
  made->state = segment->state;
  made->before = segment;
  made->after = segment->after;
  if (made->after != nullptr) made->after->before = made;
  segment->after = made;
  segments_.insert(made);
  return made;
}

// Splits a part off a free segment and returns it, in no tree of free segments. Null if memory is exhausted.
Segment* Arena::cut(Segment* segment, uintptr_t begin, size_t nbytes) {
  if (!pool_.reserve(2)) return nullptr;
  const uintptr_t last = segment->end();
  const uintptr_t end = begin + nbytes;
  find_tree(*segment).remove(segment);
  Segment* part = segment;
  if (begin > segment->begin) {
    segment->nbytes = begin - segment->begin;
    find_tree(*segment).insert(segment);
    part = add_after(segment, begin, last - begin);
  }
  if (end < last) {
    part->nbytes = nbytes;
    Segment* const rest = add_after(part, end, last - end);
    find_tree(*rest).insert(rest);
  }
  return part;
}

// Makes a segment free that is in no tree of free segments. Returns it, merged with its neighbours in the same state.
Segment* Arena::settle(Segment* segment, State state) {
  segment->state = state;
  if (can_merge(segment, segment->after)) {
    find_tree(*segment->after).remove(segment->after);
    merge(segment, segment->after);
  }
  if (can_merge(segment->before, segment)) {
    Segment* const before = segment->before;
    find_tree(*before).remove(before);
    merge(before, segment);
    segment = before;
  }
  find_tree(*segment).insert(segment);
  return segment;
}

void Arena::merge(Segment* segment, Segment* after) {
  segments_.remove(after);
  segment->nbytes += after->nbytes;
  segment->after = after->after;
  if (segment->after != nullptr) segment->after->before = segment;
  pool_.drop(after);
}

// Maps whole pages of an unmapped segment. On success `segment` is the mapped segment that contains them.
Mapping Arena::map_part(Segment*& segment, uintptr_t begin, size_t nbytes) {
  Segment* const part = cut(segment, begin, nbytes);
  if (part == nullptr) return Mapping::REFUSED;
  const Mapping mapping = map_pages(begin, nbytes);
  if (mapping == Mapping::TAKEN) {
    part->state = State::LOST;
    return mapping;
  }
  const bool is_mapped = mapping == Mapping::DONE;
  segment = settle(part, is_mapped ? State::MAPPED : State::UNMAPPED);
  if (is_mapped) {
    counts_.mapped_bytes += nbytes;
    counts_.newly_mapped_bytes += nbytes;
  }
  return mapping;
}

// Maps pages in a free segment, or after and before it, until it has `nbytes`.
Mapping Arena::extend(Segment*& segment, size_t nbytes) {
  const auto count_missing = [&] {
    const size_t missing = nbytes - (segment->state == State::MAPPED ? segment->nbytes : 0);
    return (missing + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  };
  if (segment->state == State::UNMAPPED) return map_part(segment, segment->begin, count_missing());
  if (Segment* after = segment->after; is_unmapped(after)) {
    const Mapping mapping = map_part(after, after->begin, std::min(after->nbytes, count_missing()));
    if (mapping != Mapping::DONE || segment->nbytes >= nbytes) return mapping;
  }
  Segment* before = segment->before;
  if (!is_unmapped(before)) return Mapping::REFUSED;
  const size_t missing = std::min(before->nbytes, count_missing());
  const Mapping mapping = map_part(before, before->end() - missing, missing);
  if (mapping == Mapping::DONE) segment = before;
  return mapping;
}

// Unmaps whole pages of a free mapped segment, if possible next to an unmapped one. Returns the unmapped bytes.
size_t Arena::give_back_part(Segment* segment, size_t nbytes) {
  const uintptr_t low = (segment->begin + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  const uintptr_t high = segment->end() / page_bytes_ * page_bytes_;
  if (low >= high) return 0;
  nbytes = std::min((nbytes + page_bytes_ - 1) / page_bytes_ * page_bytes_, high - low);
  const bool is_low = is_unmapped(segment->before) && !is_unmapped(segment->after);
  Segment* const part = cut(segment, is_low ? low : high - nbytes, nbytes);
  if (part == nullptr) return 0;
  const bool is_unmapped = unmap_pages(part->begin, nbytes);
  settle(part, is_unmapped ? State::UNMAPPED : State::MAPPED);
  if (!is_unmapped) return 0;
  counts_.mapped_bytes -= nbytes;
  counts_.given_back_bytes += nbytes;
  return nbytes;
}

std::vector<Segment> Arena::list_segments() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::vector<Segment> found;
  for (const Segment* each = first_; each != nullptr; each = each->after) found.push_back(*each);
  return found;
}

size_t Arena::count_resident_bytes() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  size_t nbytes = 0;
  for (const Segment* each = first_; each != nullptr; each = each->after) {
    if (!has_pages(each->state)) continue;
    const uintptr_t begin = each->begin / page_bytes_ * page_bytes_;
    while (each->after != nullptr && has_pages(each->after->state)) each = each->after;
    nbytes += elbowroom::count_resident_bytes(begin, each->end() - begin);
  }
  return nbytes;
}

const char* Arena::check() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  size_t live_bytes = 0;
  size_t blocks = 0;
  size_t mapped_bytes = 0;
  const auto count_mapped_before = [&](const Segment& each) {
    return each.begin % page_bytes_ == 0 || (each.before != nullptr && has_pages(each.before->state));
  };
  for (const Segment* each = first_; each != nullptr; each = each->after) {
    const Segment* const after = each->after;
    if (each->nbytes == 0 || each->begin % ALIGNMENT != 0) return "a segment is empty or not aligned";
    if (after != nullptr && (after->begin != each->end() || after->before != each)) return "neighbours are not linked";
    if (after == nullptr && each->end() != end_) return "addresses are missing";
    if (find_segment(each->begin) != each) return "a segment is not found by its address";
    if (is_free(each->state) && can_merge(each, after)) return "free neighbours are not merged";
    if (is_free(each->state)) {
      const auto& tree = each->state == State::MAPPED ? mapped_ : unmapped_;
      const auto reaches = [&](const Segment& other) { return !SizeOrder::is_before(other, *each); };
      if (tree.find_first(reaches) != each) return "a free segment is not found by its size";
    }
    if (each->state == State::LIVE) {
      live_bytes += each->nbytes;
      ++blocks;
    }
    if (!has_pages(each->state)) {
      if (each->begin % page_bytes_ != 0 || each->end() % page_bytes_ != 0) return "a page is mapped in part";
      continue;
    }
    if (!count_mapped_before(*each)) return "a page is mapped in part";
    mapped_bytes += each->nbytes;
  }
  if (live_bytes != counts_.live_bytes || blocks != counts_.blocks) return "live bytes are miscounted";
  if (mapped_bytes != counts_.mapped_bytes) return "mapped bytes are miscounted";
  return nullptr;
}

}  // namespace elbowroom
