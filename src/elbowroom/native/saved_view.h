// One tensor that autograd has saved, of a storage that may leave memory and come back.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>

namespace elbowroom {

// Throws PyTorch's error if a tensor that was saved was modified in place since. With hooks, PyTorch does not check it.
// `sizes`: of the tensor, if they are no longer its own.
void check_version(
    const at::Tensor& tensor, int64_t version, int64_t expected, std::optional<at::IntArrayRef> sizes = std::nullopt);

class SavedView {
 public:
  explicit SavedView(const at::Tensor& tensor);

  // Shares the saved tensor's version counter, and until the release its bytes.
  const at::Tensor& tensor() const { return tensor_; }
  // Throws PyTorch's error if the saved tensor was modified in place since it had this version.
  void check_version(int64_t expected) const;
  bool is_released() const { return is_released_; }
  // Lets go of the storage.
  void release() { release(make_empty()); }
  // The same in two steps, for owners that hold a mutex in the second one: an empty tensor of the same kind takes the
  // place of the one that is returned, to be destroyed without the mutex.
  at::Tensor make_empty() const;
  at::Tensor release(at::Tensor empty);
  // The saved tensor, of a storage with its bytes.
  at::Tensor make(const c10::Storage& storage) const;

 private:
  at::Tensor tensor_;
  bool is_released_ = false;
  c10::SmallVector<int64_t, 5> sizes_, strides_;
  int64_t offset_ = 0;
};

}  // namespace elbowroom
