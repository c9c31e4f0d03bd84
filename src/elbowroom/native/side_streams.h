// Notices that a step computes on several streams of a device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <mutex>
#include <optional>
#include <vector>

namespace elbowroom {

// Sets a function that returns the id of the current stream, instead of the device's; null to unset.
void replace_current_stream(std::function<c10::StreamId()> find);

// The streams of one step beside the one on which it began.
class SideStreams {
 public:
  using Note = std::function<void(c10::Stream)>;

  // Begins on the current stream. `note`: called with it and with the first other one, then with each further one; null
  // if nothing moves on streams.
  SideStreams(c10::Device device, Note note);

  // Returns whether the current stream is another one that was not noted yet.
  bool is_on_new_one() const;
  // Notes the current stream: what it computes with may move. Exceptions of `Note` propagate.
  void note();

 private:
  const c10::Device device_;
  const Note note_;
  std::optional<c10::Stream> first_;
  mutable std::mutex mutex_;
  std::vector<c10::Stream> noted_;
};

}  // namespace elbowroom
