// Requests and the limit. arena_segments.cpp splits, merges, maps and unmaps segments.
#include "arena.h"

#include <pthread.h>

#include <algorithm>

namespace elbowroom {

namespace {

constexpr size_t MOST_BYTES = size_t{1} << 41;  // of the address range
constexpr size_t LEAST_BYTES = size_t{1} << 31;
constexpr size_t GROWING_LOOKED_AT = 16;  // free segments to consider for growing
constexpr size_t MOST_TRIES = 8;          // to map pages
constexpr size_t LEAST_GIVEN_BYTES = size_t{1} << 20;
constexpr size_t HEADROOM_PARTS = 64;
constexpr size_t LEAST_HEADROOM_BYTES = size_t{1} << 20;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Arena::Arena() : page_bytes_(get_page_bytes()) {
  size_t nbytes = MOST_BYTES;
  while ((begin_ = find_addresses(nbytes)) == 0 && nbytes > LEAST_BYTES) nbytes /= 4;
  if (begin_ == 0 || !pool_.reserve(1)) return;
  end_ = begin_ + nbytes;
  first_ = pool_.make();
  first_->begin = begin_ + page_bytes_;  // the first page marks the addresses
  first_->nbytes = end_ - first_->begin;
  segments_.insert(first_);
  settle(first_, State::UNMAPPED);
}

Arena::~Arena() {
  for (Segment* each = first_; each != nullptr;) {
    Segment* last = each;
    const bool is_mapped = each->state == State::LIVE || each->state == State::MAPPED;
    const auto goes_on = [&] {
      return last->after != nullptr && (last->after->state == State::LIVE || last->after->state == State::MAPPED);
    };
    while (is_mapped && goes_on()) last = last->after;
    if (is_mapped) unmap_pages(each->begin / page_bytes_ * page_bytes_, last->end() - each->begin);
    each = last->after;
  }
  if (begin_ != 0) unmap_pages(begin_, page_bytes_);
}

Arena& Arena::get() {
  static Arena* const arena = [] {
    static Arena* made = nullptr;
    made = new Arena();
    pthread_atfork(
        [] { made->mutex_.lock(); }, [] { made->mutex_.unlock(); }, [] { made->mutex_.unlock(); });
    return made;
  }();
  return *arena;
}

void* Arena::allocate(size_t nbytes) {
  if (nbytes == 0 || nbytes > MOST_BYTES) return nullptr;
  nbytes = round_up(nbytes, ALIGNMENT);
  const std::lock_guard<std::mutex> guard(mutex_);
  Segment* found = mapped_.find_first([&](const Segment& each) { return each.nbytes >= nbytes; });
  const bool is_reused = found != nullptr;
  if (!is_reused) found = grow(nbytes);
  void* const block = found == nullptr ? nullptr : hand_out(found, nbytes);
  if (is_reused && block != nullptr) ++counts_.reused;
  return block;
}

// Makes the beginning of a mapped segment a block.
void* Arena::hand_out(Segment* segment, size_t nbytes) {
  Segment* const block = cut(segment, segment->begin, nbytes);
  if (block == nullptr) {
    ++counts_.failed;
    return nullptr;
  }
  block->state = State::LIVE;
  ++counts_.requests;
  ++counts_.blocks;
  counts_.live_bytes += nbytes;
  counts_.live_peak_bytes = std::max(counts_.live_peak_bytes, counts_.live_bytes);
  highest_live_bytes_ = std::max(highest_live_bytes_, counts_.live_bytes);
  // New pages are not resident until they are written to, so resident bytes never exceed the limit.
  if (counts_.mapped_bytes > find_limit()) give_back(find_limit());
  counts_.mapped_peak_bytes = std::max(counts_.mapped_peak_bytes, counts_.mapped_bytes);
  return reinterpret_cast<void*>(block->begin);
}

bool Arena::free(void* address) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (begin < begin_ || begin >= end_) return false;
  const std::lock_guard<std::mutex> guard(mutex_);
  Segment* const block = find_segment(begin);
  if (block == nullptr || block->begin != begin || block->state != State::LIVE) return false;
  --counts_.blocks;
  counts_.live_bytes -= block->nbytes;
  settle(block, State::MAPPED);
  if (counts_.mapped_bytes > find_limit()) give_back(find_limit());
  return true;
}

bool Arena::owns(const void* address) const {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (begin < begin_ || begin >= end_) return false;
  const std::lock_guard<std::mutex> guard(mutex_);
  const Segment* const block = find_segment(begin);
  return block != nullptr && block->begin == begin && block->state == State::LIVE;
}

// Maps pages until there is a free mapped segment of `nbytes`. Returns null if the kernel refuses them.
Segment* Arena::grow(size_t nbytes) {
  for (size_t tries = 0; tries < MOST_TRIES; ++tries) {
    Segment* segment = find_growing(nbytes);
    if (segment == nullptr) break;
    const Mapping mapping = extend(segment, nbytes);
    if (mapping == Mapping::DONE) return segment;
    if (mapping == Mapping::REFUSED && !find_room(nbytes, tries)) break;
  }
  ++counts_.failed;
  return nullptr;
}

// Finds the free segment that needs (nearly) the fewest new pages to have `nbytes`.
Segment* Arena::find_growing(size_t nbytes) const {
  const auto count_free = [](const Segment* neighbour) {
    const bool is_unmapped = neighbour != nullptr && neighbour->state == State::UNMAPPED;
    return is_unmapped ? neighbour->nbytes : 0;
  };
  Segment* segment = mapped_.get_last();
  for (size_t looked_at = 0; segment != nullptr && looked_at < GROWING_LOOKED_AT; ++looked_at) {
    const size_t room = segment->nbytes + count_free(segment->before) + count_free(segment->after);
    if (room >= nbytes) return segment;
    segment = mapped_.get_previous(*segment);
  }
  const size_t in_pages = round_up(nbytes, page_bytes_);
  return unmapped_.find_first([&](const Segment& each) { return each.nbytes >= in_pages; });
}

// Unmaps free pages after the kernel has refused new ones. Returns whether to try again.
bool Arena::find_room(size_t nbytes, size_t tries) {
  const size_t wanted = tries == 0 ? round_up(nbytes, page_bytes_) : counts_.mapped_bytes;
  return give_back(counts_.mapped_bytes - std::min(counts_.mapped_bytes, wanted)) > 0;
}

size_t Arena::find_limit() const {
  return highest_live_bytes_ + std::max(highest_live_bytes_ / HEADROOM_PARTS, LEAST_HEADROOM_BYTES);
}

void Arena::forget_peak(size_t nbytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  highest_live_bytes_ = std::max(counts_.live_bytes, std::min(highest_live_bytes_, nbytes));
  give_back(find_limit());
}

size_t Arena::trim(size_t keep_bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  return give_back(counts_.live_bytes + std::min(keep_bytes, counts_.mapped_bytes));
}

// Unmaps free pages, the largest segments first, until at most `most_mapped_bytes` are mapped. Returns the unmapped
// bytes.
size_t Arena::give_back(size_t most_mapped_bytes) {
  size_t given_bytes = 0;
  while (counts_.mapped_bytes > most_mapped_bytes) {
    Segment* const largest = mapped_.get_last();
    if (largest == nullptr) break;
    const size_t excess = counts_.mapped_bytes - most_mapped_bytes;
    const size_t nbytes = give_back_part(largest, std::max(excess, LEAST_GIVEN_BYTES));
    if (nbytes == 0) break;
    given_bytes += nbytes;
  }
  return given_bytes;
}

void Arena::reset_peaks() {
  const std::lock_guard<std::mutex> guard(mutex_);
  counts_.live_peak_bytes = counts_.live_bytes;
  counts_.mapped_peak_bytes = counts_.mapped_bytes;
}

ArenaStatistics Arena::get_statistics() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  ArenaStatistics found = counts_;
  found.limit_bytes = find_limit();
  return found;
}

}  // namespace elbowroom
