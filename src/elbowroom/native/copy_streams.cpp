#include "copy_streams.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "watched_ops.h"

namespace elbowroom {

namespace {

at::Tensor get_bytes(const c10::Storage& storage, int64_t offset, int64_t nbytes) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
  return at::empty({0}, options).set_(storage, offset, {nbytes}, {1});
}

at::Tensor get_bytes(uintptr_t host, int64_t nbytes) {
  return at::from_blob(reinterpret_cast<void*>(host), {nbytes}, at::TensorOptions().dtype(at::kByte));  // NOLINT
}

c10::Stream get_current(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

}  // namespace

StreamEventPtr CopyStreams::record(c10::Stream stream, std::optional<c10::Stream> computing) const {
  auto made = std::make_shared<StreamEvent>(StreamEvent{c10::Event(stream.device_type()), computing});
  made->event.record(stream);
  return made;
}

StreamEventPtr CopyStreams::record_compute() const {
  const c10::Stream computing = get_current(out_.device());
  return record(computing, computing);
}

StreamEventPtr CopyStreams::copy_out(
    const c10::Storage& source, int64_t offset, uintptr_t host, int64_t nbytes, const StreamEvents& after) const {
  const HiddenOps hidden;
  const c10::InferenceMode is_off(false);
  return copy(out_, get_bytes(source, offset, nbytes), get_bytes(host, nbytes), after);
}

StreamEventPtr CopyStreams::copy_in(
    uintptr_t host, const c10::Storage& target, int64_t offset, int64_t nbytes, const StreamEvents& after) const {
  const HiddenOps hidden;
  const c10::InferenceMode is_off(false);
  return copy(back_, get_bytes(host, nbytes), get_bytes(target, offset, nbytes), after);
}

StreamEventPtr CopyStreams::copy(
    c10::Stream stream, const at::Tensor& source, const at::Tensor& target, const StreamEvents& after) const {
  std::optional<c10::Stream> computing;
  for (const StreamEventPtr& each : after) {
    each->event.block(stream);
    if (!computing) computing = each->computing;
  }
  {
    const c10::StreamGuard guard(stream);
    target.copy_(source, /*non_blocking=*/true);
  }
  return record(stream, computing);
}

// The memory belongs to the stream that was current when the copy began. That stream's later work may reuse it, even if
// the program has switched to another stream since.
void CopyStreams::compute_waits(const StreamEvent& event) const {
  const c10::Stream current = get_current(out_.device());
  event.event.block(current);
  if (event.computing && *event.computing != current) event.event.block(*event.computing);
}

}  // namespace elbowroom
