// Digests of storages' bytes, by which replays recognize the weights that they read.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace elbowroom {

// What the bytes of a storage were. Two contents of equal size have equal digests by chance only: one in
// 2^64, on other devices than the CPU and for changes of signs alone one in 2^33.
class Digest {
 public:
  Digest() = default;
  // Reads the bytes. On other devices than the CPU, in the current stream, without waiting for it.
  explicit Digest(const c10::Storage& storage);

  // False if nothing was read, or the storage has no bytes.
  bool is_known() const { return nbytes_ > 0; }
  // Returns whether a storage has these contents now. On other devices than the CPU, only whether it has as many bytes:
  // contents that differ then end the program with an error of the device.
  bool matches(const c10::Storage& storage) const;
  // A number for the contents; waits for the device.
  uint64_t number() const;

 private:
  size_t nbytes_ = 0;
  uint64_t hash_ = 0;  // of bytes in host memory
  at::Tensor sum_;     // of bytes on another device: one number
};

}  // namespace elbowroom
