// Ops that a step ran, and their replays with the same arguments.
//
//     x --matmul--> t --gelu--> y (saved)         recording of y: matmul, gelu, starting from x
//
// An op refers to the records of the storages that it read, and a record to the ops that wrote to it. Ops and records
// without references are freed.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "contents.h"
#include "op_kinds.h"
#include "settings.h"
#include "storage_records.h"

namespace elbowroom {

// Keys excluded in a replay, which runs below autograd and unwatched in any state of the thread.
constexpr c10::DispatchKeySet HIDDEN =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
    c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Fake});

// Where a replay finds what an op read.
enum class Source : uint8_t {
  STEP,       // made or saved by the step
  KEPT,       // held by the program throughout the step
  COMES_BACK  // likewise, but its contents go and come back without an op
};

// A tensor argument: its storage, and its view of the storage.
struct Slot {
  StorageRecordPtr record;
  c10::Storage kept;  // the storage itself, if the program holds it throughout the step
  Digest contents;  // what the op read, if contents come back; known of no other slot
  c10::ScalarType dtype;
  c10::DimVector sizes, strides;
  int64_t offset;
  int64_t version;  // of the record, when the op read it
  int64_t unwatched_writes;  // to the record, before the op read it
  uint32_t argument;
  int32_t item;  // index in a list of tensors; -1 for a single tensor
  bool is_read = true;  // false for statistics that the op only updates
};

// Returns whether a tensor is plain: strided, on a device of this type, and its bytes alone are its value.
bool is_plain(const at::Tensor& tensor, c10::Device device);

// One op that ran.
class RecordedOp final : public c10::intrusive_ptr_target {
 public:
  RecordedOp(const c10::OperatorHandle& op, const OpKind& kind) : op(op), kind(kind) {}

  // Runs the op again and returns its results in order. `find` returns the tensor of a slot.
  template <typename Find>
  std::vector<at::Tensor> replay(const Find& find) const;
  // Returns whether the op may write to an argument.
  bool writes(int64_t argument) const;

  const c10::OperatorHandle op;
  const OpKind& kind;
  int64_t place = 0;  // index among the ops of the step
  std::vector<c10::IValue> arguments;  // without tensors
  std::vector<uint32_t> lengths;  // of the arguments that are lists of tensors
  std::vector<Slot> slots;
  struct Made {
    c10::weak_intrusive_ptr<StorageRecord> record;
    int64_t nbytes;
  };
  std::vector<Made> results;  // storages of the returned tensors
  std::vector<Made> written;  // storages of the arguments that it wrote to
  Settings settings{};
  double seconds = 0;
  int64_t inner_bytes = 0;  // peak allocated beyond its results
};

// With the table's mutex: describes what an op is about to be given. Null if it cannot be had again. `kept`: of each tensor
// that it reads, where a replay finds it; null where only records tell.
RecordedOpPtr describe(
    const c10::OperatorHandle& op, const OpKind& kind, const c10::IValue* arguments, size_t count, StorageTable& table,
    c10::Device device, const std::vector<Source>* kept);

// The ops that recompute one storage.
class Recording final : public c10::intrusive_ptr_target {
 public:
  // Selects those of the given ops that the target needs.
  Recording(std::vector<RecordedOpPtr> ops, StorageRecordPtr target);

  // With the table's mutex held: whether all inputs are unchanged, but for those whose contents come back (`is_current`),
  // and all leaves are saved (`is_open`).
  bool is_open() const;
  bool is_current() const;
  // With the table's mutex held: returns whether no op that is not watched has written to what the ops read, since they
  // read it. `copied`: leaves and sources of which the replay reads copies.
  bool is_intact(const std::vector<StorageRecord*>& copied) const;
  // Returns whether all storages whose contents come back have those that the ops read.
  bool is_back() const;

  StorageRecordPtr target;
  std::vector<RecordedOpPtr> ops;  // in order; empty if none makes the target
  std::vector<StorageRecordPtr> leaves;  // inputs that autograd has saved
  std::vector<StorageRecordPtr> sources;  // inputs that the program holds throughout the step
  std::vector<c10::Storage> kept;  // storages of the sources
  double seconds = 0;
  int64_t nbytes = 0;  // peak that the replay allocates
  int64_t read_bytes = 0;  // of the storages that the replay starts from, which it needs on the device

 private:
  bool starts_from(const Slot& slot) const;
};
using RecordingPtr = c10::intrusive_ptr<Recording>;

// Finds the ops that compute a storage from saved or persistent storages, with the table's mutex held. Null if there
// are none.
RecordingPtr find_recording(const StorageRecordPtr& target);

// Peak bytes that replaying several recordings together allocates.
int64_t count_replay(const std::vector<RecordingPtr>& recordings);

// Replays several recordings together and returns the storages of their targets. `leaves`: storages of the leaves, and of
// sources that have changed.
// Autograd, saved-tensor hooks, autocast, dispatch modes and watchers do not see the ops.
std::vector<c10::Storage> replay(
    const std::vector<RecordingPtr>& recordings, const std::unordered_map<StorageRecord*, c10::Storage>& leaves);

}  // namespace elbowroom
