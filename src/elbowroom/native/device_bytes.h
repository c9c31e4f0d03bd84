// Bytes that the allocator of an accelerator has handed out, and how many each kind of op takes.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace elbowroom {

struct DeviceBytes {
  int64_t live = 0, peak = 0;
};

// Of the current device of that type.
DeviceBytes count_device_bytes(c10::DeviceType type);

// Sets a function that returns the live bytes and their peak, for an allocator that does not count.
void set_count_device_bytes(std::function<std::pair<int64_t, int64_t>()> count);

// The most bytes that an op with arguments of `nbytes` took so far; `unknown` if it was not seen.
int64_t find_growth(const std::string& op, int64_t nbytes, int64_t unknown);

// Remembers what an op took.
void note_growth(const std::string& op, int64_t nbytes, const DeviceBytes& before, const DeviceBytes& after);

// The bytes of the request that an allocator's error says it has refused; 0 if it does not say.
int64_t read_requested_bytes(const std::string& message);

}  // namespace elbowroom
