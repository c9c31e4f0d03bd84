#include "device_bytes.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace elbowroom {

namespace {

// An op with the sizes of its arguments.
struct SizedOpView {
  std::string_view op;
  int64_t nbytes;
  size_t shapes;
};

struct SizedOp {
  std::string op;
  int64_t nbytes;
  size_t shapes;

  operator SizedOpView() const { return {op, nbytes, shapes}; }  // NOLINT: so that views are found without a copy
};

struct Hash {
  using is_transparent = void;

  size_t operator()(const SizedOpView& each) const {
    const size_t sizes = c10::hash_combine(static_cast<size_t>(each.nbytes), each.shapes);
    return c10::hash_combine(std::hash<std::string_view>()(each.op), sizes);
  }
};

struct Equal {
  using is_transparent = void;

  bool operator()(const SizedOpView& one, const SizedOpView& other) const {
    return one.op == other.op && one.nbytes == other.nbytes && one.shapes == other.shapes;
  }
};

constexpr size_t MOST_KNOWN = 1 << 16;

std::function<DeviceBytes(c10::Device)> count_replacement;  // NOLINT: set before the first step
std::function<void(c10::Device)> reset_replacement;  // NOLINT: likewise
std::mutex peaks_mutex;
std::map<std::pair<c10::DeviceIndex, PeakReader>, DevicePeaks> kept_peaks;  // NOLINT
std::mutex growth_mutex;
std::unordered_map<SizedOp, Growth, Hash, Equal> growth;  // NOLINT

}  // namespace

namespace {

c10::Device complete(c10::Device device) {
  const bool is_complete = device.has_index() || device.is_cpu();
  return is_complete ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

}  // namespace

DeviceBytes count_device_bytes(c10::Device device) {
  device = complete(device);
  if (count_replacement) return count_replacement(device);
  using c10::CachingAllocator::StatType;
  const auto counts = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  constexpr auto ALL = static_cast<size_t>(StatType::AGGREGATE);
  const auto &allocated = counts.allocated_bytes[ALL], &reserved = counts.reserved_bytes[ALL];
  return {allocated.current, allocated.peak, reserved.current, reserved.peak};
}

void replace_device_counts(
    std::function<DeviceBytes(c10::Device)> count, std::function<void(c10::Device)> reset_peaks) {
  count_replacement = std::move(count);
  reset_replacement = std::move(reset_peaks);
}

void reset_device_peaks(c10::Device device) {
  device = complete(device);
  const DeviceBytes counts = count_device_bytes(device);
  {
    const std::lock_guard<std::mutex> guard(peaks_mutex);
    for (const PeakReader reader : {PeakReader::STEP, PeakReader::PROGRAM}) {
      DevicePeaks& kept = kept_peaks[{device.index(), reader}];
      kept = {std::max(kept.allocated, counts.peak), std::max(kept.reserved, counts.reserved_peak)};
    }
  }
  if (reset_replacement) return reset_replacement(device);
  c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
}

DevicePeaks find_kept_peaks(c10::Device device, PeakReader reader) {
  const std::lock_guard<std::mutex> guard(peaks_mutex);
  return kept_peaks[{complete(device).index(), reader}];
}

void forget_kept_peaks(c10::Device device, PeakReader reader) {
  const std::lock_guard<std::mutex> guard(peaks_mutex);
  kept_peaks.erase({complete(device).index(), reader});
}

int64_t count_taken(const DeviceBytes& before, const DeviceBytes& after) {
  // A peak is of this op unless there was one as high before; a lower one was reset when the op began.
  return (after.peak == before.peak ? after.live : after.peak) - before.live;
}

std::optional<Growth> find_growth(const std::string& op, const Sizes& sizes) {
  const std::lock_guard<std::mutex> guard(growth_mutex);
  const auto found = growth.find(SizedOpView{op, sizes.nbytes, sizes.shapes});
  return found == growth.end() ? std::nullopt : std::optional(found->second);
}

void note_growth(
    const std::string& op, const Sizes& sizes, const DeviceBytes& before, const DeviceBytes& after, int64_t requested) {
  if (sizes.nbytes == 0) return;  // without arguments, what it takes differs from call to call
  const int64_t taken = std::max(count_taken(before, after), after.live + requested - before.live);
  const std::lock_guard<std::mutex> guard(growth_mutex);
  if (growth.size() >= MOST_KNOWN) growth.clear();
  Growth& known = growth[SizedOp{op, sizes.nbytes, sizes.shapes}];
  known.nbytes = std::max(known.nbytes, taken);
  known.is_whole |= requested == 0;
}

int64_t read_requested_bytes(const std::string& message) {
  static const std::string before = "Tried to allocate ";  // 20.00 MiB, for example
  const size_t begin = message.find(before);
  if (begin == std::string::npos) return 0;
  std::istringstream rest(message.substr(begin + before.size(), 64));
  double count = 0;
  std::string unit;
  if (!(rest >> count >> unit)) return 0;
  constexpr double ROUNDED_DOWN = 0.005;  // at most: two digits are given
  const size_t power = std::string("KMG").find(unit[0]);
  if (power == std::string::npos) return static_cast<int64_t>(count);  // bytes
  return static_cast<int64_t>((count + ROUNDED_DOWN) * static_cast<double>(int64_t{1} << (10 * (power + 1))));
}

}  // namespace elbowroom
