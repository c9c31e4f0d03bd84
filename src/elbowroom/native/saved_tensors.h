// What autograd saves and needs in one step.
//
// Most of it stays as it is: it is put down in a log, and Python learns of it when that matters. Python is asked at once
// where something may move.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "op_watch.h"
#include "storage_records.h"
#include "trace_follower.h"

namespace elbowroom {

using PythonObject = std::shared_ptr<c10::SafePyObject>;

// One tensor that autograd has saved. `tensor` and `handle` are changed with the mutex of the step's table, and with
// Python's lock unless autograd has given the save up.
struct Save {
  int64_t index = 0;    // counts the saves of the step
  int64_t version = 0;  // of the tensor when it was saved
  at::Tensor tensor;    // shares its bytes and its version counter; undefined where the handle stands for it
  StorageRecordPtr record;  // of its storage, where that may come to move; else null
  int64_t seen = 0;         // the record's version when the tensor was saved
  PythonObject handle;      // the object in Python that is told when autograd gives it up; null where nobody has to be
  bool is_given_up = false;
};
using SavePtr = std::shared_ptr<Save>;

class SavedTensors {
 public:
  // Functions that are called without the mutex. What they throw passes through autograd.
  struct Answer {
    PythonObject handle;
    bool stays = true;  // the tensor, as it is
  };
  struct Callbacks {
    // A tensor is saved: its index, and its record, which is null of what is no plain tensor on the device.
    std::function<Answer(int64_t, const at::Tensor&, const StorageRecordPtr&)> save;
    // A tensor is needed: the index of the need, and the save. Returns it; an undefined one where that is the save's own.
    std::function<at::Tensor(int64_t, const SavePtr&)> need;
    // The step is not the one that is expected: why.
    std::function<void(const std::string&)> change;
  };
  enum class Event : uint8_t { SAVED, NEEDED, FREED };
  struct Entry {
    Event event;
    int64_t storage;  // `NO_STORAGE` of what is no plain tensor, or outlives the step
    int64_t tick;
    int64_t nbytes;  // of what is saved
    double seconds;  // on the steady clock
    double busy_seconds;
    int64_t live_bytes;
  };
  static constexpr int64_t NO_STORAGE = -1;

  SavedTensors(
      std::shared_ptr<OpWatch> watch, c10::Device device, Callbacks callbacks, std::vector<TimetablePtr> known,
      int64_t least_bytes);

  // What autograd is to call for the next tensor that a step saves.
  static std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks(std::shared_ptr<SavedTensors> step);

  // From now on, log what autograd does, until `tell`. Python is told of the storages that are `touched` (by the ids of the
  // trace), and of all from the tick that is due.
  void log(std::unordered_set<int64_t> touched, int64_t due_tick);
  void set_due_tick(int64_t due_tick);
  // From now on Python is told of everything. Returns what was logged.
  std::vector<Entry> tell();
  // The step is over: no more is logged.
  void end();
  // Python logs an event; ignored while there is no log.
  void note(Event event, int64_t storage, int64_t tick, int64_t nbytes);
  // Everything that may come to move gets a handle, by `make_handle`.
  void settle(const std::function<PythonObject(const SavePtr&)>& make_handle);

  // What Python asks of the follower when it is told of a save or a need. Returns its tick.
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
  // With the mutex: keep a plain tensor as it is. It may come to move if its storage may.
  void keep(const SavePtr& save, const at::Tensor& tensor, const StorageRecordPtr& record);
  at::Tensor need(const SavePtr& save);
  void give_up(const SavePtr& save);

  bool log_save(int64_t index, const StorageRecordPtr& record);
  bool log_need(int64_t index, const Save& save);
  void put_down(Event event, int64_t storage, int64_t tick, int64_t nbytes);
  int64_t count_live_bytes() const;

  const std::shared_ptr<OpWatch> watch_;
  const c10::Device device_;
  const Callbacks callbacks_;
  std::mutex& mutex_;  // of the table
  TraceFollower follower_;
  bool is_logging_ = false, has_log_ = false;
  std::unordered_set<int64_t> touched_;
  int64_t due_tick_ = -1;
  std::vector<Entry> log_;
  std::vector<std::weak_ptr<Save>> loose_;  // without handles, of storages that may come to move
  int64_t next_id_ = 0, saves_ = 0, needs_ = 0;
  std::vector<int64_t> sizes_;
};

}  // namespace elbowroom
