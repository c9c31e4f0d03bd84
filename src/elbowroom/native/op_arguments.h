// Tensors among the boxed arguments of an op.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>
#include <c10/util/hash.h>

#include "op_kinds.h"

namespace elbowroom {

template <typename Visit>
void visit_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor() && item.toTensor().defined()) visit(item.toTensor());
    }
  } else if (value.isList()) {
    const auto items = value.toListRef();
    if (items.empty() || !items.front().isTensorList()) return;
    for (const c10::IValue& item : items) visit_tensors(item, visit);
  }
}

inline bool is_list_of_tensors(const c10::IValue& value) { return value.isTensorList() && value.toListRef().size() > 1; }

// The storage of a tensor that has bytes of its own; null of others.
inline const c10::StorageImpl* find_storage(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() && !tensor._is_zerotensor() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

// Whether a tensor is on a device, or on any of its type if the device has no index.
inline bool is_on(const at::Tensor& tensor, c10::Device device) {
  const c10::Device found = tensor.device();
  return found.type() == device.type() && (!device.has_index() || device.is_cpu() || found.index() == device.index());
}

// Bytes of a tensor's elements; 0 of tensors without a layout in memory.
inline int64_t count_tensor_bytes(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided) return 0;
  return static_cast<int64_t>(tensor.unsafeGetTensorImpl()->numel() * tensor.itemsize());
}

// Sizes of an op's tensor arguments.
struct Sizes {
  int64_t nbytes = 0;
  size_t shapes = 0;  // a hash
  bool has_list = false;  // of several tensors

  void add(const at::Tensor& tensor) {
    nbytes += count_tensor_bytes(tensor);
    if (!tensor.defined() || tensor.is_nested() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return;
    shapes = c10::hash_combine(shapes, static_cast<size_t>(tensor.dim()));
    for (const int64_t size : tensor.sizes()) shapes = c10::hash_combine(shapes, static_cast<size_t>(size));
  }
};

inline Sizes measure_boxed(const c10::IValue* arguments, size_t count) {
  Sizes sizes;
  for (size_t i = 0; i < count; ++i) {
    sizes.has_list = sizes.has_list || is_list_of_tensors(arguments[i]);
    visit_tensors(arguments[i], [&](const at::Tensor& tensor) { sizes.add(tensor); });
  }
  return sizes;
}

// Bytes of the tensors among an op's arguments.
inline int64_t count_boxed_bytes(const c10::IValue* arguments, size_t count) {
  int64_t nbytes = 0;
  for (size_t i = 0; i < count; ++i) {
    visit_tensors(arguments[i], [&](const at::Tensor& tensor) { nbytes += count_tensor_bytes(tensor); });
  }
  return nbytes;
}

using Written = c10::SmallVector<at::Tensor, 2>;

// The tensors that an op writes to.
inline Written list_written(const OpKind& kind, const c10::IValue* arguments, size_t count) {
  Written written;
  const auto add = [&](int64_t position) {
    if (position >= 0 && position < static_cast<int64_t>(count)) {
      visit_tensors(arguments[position], [&](const at::Tensor& tensor) { written.push_back(tensor); });
    }
  };
  for (const int64_t position : kind.written) add(position);
  if (kind.updates_statistics(arguments, count)) add(kind.mean), add(kind.variance);
  return written;
}

}  // namespace elbowroom
