#include "device_bytes.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <tuple>
#include <utility>

namespace elbowroom {

namespace {

constexpr size_t MOST_KNOWN = 1 << 16;

std::function<DeviceBytes()> replacement;  // NOLINT: set before the first step
std::mutex growth_mutex;
std::map<std::tuple<std::string, int64_t, size_t>, Growth> growth;  // NOLINT: by op and sizes of its arguments

}  // namespace

DeviceBytes count_device_bytes(c10::Device device) {
  if (replacement) return replacement();
  using c10::CachingAllocator::StatType;
  if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  const auto counts = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  constexpr auto ALL = static_cast<size_t>(StatType::AGGREGATE);
  const auto &allocated = counts.allocated_bytes[ALL], &reserved = counts.reserved_bytes[ALL];
  return {allocated.current, allocated.peak, reserved.current, reserved.peak};
}

void set_count_device_bytes(std::function<DeviceBytes()> count) { replacement = std::move(count); }

int64_t count_taken(const DeviceBytes& before, const DeviceBytes& after) {
  // A peak is of this op unless there was one as high before; a lower one was reset when the op began.
  return (after.peak == before.peak ? after.live : after.peak) - before.live;
}

std::optional<Growth> find_growth(const std::string& op, const Sizes& sizes) {
  const std::lock_guard<std::mutex> guard(growth_mutex);
  const auto found = growth.find({op, sizes.nbytes, sizes.shapes});
  return found == growth.end() ? std::nullopt : std::optional(found->second);
}

void note_growth(
    const std::string& op, const Sizes& sizes, const DeviceBytes& before, const DeviceBytes& after, int64_t requested) {
  if (sizes.nbytes == 0) return;  // without arguments, what it takes differs from call to call
  const int64_t taken = std::max(count_taken(before, after), after.live + requested - before.live);
  const std::lock_guard<std::mutex> guard(growth_mutex);
  if (growth.size() >= MOST_KNOWN) growth.clear();
  Growth& known = growth[{op, sizes.nbytes, sizes.shapes}];
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
