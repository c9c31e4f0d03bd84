#include "saved_view.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <utility>

#include "watched_ops.h"

namespace elbowroom {

void check_version(
    const at::Tensor& tensor, int64_t version, int64_t expected, std::optional<at::IntArrayRef> sizes) {
  // Sizes are asked for in the error alone: some tensors compute them in Python.
  TORCH_CHECK(
      version == expected, "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: a torch.", torch::getTHPDtype(tensor.scalar_type())->name, " tensor of shape ",
      sizes ? *sizes : tensor.sizes(), " is at version ", version, "; expected version ", expected, " instead.",
      torch::autograd::AnomalyMode::is_enabled() ? ""
                                                 : " Hint: enable anomaly detection to find the operation that failed to "
                                                   "compute its gradient, with torch.autograd.set_detect_anomaly(True).");
}

SavedView::SavedView(const at::Tensor& tensor) : tensor_(tensor.tensor_data()) {}

void SavedView::check_version(int64_t expected) const {
  const auto sizes = is_released_ ? std::optional<at::IntArrayRef>(sizes_) : std::nullopt;
  elbowroom::check_version(tensor_, tensor_._version(), expected, sizes);
}

at::Tensor SavedView::make_empty() const {
  const HiddenOps hidden;
  const c10::InferenceMode is_off(false);  // its tensors have no version counters
  return at::empty({0}, tensor_.options());
}

at::Tensor SavedView::release(at::Tensor empty) {
  if (is_released_) return empty;
  empty.unsafeGetTensorImpl()->set_version_counter(tensor_.unsafeGetTensorImpl()->version_counter());
  sizes_.assign(tensor_.sizes().begin(), tensor_.sizes().end());
  strides_.assign(tensor_.strides().begin(), tensor_.strides().end());
  offset_ = tensor_.storage_offset();
  is_released_ = true;
  return std::exchange(tensor_, std::move(empty));  // another tensor, since autograd may be using this one
}

at::Tensor SavedView::make(const c10::Storage& storage) const {
  const HiddenOps hidden;
  at::Tensor made = at::empty({0}, tensor_.options());
  c10::TensorImpl* const impl = made.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);  // `set_` reads the address, of bytes that may be away
  impl->set_sizes_and_strides(sizes_, strides_, offset_);
  return made;
}

}  // namespace elbowroom
