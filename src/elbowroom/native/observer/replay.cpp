#include "replay.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <stdexcept>
#include <string>
#include <unordered_set>

#include "observer.h"

namespace elbowroom {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// As in a kernel that autograd has called: no modes, transforms or autocast either, since they have done their part.
constexpr DispatchKeySet INCLUDED({DispatchKey::BackendSelect});
constexpr DispatchKeySet EXCLUDED = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
    c10::python_ks;

struct Pause {
  Pause() { Observer::pause(); }
  ~Pause() { Observer::resume(); }
};

struct RestoreSettings {
  NumericSettings before = NumericSettings::read();
  ~RestoreSettings() { before.apply(NumericSettings::read()); }
};

[[noreturn]] void refuse(const OpRecord& op, uint32_t number, const std::string& why) {
  throw std::runtime_error("op " + std::to_string(number) + " (" + op.info->name + ") cannot be replayed: " + why);
}

// In place of what an op updates and does not read: an update must not happen twice.
struct Scratch {
  size_t position;
  std::vector<int64_t> sizes;
  at::TensorOptions options;
};

class Replay {
 public:
  Replay(StepLog& log, const std::vector<uint32_t>& ops, std::unordered_map<uint32_t, Bytes> present,
         const std::vector<uint32_t>& wanted)
      : log_(log), bytes_(std::move(present)), wanted_(wanted.begin(), wanted.end()) {
    for (const auto& [storage, bytes] : bytes_) given_.insert(storage);
    const std::lock_guard lock(log_.mutex);
    for (size_t position = 0; position < ops.size(); ++position) {
      if (ops[position] >= log_.ops.size()) throw std::runtime_error("there is no op " + std::to_string(ops[position]));
      const OpRecord& op = log_.ops[ops[position]];
      for (uint32_t index = op.tensors; index < op.tensors + op.tensor_count; ++index) use(index, position);
      for (uint32_t index = op.results; index < op.results + op.result_count; ++index) use(index, position);
    }
  }

  void run(uint32_t number, size_t position) {
    const c10::impl::ForceDispatchKeyGuard guard(INCLUDED, EXCLUDED);
    torch::jit::Stack stack;
    OpRecord op;
    NumericSettings settings;
    std::vector<Scratch> scratch;
    std::vector<size_t> numbers;
    {
      const std::lock_guard lock(log_.mutex);
      op = log_.ops[number];
      if (!op.has_ended) refuse(op, number, "it has not ended");
      if (!op.info->is_registered) refuse(op, number, "its operator has been taken away");
      if (op.obstacle != Obstacle::NOTHING) refuse(op, number, describe(op.obstacle));
      settings = log_.settings[op.settings];
      for (size_t index = 0; index < op.info->argument_count; ++index) {
        const Argument& argument = log_.arguments[op.arguments + index];
        if (argument.kind == ArgumentKind::NUMBER) numbers.push_back(index);
        if (argument.kind == ArgumentKind::TENSOR && log_.is_statistic(op, index) &&
            log_.tensors[argument.first].is_defined) {
          scratch.push_back(describe_scratch(index, log_.tensors[argument.first]));
        }
        stack.push_back(fill(op, number, index));
      }
    }
    // What allocates may ask for room first, so nothing is locked.
    for (const size_t index : numbers) stack[index] = make_number(stack[index]);
    for (const Scratch& each : scratch) stack[each.position] = at::zeros(each.sizes, each.options);
    settings.apply(present_);
    present_ = settings;
    op.info->handle.callBoxed(stack);
    const std::lock_guard lock(log_.mutex);
    log_.visit_written(op, [&](uint32_t storage) {
      if (const auto found = bytes_.find(storage); found != bytes_.end() && !given_.contains(storage)) {
        ++found->second.version;
      }
    });
    take_results(op, number, stack);
    stack.clear();
    for (uint32_t index = op.tensors; index < op.tensors + op.tensor_count; ++index) let_go(index, position);
    for (uint32_t index = op.results; index < op.results + op.result_count; ++index) let_go(index, position);
  }

  std::unordered_map<uint32_t, Bytes> take_wanted() {
    std::unordered_map<uint32_t, Bytes> made;
    for (const uint32_t storage : wanted_) {
      const auto found = bytes_.find(storage);
      if (found == bytes_.end()) throw std::runtime_error("storage " + std::to_string(storage) + " was not made");
      made.emplace(storage, std::move(found->second));
    }
    return made;
  }

 private:
  void use(uint32_t index, size_t position) {
    if (log_.tensors[index].storage != NONE) last_use_[log_.tensors[index].storage] = position;
  }

  void let_go(uint32_t index, size_t position) {
    const uint32_t storage = log_.tensors[index].storage;
    if (storage != NONE && last_use_[storage] == position && !wanted_.contains(storage)) bytes_.erase(storage);
  }

  at::IValue fill(const OpRecord& op, uint32_t number, size_t position) {
    const Argument& argument = log_.arguments[op.arguments + position];
    const bool is_written = ((op.info->written >> position) & 1) != 0;
    switch (argument.kind) {
      case ArgumentKind::VALUE:
      case ArgumentKind::NUMBER: return log_.values[argument.first];
      case ArgumentKind::TENSOR: {
        if (log_.is_statistic(op, position)) return {};
        return make_tensor(op, number, log_.tensors[argument.first], is_written);
      }
      case ArgumentKind::TENSORS: {
        c10::List<at::Tensor> list;
        for (uint32_t index = argument.first; index < argument.first + argument.count; ++index) {
          list.push_back(make_tensor(op, number, log_.tensors[index], is_written));
        }
        return list;
      }
      case ArgumentKind::OPTIONAL_TENSORS: {
        c10::List<std::optional<at::Tensor>> list;
        for (uint32_t index = argument.first; index < argument.first + argument.count; ++index) {
          const TensorUse& tensor = log_.tensors[index];
          list.push_back(tensor.is_defined ? std::optional(make_tensor(op, number, tensor, is_written)) : std::nullopt);
        }
        return list;
      }
    }
    return {};
  }

  static at::Tensor make_number(const at::IValue& value) {
    const c10::Scalar number = value.toScalar();
    at::Tensor tensor = at::zeros({}, at::TensorOptions(number.type()));
    void* data = tensor.mutable_data_ptr();
    if (value.isDouble()) *static_cast<double*>(data) = value.toDouble();
    if (value.isInt()) *static_cast<int64_t*>(data) = value.toInt();
    if (value.isBool()) *static_cast<bool*>(data) = value.toBool();
    if (value.isComplexDouble()) *static_cast<c10::complex<double>*>(data) = value.toComplexDouble();
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }

  Scratch describe_scratch(size_t position, const TensorUse& use) const {
    const int64_t* sizes = log_.geometry.data() + use.geometry;
    const c10::Device device(use.device_type, use.device_index);
    return {position, std::vector<int64_t>(sizes, sizes + use.dimensions), at::TensorOptions(use.dtype).device(device)};
  }

  at::Tensor make_tensor(const OpRecord& op, uint32_t number, const TensorUse& use, bool is_written) const {
    if (!use.is_defined) return {};
    const std::string name = "storage " + std::to_string(use.storage);
    const auto found = bytes_.find(use.storage);
    if (found == bytes_.end()) refuse(op, number, "it reads " + name + ", which is not there");
    if (found->second.version != use.version) {
      refuse(op, number, "it read " + name + " after " + std::to_string(use.version) + " writes, and is given it after " +
             std::to_string(found->second.version));
    }
    if (is_written && given_.contains(use.storage)) {
      refuse(op, number, "it would write to " + name + ", which the replay has not made");
    }
    const c10::Device device(use.device_type, use.device_index);
    const DispatchKey key = c10::computeDispatchKey(use.dtype, std::nullopt, device);
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second.storage), DispatchKeySet(key), c10::scalarTypeToTypeMeta(use.dtype));
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    const int64_t* geometry = log_.geometry.data() + use.geometry;
    impl->set_sizes_and_strides(
        c10::IntArrayRef(geometry, use.dimensions), c10::IntArrayRef(geometry + use.dimensions, use.dimensions));
    impl->set_storage_offset(use.offset);
    if (use.requires_grad) impl->set_requires_grad(true);  // kernels may ask
    return tensor;
  }

  void take_results(const OpRecord& op, uint32_t number, const torch::jit::Stack& stack) {
    uint32_t index = op.results;
    const auto take = [&](const at::Tensor& tensor) {
      if (index == op.results + op.result_count) refuse(op, number, "it has more results than before");
      const TensorUse& use = log_.tensors[index++];
      if (use.is_defined != tensor.defined()) refuse(op, number, "it has other results than before");
      if (!use.is_defined) return;
      const int64_t* geometry = log_.geometry.data() + use.geometry;
      const c10::IntArrayRef sizes(geometry, use.dimensions), strides(geometry + use.dimensions, use.dimensions);
      if (tensor.scalar_type() != use.dtype || tensor.sizes() != sizes || tensor.strides() != strides ||
          tensor.storage_offset() != use.offset) {
        refuse(op, number, "its result has another type or shape than before");
      }
      bytes_.try_emplace(use.storage, Bytes{tensor.storage(), use.version});
    };
    for (const at::IValue& value : stack) {
      if (value.isTensor()) {
        take(value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::IValue& item : value.toListRef()) take(item.toTensor());
      }
    }
  }

  const Pause pause_;
  const RestoreSettings restore_;
  NumericSettings present_ = restore_.before;
  StepLog& log_;
  std::unordered_map<uint32_t, Bytes> bytes_;
  std::unordered_set<uint32_t> given_;
  const std::unordered_set<uint32_t> wanted_;
  std::unordered_map<uint32_t, size_t> last_use_;
};

}  // namespace

std::unordered_map<uint32_t, Bytes> replay(
    StepLog& log,
    const std::vector<uint32_t>& ops,
    std::unordered_map<uint32_t, Bytes> present,
    const std::vector<uint32_t>& wanted) {
  Replay replay(log, ops, std::move(present), wanted);
  for (size_t position = 0; position < ops.size(); ++position) replay.run(ops[position], position);
  return replay.take_wanted();
}

}  // namespace elbowroom
