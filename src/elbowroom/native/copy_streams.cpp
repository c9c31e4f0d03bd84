#include "copy_streams.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include "watched_ops.h"

namespace elbowroom {

namespace {

// CUDA's runtime is not linked, since the same file is for PyTorch without CUDA.
using MemcpyAsync = int (*)(void* target, const void* source, size_t nbytes, int kind, void* stream);

// Null where PyTorch has not loaded CUDA's runtime for all.
MemcpyAsync find_memcpy() {
  static const auto found = reinterpret_cast<MemcpyAsync>(dlsym(RTLD_DEFAULT, "cudaMemcpyAsync"));  // NOLINT
  return found;
}

c10::Stream get_current(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

// A copy by PyTorch, which takes several times as long on the host.
void copy_by_op(c10::Stream stream, const c10::Storage& storage, int64_t offset, uintptr_t host, int64_t nbytes, bool is_out) {
  const HiddenOps hidden;
  const c10::InferenceMode is_off(false);
  const at::TensorOptions bytes = at::TensorOptions().dtype(at::kByte);
  const at::Tensor there = at::empty({0}, bytes.device(storage.device())).set_(storage, offset, {nbytes}, {1});
  const at::Tensor here = at::from_blob(reinterpret_cast<void*>(host), {nbytes}, bytes);  // NOLINT
  const c10::StreamGuard guard(stream);
  (is_out ? here : there).copy_(is_out ? there : here, /*non_blocking=*/true);
}

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
  return copy(out_, source, offset, host, nbytes, after);
}

StreamEventPtr CopyStreams::copy_in(
    uintptr_t host, const c10::Storage& target, int64_t offset, int64_t nbytes, const StreamEvents& after) const {
  return copy(back_, target, offset, host, nbytes, after);
}

StreamEventPtr CopyStreams::copy(
    c10::Stream stream, const c10::Storage& storage, int64_t offset, uintptr_t host, int64_t nbytes,
    const StreamEvents& after) const {
  std::optional<c10::Stream> computing;
  for (const StreamEventPtr& each : after) {
    each->event.block(stream);
    if (!computing) computing = each->computing;
  }
  const bool is_out = stream == out_;
  if (const MemcpyAsync memcpy_async = find_memcpy(); memcpy_async != nullptr && stream.device_type() == c10::DeviceType::CUDA) {
    constexpr int TO_DEVICE = 1, TO_HOST = 2;  // of cudaMemcpyKind
    char* const there = static_cast<char*>(const_cast<void*>(storage.data())) + offset;  // NOLINT
    void* const here = reinterpret_cast<void*>(host);  // NOLINT
    const c10::DeviceGuard guard(stream.device());
    const int error = memcpy_async(
        is_out ? here : there, is_out ? there : here, static_cast<size_t>(nbytes), is_out ? TO_HOST : TO_DEVICE,
        c10::impl::VirtualGuardImpl(stream.device_type()).getStreamNativeHandle(stream));
    TORCH_CHECK(error == 0, "a copy of ", nbytes, " bytes between the device and the host failed: CUDA error ", error);
  } else {
    copy_by_op(stream, storage, offset, host, nbytes, is_out);
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
