// Streams of a device that copy beside the one that computes.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace elbowroom {

// Point in a stream. `computing`: the stream that computed when the event, or what it comes after, was recorded.
struct StreamEvent {
  c10::Event event;
  std::optional<c10::Stream> computing;
};
using StreamEventPtr = std::shared_ptr<StreamEvent>;
using StreamEvents = std::vector<StreamEventPtr>;

class CopyStreams {
 public:
  CopyStreams(c10::Stream out, c10::Stream back) : out_(out), back_(back) {}

  // An event after all that was enqueued on the current stream.
  StreamEventPtr record_compute() const;
  // Copies bytes of a storage from `offset` on to `host` once all of `after` is done, and the other way.
  StreamEventPtr copy_out(
      const c10::Storage& source, int64_t offset, uintptr_t host, int64_t nbytes, const StreamEvents& after) const;
  StreamEventPtr copy_in(
      uintptr_t host, const c10::Storage& target, int64_t offset, int64_t nbytes, const StreamEvents& after) const;
  // Has the current stream wait for an event.
  void compute_waits(const StreamEvent& event) const;

 private:
  StreamEventPtr record(c10::Stream stream, std::optional<c10::Stream> computing) const;
  StreamEventPtr copy(
      c10::Stream stream, const c10::Storage& storage, int64_t offset, uintptr_t host, int64_t nbytes,
      const StreamEvents& after) const;

  const c10::Stream out_, back_;
};

}  // namespace elbowroom
