#include "contents.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "recorded_ops.h"

namespace elbowroom {

namespace {

constexpr uint64_t FACTOR = 0x9E3779B97F4A7C15u;  // odd, so that multiplying loses nothing
constexpr size_t LANES = 8, WORD = sizeof(uint64_t);
constexpr int64_t COLUMNS = 1024;

uint64_t mix(uint64_t state, uint64_t word) {
  state ^= word;
  // Rotated, since the upper bits of a factor only reach the upper bits of the product.
  return ((state << 29) | (state >> 35)) * FACTOR;
}

// Several lanes, because each word of one has to wait for the one before.
uint64_t hash(const char* bytes, size_t nbytes) {
  uint64_t lanes[LANES];
  for (size_t lane = 0; lane < LANES; ++lane) lanes[lane] = FACTOR * (lane + 1);
  size_t at = 0;
  for (; at + LANES * WORD <= nbytes; at += LANES * WORD) {
    uint64_t words[LANES];
    std::memcpy(words, bytes + at, sizeof(words));
    for (size_t lane = 0; lane < LANES; ++lane) lanes[lane] = mix(lanes[lane], words[lane]);
  }
  uint64_t found = nbytes;
  for (; at < nbytes; at += WORD) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min(WORD, nbytes - at));
    found = mix(found, word);
  }
  for (const uint64_t lane : lanes) found = mix(mix(found, lane), lane >> 32);
  return found;
}

// A weighted sum of integers, which is exact in any order: sums of rows, sums of columns, and the elements that make no
// whole row, each with a weight for its place.
at::Tensor sum(const c10::Storage& storage) {
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  const at::ScalarType type = nbytes % 4 == 0 ? at::kInt : at::kByte;
  const int64_t count = nbytes / static_cast<int64_t>(c10::elementSize(type));
  at::Tensor all = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::computeDispatchKey(type, c10::kStrided, storage.device())),
      c10::scalarTypeToTypeMeta(type));
  all.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  const int64_t rows = count / COLUMNS;
  const at::Tensor whole = all.narrow(0, 0, rows * COLUMNS).view({rows, COLUMNS});
  const at::Tensor rest = all.narrow(0, rows * COLUMNS, count - rows * COLUMNS).to(at::kLong);
  const at::Tensor parts = at::cat({whole.sum(0, false, at::kLong), whole.sum(1, false, at::kLong), rest});
  const auto factor = static_cast<int64_t>(FACTOR);
  const at::Tensor place = at::arange(1, parts.numel() + 1, parts.options()).mul_(factor);
  const at::Tensor mixed = place.bitwise_xor(place.bitwise_right_shift(29)).mul_(factor).bitwise_or_(1);
  return mixed.mul_(parts).sum();
}

}  // namespace

Digest::Digest(const c10::Storage& storage) : nbytes_(storage.nbytes()) {
  if (nbytes_ == 0) return;
  if (storage.device().is_cpu()) {
    hash_ = hash(static_cast<const char*>(storage.data()), nbytes_);
  } else {
    const c10::impl::ExcludeDispatchKeyGuard hidden(HIDDEN);
    sum_ = sum(storage);
  }
}

bool Digest::matches(const c10::Storage& storage) const {
  if (storage.nbytes() != nbytes_) return false;
  const Digest now(storage);
  if (!sum_.defined()) return now.hash_ == hash_;
  const c10::impl::ExcludeDispatchKeyGuard hidden(HIDDEN);
  at::_assert_async(
      sum_.eq(now.sum_), "weights that fully_shard has gathered again have other contents than in the forward pass");
  return true;
}

uint64_t Digest::number() const {
  if (!sum_.defined()) return hash_;
  const c10::impl::ExcludeDispatchKeyGuard hidden(HIDDEN);
  return static_cast<uint64_t>(sum_.item<int64_t>());
}

}  // namespace elbowroom
