#include "op_record.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>

namespace elbowroom {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr DispatchKeySet SUBCLASS_KEYS({DispatchKey::Python});
constexpr DispatchKeySet WRAPPED_KEYS(
    {DispatchKey::Functionalize, DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper, DispatchKey::Batched});
constexpr DispatchKeySet CONJUGATE_KEYS({DispatchKey::Conjugate, DispatchKey::Negative});
constexpr DispatchKeySet ODD_KEYS = SUBCLASS_KEYS | WRAPPED_KEYS | CONJUGATE_KEYS |
    DispatchKeySet({DispatchKey::Quantized, DispatchKey::ZeroTensor, DispatchKey::Sparse, DispatchKey::SparseCsr,
                    DispatchKey::NestedTensor, DispatchKey::MkldnnCPU});

int64_t read_clock() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

Obstacle find_obstacle(const c10::TensorImpl& tensor) {
  const DispatchKeySet keys = tensor.key_set();
  if (keys.has(DispatchKey::Python)) return Obstacle::SUBCLASS;
  if (keys.has_any(WRAPPED_KEYS)) return Obstacle::WRAPPED;
  if (!tensor.has_storage() || keys.has(DispatchKey::ZeroTensor)) return Obstacle::NO_STORAGE;
  if (tensor.is_meta()) return Obstacle::META;
  if (keys.has(DispatchKey::Quantized)) return Obstacle::QUANTIZED;
  if (keys.has_any(CONJUGATE_KEYS)) return Obstacle::CONJUGATE;
  if (keys.has(DispatchKey::MkldnnCPU) || keys.has(DispatchKey::NestedTensor)) return Obstacle::NO_STORAGE;
  return Obstacle::NOTHING;
}

bool is_plain(const at::IValue& value) {
  if (value.isNone() || value.isInt() || value.isDouble() || value.isBool() || value.isComplexDouble()) return true;
  if (value.isString() || value.isDevice()) return true;
  if (!value.isList()) return false;
  const c10::ArrayRef<at::IValue> items = value.toListRef();
  return std::all_of(items.begin(), items.end(), [](const at::IValue& item) { return is_plain(item); });
}

// By its items where there are any: to compare types takes longer than all the rest.
bool holds_tensors(const at::IValue& list) {
  const c10::ArrayRef<at::IValue> items = list.toListRef();
  if (!items.empty() && !items.front().isTensor() && !items.front().isNone()) return false;
  return list.isTensorList() || list.isOptionalTensorList();
}

}  // namespace

const char* describe(Obstacle obstacle) {
  switch (obstacle) {
    case Obstacle::NOTHING: return "";
    case Obstacle::NO_STORAGE: return "a tensor without a storage of its own";
    case Obstacle::SUBCLASS: return "a tensor of a class with its own __torch_dispatch__";
    case Obstacle::WRAPPED: return "a tensor inside a function transform";
    case Obstacle::QUANTIZED: return "a quantized tensor";
    case Obstacle::CONJUGATE: return "a tensor with the conjugate or negative bit";
    case Obstacle::META: return "a tensor on a device without bytes";
    case Obstacle::SYMBOLIC: return "a tensor with symbolic sizes";
    case Obstacle::OBJECT: return "an argument that is neither a tensor nor a plain value";
    case Obstacle::RAISED: return "it raised an exception";
  }
  return "";
}

StepLog::~StepLog() {
  for (const StorageRecord& record : storages) {
    if (record.storage != nullptr) c10::raw::weak_intrusive_ptr::decref(record.storage);
  }
}

void StepLog::reserve_as(const StepLog& other) {
  ops.reserve(other.ops.size());
  arguments.reserve(other.arguments.size());
  values.reserve(other.values.size());
  tensors.reserve(other.tensors.size());
  geometry.reserve(other.geometry.size());
  storages.reserve(other.storages.size());
  writes.reserve(other.writes.size());
  numbers_.reserve(other.storages.size());
}

uint32_t StepLog::find_storage(c10::StorageImpl* storage) {
  return find_storage(storage, static_cast<uint32_t>(ops.size()));
}

uint32_t StepLog::find_storage(c10::StorageImpl* storage, uint32_t seen_by) {
  const auto [entry, is_new] = numbers_.emplace(storage, static_cast<uint32_t>(storages.size()));
  if (!is_new) return entry->second;
  StorageRecord record{c10::raw::intrusive_ptr::make_weak(storage), storage->nbytes()};
  record.seen_by = seen_by;
  record.is_resizable = storage->resizable();
  storages.push_back(record);
  living_.push_back(entry->second);
  return entry->second;
}

// Whether the storage at this place of `living_` has died; its memory is then given back, and its address forgotten.
bool StepLog::bury(size_t place) {
  StorageRecord& record = storages[living_[place]];
  if (record.is_alive()) return false;
  numbers_.erase(record.storage);
  c10::raw::weak_intrusive_ptr::decref(std::exchange(record.storage, nullptr));
  record.died_before = static_cast<uint32_t>(ops.size());
  living_[place] = living_.back();
  living_.pop_back();
  return true;
}

void StepLog::sweep() {
  for (size_t place = 0; place < living_.size();) {
    if (!bury(place)) ++place;
  }
}

// A few of the living, in turn: what has died is found soon enough for its memory to be used again by the next ops.
void StepLog::sweep_some() {
  for (int checks = 0; checks < 2 && !living_.empty(); ++checks) {
    if (next_ == 0 || next_ > living_.size()) next_ = living_.size();
    bury(--next_);
  }
}

TensorUse StepLog::describe_tensor(const at::Tensor& tensor, uint32_t seen_by) {
  TensorUse use;
  if (!tensor.defined()) return use;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  use.is_defined = true;
  use.dtype = c10::typeMetaToScalarType(impl.dtype());
  if (C10_UNLIKELY(impl.key_set().has_any(ODD_KEYS) || impl.is_meta() || !impl.has_storage())) use.obstacle = find_obstacle(impl);
  if (use.obstacle != Obstacle::NO_STORAGE && use.obstacle != Obstacle::WRAPPED && impl.has_storage()) {
    c10::StorageImpl* storage = impl.unsafe_storage().unsafeGetStorageImpl();
    if (storage != nullptr) {
      use.storage = find_storage(storage, seen_by);
      use.version = storages[use.storage].version;
    } else {
      use.obstacle = use.obstacle == Obstacle::NOTHING ? Obstacle::NO_STORAGE : use.obstacle;
    }
  }
  if (C10_UNLIKELY(impl.has_symbolic_sizes_strides())) {
    use.obstacle = Obstacle::SYMBOLIC;
    return use;
  }
  if (use.obstacle == Obstacle::NO_STORAGE || use.obstacle == Obstacle::SUBCLASS || use.obstacle == Obstacle::WRAPPED) {
    return use;
  }
  const c10::Device device = impl.device();
  use.device_type = device.type();
  use.device_index = device.index();
  use.requires_grad = c10::GradMode::is_enabled() && impl.requires_grad();
  use.offset = impl.storage_offset();
  const c10::IntArrayRef sizes = impl.sizes(), strides = impl.strides();
  use.dimensions = static_cast<uint16_t>(sizes.size());
  use.geometry = static_cast<uint32_t>(geometry.size());
  geometry.insert(geometry.end(), sizes.begin(), sizes.end());
  geometry.insert(geometry.end(), strides.begin(), strides.end());
  return use;
}

void StepLog::add_value(OpRecord& op, const at::IValue& value) {
  arguments.push_back(Argument{ArgumentKind::VALUE, static_cast<uint32_t>(values.size()), 0});
  if (!is_plain(value)) {
    if (value.isStorage()) find_storage(value.toStorage().unsafeGetStorageImpl());
    op.obstacle = Obstacle::OBJECT;
    values.emplace_back();  // it may hold tensors
  } else if (value.isPtrType() && !value.isString() && value.use_count() > 1) {
    values.push_back(value.deepcopy());  // a list that the program may still change
  } else {
    values.push_back(value);
  }
}

// A Python number on its way to an op: a dispatch mode is given the number, and nobody else has the tensor.
void StepLog::add_number(OpRecord& op, const at::Tensor& tensor) {
  arguments.push_back(Argument{ArgumentKind::NUMBER, static_cast<uint32_t>(values.size()), 0});
  const bool is_here = tensor.device().is_cpu() && !tensor.key_set().has_any(ODD_KEYS) && tensor.has_storage();
  const void* data = is_here ? tensor.const_data_ptr() : nullptr;
  if (data != nullptr && tensor.scalar_type() == at::kDouble) {
    values.emplace_back(*static_cast<const double*>(data));
  } else if (data != nullptr && tensor.scalar_type() == at::kLong) {
    values.emplace_back(*static_cast<const int64_t*>(data));
  } else if (data != nullptr && tensor.scalar_type() == at::kBool) {
    values.emplace_back(*static_cast<const bool*>(data));
  } else if (data != nullptr && tensor.scalar_type() == at::kComplexDouble) {
    values.emplace_back(*static_cast<const c10::complex<double>*>(data));
  } else {
    values.emplace_back();
    op.obstacle = Obstacle::OBJECT;
  }
}

void StepLog::add_argument(OpRecord& op, const at::IValue& value) {
  const uint32_t first = static_cast<uint32_t>(tensors.size());
  const auto add = [&](const at::Tensor& tensor) {
    tensors.push_back(describe_tensor(tensor, static_cast<uint32_t>(ops.size()) - 1));
    if (op.obstacle == Obstacle::NOTHING) op.obstacle = tensors.back().obstacle;
  };
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) return add_number(op, tensor);
    add(tensor);
    arguments.push_back(Argument{ArgumentKind::TENSOR, first, 1});
  } else if (value.isList() && holds_tensors(value)) {
    const ArgumentKind kind = value.isTensorList() ? ArgumentKind::TENSORS : ArgumentKind::OPTIONAL_TENSORS;
    for (const at::IValue& item : value.toListRef()) {
      if (item.isTensor()) {
        add(item.toTensor());
      } else {
        tensors.emplace_back();
      }
    }
    arguments.push_back(Argument{kind, first, static_cast<uint32_t>(tensors.size()) - first});
  } else {
    add_value(op, value);
  }
}

uint32_t StepLog::find_settings(const OpInfo& info) {
  const bool is_first = settings.empty();
  const NumericSettings present =
      info.multiplies || is_first ? NumericSettings::read() : NumericSettings::read_common(settings[settings_]);
  if (is_first || !(settings[settings_] == present)) {
    settings_ = static_cast<uint32_t>(std::find(settings.begin(), settings.end(), present) - settings.begin());
    if (settings_ == settings.size()) settings.push_back(present);
  }
  return settings_;
}

uint16_t StepLog::find_thread(uint64_t present) {
  const auto found = std::find(threads.begin(), threads.end(), present);
  if (found != threads.end()) return static_cast<uint16_t>(found - threads.begin());
  threads.push_back(present);
  return static_cast<uint16_t>(threads.size() - 1);
}

uint32_t StepLog::begin_op(const OpInfo& info, c10::ArrayRef<at::IValue> inputs, uint64_t thread) {
  tracks_deaths ? sweep() : sweep_some();
  const uint32_t number = static_cast<uint32_t>(ops.size());
  OpRecord& op = ops.emplace_back();
  op.info = &info;
  op.arguments = static_cast<uint32_t>(arguments.size());
  op.tensors = static_cast<uint32_t>(tensors.size());
  for (const at::IValue& value : inputs) add_argument(op, value);
  op.tensor_count = static_cast<uint32_t>(tensors.size()) - op.tensors;
  op.settings = find_settings(info);
  op.thread = find_thread(thread);
  if (reads_clock) op.begin = read_clock();
  return number;
}

bool StepLog::is_statistic(const OpRecord& op, size_t position) const {
  const Statistics& statistics = op.info->statistics;
  const int place = static_cast<int>(position);
  if (statistics.mean < 0 || (place != statistics.mean && place != statistics.variance)) return false;
  if (statistics.training < 0) return true;
  const Argument& training = arguments[op.arguments + static_cast<size_t>(statistics.training)];
  return training.kind == ArgumentKind::VALUE && values[training.first].isBool() && values[training.first].toBool();
}

void StepLog::write(uint32_t storage, uint32_t number) {
  StorageRecord& record = storages[storage];
  if (record.last_write != NONE && writes[record.last_write].op == number) return;
  writes.push_back(Write{number, record.last_write});
  record.last_write = static_cast<uint32_t>(writes.size() - 1);
  ++record.version;
  if (record.is_alive()) {
    record.nbytes = std::max<uint64_t>(record.nbytes, record.storage->nbytes());  // it may have been resized
  }
}

void StepLog::add_result(OpRecord& op, uint32_t number, const at::Tensor& tensor) {
  tensors.push_back(describe_tensor(tensor, static_cast<uint32_t>(ops.size())));
  const TensorUse& use = tensors.back();
  if (use.storage == NONE) {
    if (use.is_defined && op.obstacle == Obstacle::NOTHING) op.obstacle = use.obstacle;
    return;
  }
  StorageRecord& record = storages[use.storage];
  // The op's arguments were seen when it began; what an op that its kernel called has read may be its result.
  if (record.made_by == NONE && record.seen_by > number) record.made_by = number;
  if (op.obstacle == Obstacle::NOTHING) op.obstacle = use.obstacle;
}

void StepLog::end_op(uint32_t number, c10::ArrayRef<at::IValue> outputs, bool has_raised) {
  OpRecord& op = ops[number];
  if (reads_clock) op.end = read_clock();
  op.has_ended = true;
  visit_written(op, [&](uint32_t storage) { write(storage, number); });
  op.results = static_cast<uint32_t>(tensors.size());
  for (const at::IValue& output : outputs) {
    if (output.isTensor()) {
      add_result(op, number, output.toTensor());
    } else if (output.isList() && output.isTensorList()) {
      for (const at::IValue& item : output.toListRef()) add_result(op, number, item.toTensor());
    }
  }
  op.result_count = static_cast<uint32_t>(tensors.size()) - op.results;
  if (has_raised) op.obstacle = Obstacle::RAISED;
  if (tracks_deaths) sweep();
}

}  // namespace elbowroom
