// Bytes that the allocator of an accelerator has handed out.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <atomic>

namespace elbowroom {

// Of the current device of that type; 0 if its allocator, being a pluggable one, does not count.
inline int64_t count_device_bytes(c10::DeviceType type) {
  static std::atomic<bool> has_counts{true};
  if (!has_counts) return 0;
  try {
    using c10::CachingAllocator::StatType;
    const c10::impl::VirtualGuardImpl current(type);
    const auto counts = c10::getDeviceAllocator(type)->getDeviceStats(current.getDevice().index());
    return counts.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)].current;
  } catch (const c10::Error&) {
    has_counts = false;
    return 0;
  }
}

}  // namespace elbowroom
