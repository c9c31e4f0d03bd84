// Ops that a step ran, and how they are run again: what is replayed is the operator and the arguments of this very step.
//
//     x --matmul--> t --gelu--> y (saved)         how y is computed again: matmul, gelu, from x, if x is there
//
// An op holds the records of the storages that it read, and a record the ops that wrote to it; what nothing leads back to
// any more is forgotten by itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "op_kinds.h"
#include "settings.h"
#include "storage_records.h"

namespace elbowroom {

// A tensor argument: which storage, and how it lies there.
struct Slot {
  StorageRecordPtr record;
  c10::Storage kept;  // the storage itself where the program holds it anyway
  c10::ScalarType dtype;
  c10::DimVector sizes, strides;
  int64_t offset;
  int64_t version;  // of the record, when the op read it
  uint32_t argument;
  int32_t item;  // in a list of tensors; -1 of a single tensor
  bool is_read = true;  // not of statistics that the op only updates
};

// A plain strided tensor on a device of this type, whose bytes alone are its value.
bool is_plain(const at::Tensor& tensor, c10::DeviceType device);

// One op that ran.
class RecordedOp final : public c10::intrusive_ptr_target {
 public:
  RecordedOp(const c10::OperatorHandle& op, const OpKind& kind) : op(op), kind(kind) {}

  // Run it again; `find` returns the storage of a slot. Returns its results in order.
  template <typename Find>
  std::vector<at::Tensor> replay(const Find& find) const;
  // Whether it may write to an argument.
  bool writes(int64_t argument) const;

  const c10::OperatorHandle op;
  const OpKind& kind;
  int64_t place = 0;  // among the ops of the step
  std::vector<c10::IValue> arguments;  // without tensors
  std::vector<uint32_t> lengths;  // of each argument, if it is a list of tensors
  std::vector<Slot> slots;
  struct Made {
    c10::weak_intrusive_ptr<StorageRecord> record;
    int64_t nbytes;
  };
  std::vector<Made> results;  // of the tensors that it returned
  std::vector<Made> written;  // of arguments that it wrote to
  Settings settings{};
  double seconds = 0;
  int64_t inner_bytes = 0;  // most that it allocated beside its results
};

// With the table's mutex: describes what an op is about to be given. Null if it cannot be had again. `kept`: of each tensor
// that it reads, whether the program holds its storage throughout the step; null where only records tell.
RecordedOpPtr describe(
    const c10::OperatorHandle& op, const OpKind& kind, const c10::IValue* arguments, size_t count, StorageTable& table,
    c10::DeviceType device, const std::vector<bool>* kept);

// How one storage is computed again.
class Recording final : public c10::intrusive_ptr_target {
 public:
  // Takes the ops that the target needs from some that may be needed.
  Recording(std::vector<RecordedOpPtr> ops, StorageRecordPtr target);

  // With the table's mutex: whether all leaves are saved, and all that is read is as it was.
  bool is_open() const;
  bool is_current() const;

  StorageRecordPtr target;
  std::vector<RecordedOpPtr> ops;  // in order; none if nothing makes the target
  std::vector<StorageRecordPtr> leaves;  // that the replay reads, and autograd has saved
  std::vector<StorageRecordPtr> sources;  // that it reads of what outlives the step
  std::vector<c10::Storage> kept;  // of the sources
  double seconds = 0;
  int64_t nbytes = 0;  // most that the replay allocates at once
};
using RecordingPtr = c10::intrusive_ptr<Recording>;

// With the table's mutex: finds the ops that lead to a storage from what is saved or stays. Null if there are none.
RecordingPtr find_recording(const StorageRecordPtr& target);

// Most that it takes to compute the targets of some recordings again, all at once.
int64_t count_replay(const std::vector<RecordingPtr>& recordings);

// Computes the targets of some recordings again, together. `leaves`: their storages. Returns the targets' storages.
// Autograd, saved-tensor hooks, autocast, dispatch modes and watchers are not involved.
std::vector<c10::Storage> replay(
    const std::vector<RecordingPtr>& recordings, const std::unordered_map<StorageRecord*, c10::Storage>& leaves);

}  // namespace elbowroom
