// The tensors that autograd saves and needs in one step.
//
// Most of them stay as they are: these events are only logged, and reported to Python when it matters. So are those of
// storages that a plan only copies. Events of other storages that may move call Python at once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "op_watch.h"
#include "planned_storages.h"
#include "storage_records.h"
#include "trace_follower.h"

namespace elbowroom {

// One tensor that autograd has saved. `tensor` and `handle` change with the mutex of the step's table held, and with
// the GIL unless autograd has released the save.
struct Save {
  int64_t index = 0;    // of the save in the step
  int64_t version = 0;  // version counter of the tensor when it was saved
  at::Tensor tensor;    // shares its bytes and its version counter; undefined if the handle replaces it
  StorageRecordPtr record;  // of its storage, if that may come to move; else null
  int64_t seen = 0;         // the record's version when the tensor was saved
  PlannedStoragePtr home;   // its storage, if that is moved by the plan alone; then `view` replaces the tensor
  SavedViewPtr view;
  PythonObject handle;      // Python object to release when autograd releases the save; null if none is needed
  bool is_given_up = false;  // autograd has released the save
};
using SavePtr = std::shared_ptr<Save>;

class SavedTensors {
 public:
  // Called without the mutex. Exceptions propagate through autograd.
  struct Answer {
    PythonObject handle;
    bool stays = true;  // the tensor is kept as it is
  };
  // A tensor that wraps another one, and what makes it of that again.
  struct Opened {
    at::Tensor inner;
    std::function<at::Tensor(const at::Tensor&)> close;
  };
  struct Callbacks {
    // A tensor is saved. Arguments: index of the save, tensor, and record (null for tensors that are not plain).
    std::function<Answer(int64_t, const at::Tensor&, const StorageRecordPtr&)> save;
    // A tensor is needed. Arguments: index of the need, save. Returns the tensor; an undefined one for the save's own.
    std::function<at::Tensor(int64_t, const SavePtr&)> need;
    // Moves of the plan are due. Argument: tick.
    std::function<void(int64_t)> move;
    // A tensor is needed whose storage is not there. Arguments: save, storage, tick. Returns the tensor; makes the
    // moves that are due.
    std::function<at::Tensor(const SavePtr&, int64_t, int64_t)> bring;
    // The step differs from the expected one. Argument: the reason.
    std::function<void(const std::string&)> change;
    // Takes a tensor of a subclass apart, if it wraps one that may come to move.
    std::function<std::optional<Opened>(const at::Tensor&)> open;
  };
  enum class Event : uint8_t { SAVED, NEEDED, FREED };
  struct Entry {
    Event event;
    int64_t storage;  // `NO_STORAGE` for tensors that are not plain or outlive the step
    int64_t tick;
    int64_t nbytes;  // of a saved storage
    double seconds;  // on the steady clock
    double busy_seconds;
    int64_t live_bytes;
  };
  static constexpr int64_t NO_STORAGE = -1;

  SavedTensors(
      std::shared_ptr<OpWatch> watch, c10::Device device, Callbacks callbacks, std::vector<TimetablePtr> known,
      int64_t least_bytes);

  // Returns the hooks for the next tensor that a step saves.
  static std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks(std::shared_ptr<SavedTensors> step);

  // Logs events until `tell`. Only events of `touched` storages (ids in the trace) that are not `planned` call Python at
  // once, and moves at events from `due_tick` on; all events if that is negative.
  void log(std::unordered_set<int64_t> touched, std::unordered_set<int64_t> planned, int64_t due_tick);
  void set_due_tick(int64_t due_tick);
  // Logs events until the end of the step. Only saves and needs of storages that Python handles call it at once.
  void defer();
  // Until the next call, has Python called after a save with at least `high_bytes` live, and after a need with at most
  // `low_bytes`.
  void set_marks(int64_t low_bytes, int64_t high_bytes);
  // Returns the log since the last call.
  std::vector<Entry> take_log();
  // Returns the storages saved since the last call that may come to move, and whether an op has written to them since.
  std::vector<std::pair<StorageRecordPtr, bool>> take_new();
  // Returns the storages given by `take_new` that autograd has released since the last call.
  std::vector<StorageRecordPtr> take_released();
  // Stops logging, so that all events call Python. Returns the log.
  std::vector<Entry> tell();
  // Ends the step: discards the log.
  void end();
  // Adds an event from Python to the log, if there is one.
  void note(Event event, int64_t storage, int64_t tick, int64_t nbytes);
  // Gives a handle from `make_handle` to every save whose storage may come to move, or only to those of planned ones,
  // which are handed over.
  using MakeHandle = std::function<PythonObject(const SavePtr&, const PlannedStorages::Handover*)>;
  void settle(const MakeHandle& make_handle, bool only_planned);
  // Gives a handle to every save of a storage that has none.
  void hand_over(const StorageRecordPtr& record, const MakeHandle& make_handle);
  // The saved tensor, of a planned storage that is there; undefined otherwise.
  at::Tensor make(const Save& save);
  PlannedStorages& planned() { return *planned_; }

  // Follow a save or a need that was reported to Python. Return its tick.
  int64_t follow_save(int64_t index, const StorageRecordPtr& record);
  int64_t follow_need(int64_t index, int64_t save);
  void leave(const std::string& why);
  void stop(const std::string& why);
  int64_t followed() const;
  int64_t tick() const;
  bool is_persistent(int64_t save) const;

  int64_t make_id();
  int64_t saves() const;
  int64_t needs() const;
  std::vector<int64_t> sizes() const;

 private:
  class Hooks;

  SavePtr save(const at::Tensor& tensor);
  // Keeps a plain tensor as it is, with the mutex held. Its storage may come to move later.
  void keep(const SavePtr& save, const at::Tensor& tensor, const StorageRecordPtr& record);
  at::Tensor need(const SavePtr& save);
  void give_up(const SavePtr& save);

  // Log the next event, if Python need not be told of it. Return its tick.
  std::optional<int64_t> log_save(int64_t index, const StorageRecordPtr& record);
  std::optional<int64_t> log_need(int64_t index, const Save& save);
  void put_down(Event event, int64_t storage, int64_t tick, int64_t nbytes);
  int64_t count_live_bytes() const;
  // Removes a save from those that its storage's record keeps, with the mutex held.
  void forget_kept(const Save& save);

  const std::shared_ptr<OpWatch> watch_;
  const c10::Device device_;
  const Callbacks callbacks_;
  std::mutex& mutex_;  // of the table
  const std::unique_ptr<PlannedStorages> planned_;
  TraceFollower follower_;
  bool is_logging_ = false, has_log_ = false, is_deferring_ = false;
  int64_t low_bytes_ = -1, high_bytes_ = OpWatch::NEVER;
  std::vector<StorageRecordPtr> released_;
  std::unordered_set<int64_t> touched_;
  int64_t due_tick_ = -1;
  std::vector<Entry> log_;
  std::vector<std::weak_ptr<Save>> loose_;  // saves without handles whose storages may come to move
  int64_t next_id_ = 0, saves_ = 0, needs_ = 0;
  std::vector<int64_t> sizes_;
};

}  // namespace elbowroom
