// Bytes that the allocator of an accelerator has handed out, and how many each kind of op takes.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "op_arguments.h"

namespace elbowroom {

// Allocated, and reserved by the allocator; now, and at most since the peaks were reset.
struct DeviceBytes {
  int64_t live = 0, peak = 0, reserved = 0, reserved_peak = 0;
};

// Of a device; without an index, of the current one of its type.
DeviceBytes count_device_bytes(c10::Device device);

// Sets functions that count, and reset the peaks, instead of the device's allocator.
void replace_device_counts(
    std::function<DeviceBytes(c10::Device)> count, std::function<void(c10::Device)> reset_peaks);

struct DevicePeaks {
  int64_t allocated = 0, reserved = 0;
};

// Who reads peaks, and decides when they begin anew.
enum class PeakReader { STEP, PROGRAM };

// Resets the peaks of a device's allocator, to measure what runs next. They are kept for their readers.
void reset_device_peaks(c10::Device device);
// The highest peaks from before they were reset, since the reader has last had them forgotten.
DevicePeaks find_kept_peaks(c10::Device device, PeakReader reader);
void forget_kept_peaks(c10::Device device, PeakReader reader);

// What an op has taken at once, as far as that is known.
int64_t count_taken(const DeviceBytes& before, const DeviceBytes& after);

// What an op takes: the most so far. `is_whole`: whether it has run to its end, and was not always refused more.
struct Growth {
  int64_t nbytes = 0;
  bool is_whole = false;
};

// What an op with arguments of these sizes takes; none if it was not seen.
std::optional<Growth> find_growth(const std::string& op, const Sizes& sizes);

// Remembers what an op took that has ended, or that has just been refused `requested` bytes.
void note_growth(
    const std::string& op, const Sizes& sizes, const DeviceBytes& before, const DeviceBytes& after, int64_t requested = 0);

// The bytes of the request that an allocator's error says it has refused; 0 if it does not say.
int64_t read_requested_bytes(const std::string& message);

}  // namespace elbowroom
