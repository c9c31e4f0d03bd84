#include "device_bytes.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

namespace elbowroom {

namespace {

constexpr size_t MOST_KNOWN = 1 << 16;

std::function<std::pair<int64_t, int64_t>()> replacement;  // NOLINT: set before the first step
std::mutex growth_mutex;
std::map<std::pair<std::string, int64_t>, int64_t> growth;  // NOLINT: by op and bytes of its arguments

}  // namespace

DeviceBytes count_device_bytes(c10::DeviceType type) {
  if (replacement) {
    const auto [live, peak] = replacement();
    return {live, peak};
  }
  using c10::CachingAllocator::StatType;
  const c10::impl::VirtualGuardImpl current(type);
  const auto counts = c10::getDeviceAllocator(type)->getDeviceStats(current.getDevice().index());
  const auto& bytes = counts.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)];
  return {bytes.current, bytes.peak};
}

void set_count_device_bytes(std::function<std::pair<int64_t, int64_t>()> count) { replacement = std::move(count); }

int64_t find_growth(const std::string& op, int64_t nbytes, int64_t unknown) {
  const std::lock_guard<std::mutex> guard(growth_mutex);
  const auto found = growth.find({op, nbytes});
  return found == growth.end() ? unknown : found->second;
}

void note_growth(const std::string& op, int64_t nbytes, const DeviceBytes& before, const DeviceBytes& after) {
  if (nbytes == 0) return;  // without arguments, what it takes differs from call to call
  // The peak is of this op only if there was none as high before.
  const int64_t most = after.peak > before.peak ? after.peak : after.live;
  const std::lock_guard<std::mutex> guard(growth_mutex);
  if (growth.size() >= MOST_KNOWN) growth.clear();
  int64_t& known = growth[{op, nbytes}];
  known = std::max(known, most - before.live);
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
