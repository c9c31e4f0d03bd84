// What an op changes besides its results, as it was before the op, so that the op can run again.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <utility>
#include <vector>

#include "op_arguments.h"
#include "watched_ops.h"

namespace elbowroom {

// Running statistics of an op that updates them, if it writes to nothing else.
class FormerStatistics {
 public:
  FormerStatistics(const OpKind& kind, const c10::IValue* arguments, size_t count) : is_all_(kind.written.empty()) {
    if (!is_all_) return;
    const c10::impl::ExcludeDispatchKeyGuard hidden{c10::DispatchKeySet(WATCHED_KEY)};
    for (const at::Tensor& each : list_written(kind, arguments, count)) pairs_.emplace_back(each, each.clone());
  }
  // Returns false if the op may have written to something else.
  bool restore() const {
    const c10::impl::ExcludeDispatchKeyGuard hidden{c10::DispatchKeySet(WATCHED_KEY)};
    for (const auto& [tensor, former] : pairs_) tensor.copy_(former);
    return is_all_;
  }

 private:
  const bool is_all_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

// Position of the random generator of an op on an accelerator.
class FormerOffset {
 public:
  FormerOffset(const OpKind& kind, c10::DeviceType type, const c10::IValue* arguments, size_t count) {
    if (!kind.is_random) return;
    for (size_t i = 0; i < count; ++i) {
      if (arguments[i].isGenerator()) generator_ = arguments[i].toGenerator();
    }
    if (!generator_.defined()) {
      const c10::impl::VirtualGuardImpl current(type);
      generator_ = at::globalContext().defaultGenerator(current.getDevice());
    }
    const std::lock_guard<std::mutex> guard(generator_.mutex());
    offset_ = generator_.get_offset();
  }
  void restore() {
    if (!generator_.defined()) return;
    const std::lock_guard<std::mutex> guard(generator_.mutex());
    generator_.set_offset(offset_);
  }

 private:
  at::Generator generator_;
  uint64_t offset_ = 0;
};

}  // namespace elbowroom
