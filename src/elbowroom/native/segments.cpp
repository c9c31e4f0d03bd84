#include "segments.h"

#include <sys/mman.h>

#include <new>

namespace elbowroom {

namespace {

constexpr size_t CHUNK_BYTES = size_t{1} << 16;

}  // namespace

struct SegmentPool::Chunk {
  Chunk* next;
};

SegmentPool::~SegmentPool() {
  while (chunks_ != nullptr) {
    Chunk* const next = chunks_->next;
    munmap(chunks_, CHUNK_BYTES);
    chunks_ = next;
  }
}

bool SegmentPool::reserve(size_t count) {
  while (unused_count_ < count) {
    void* const memory = mmap(nullptr, CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    chunks_ = new (memory) Chunk{chunks_};
    auto* const segments = reinterpret_cast<Segment*>(static_cast<char*>(memory) + alignof(std::max_align_t));
    const size_t fitting = (CHUNK_BYTES - alignof(std::max_align_t)) / sizeof(Segment);
    for (size_t index = fitting; index-- > 0;) drop(new (segments + index) Segment);
  }
  return true;
}

Segment* SegmentPool::make() {
  Segment* const segment = unused_;
  unused_ = segment->after;
  --unused_count_;
  random_ ^= random_ << 13;  // xorshift
  random_ ^= random_ >> 17;
  random_ ^= random_ << 5;
  *segment = Segment{};
  segment->priority = random_;
  return segment;
}

void SegmentPool::drop(Segment* segment) {
  segment->after = unused_;
  unused_ = segment;
  ++unused_count_;
}

}  // namespace elbowroom
