// Watches the ops of one step: tells of writes, and records the ops that may be replayed.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "recorded_ops.h"
#include "scope.h"
#include "storage_records.h"

namespace elbowroom {

// Functions that are called in the thread and at the moment of an op. What they throw passes through it.
struct Callbacks {
  std::function<void(const at::Tensor&)> before_write;  // an op is about to write to what Python knows
  std::function<void(const at::Tensor&)> after_write;
  std::function<void(const std::string&)> leave;  // why the step is not the one that is expected
  std::function<bool(const std::string&)> make_room;  // the device has no memory for an op; whether to try again
};

class SavedTensors;

// Seconds on the steady clock.
inline double read_clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class OpWatch {
 public:
  enum class Mode {
    PASS,    // writes are told of, and nothing is recorded
    FOLLOW,  // ops are compared with those that are expected, and those that are wanted are recorded
    RECORD,  // every op that may be replayed is recorded
  };

  OpWatch(c10::DeviceType device, std::shared_ptr<StorageTable> table, Callbacks callbacks)
      : device_(device), table_(std::move(table)), scope_(table_->scope), callbacks_(std::move(callbacks)) {}

  // Which of the step's ops one is.
  struct Count {
    int64_t place = 0;
    int64_t tick = -1;  // at which it is wanted, else -1
  };

  // What is known of an op; null where it is not watched, since the step is over.
  const OpKind* find_open_kind(const c10::OperatorHandle& op) const { return is_closed_ ? nullptr : find_kind(op); }
  bool is_closed() const { return is_closed_; }
  Count count(const OpKind& kind);
  // Whether an op may have to be recorded, whatever it is given.
  bool may_record(const Count& count) const;

  // Runs an op, which has been counted, by `next`, whose arguments are on the stack.
  void run(
      const c10::OperatorHandle& op, const OpKind& kind, const Count& count, torch::jit::Stack* stack,
      c10::function_ref<void()> next);
  // Runs an op that is not recorded and writes to these tensors; `next` may be called again.
  void run_unrecorded(const OpKind& kind, at::TensorList written, c10::function_ref<void()> next);
  // Whether an op may be run again where the device has no memory. To draw random numbers or to write once more would not
  // be the same.
  bool may_retry(const OpKind& kind, at::TensorList written = {}) const {
    return callbacks_.make_room != nullptr && written.empty() && !kind.is_random;
  }
  // Runs compiled code by `next`, as one op, which writes to these tensors and is never recorded.
  void run_region(const std::string& name, const std::vector<at::Tensor>& written, c10::function_ref<void()> next);

  // From now on, ops that make fewer bytes are not recorded, unless they write or read no tensors; nor is any while no more
  // than `resting_bytes` are there.
  void record(int64_t resting_bytes, int64_t least_bytes);
  // From now on, follow: names of the ops that are expected, the tick of each that is wanted, else -1, and of each wanted
  // one's reads whether the program holds them throughout the step.
  void follow(std::vector<std::string> names, std::vector<int64_t> ticks, std::unordered_map<int64_t, std::vector<bool>> kept);
  void pass() { mode_ = Mode::PASS; }
  // The step is over: every op passes, and nobody is told.
  void close();

  // The target's recording, of the ops that were recorded at these ticks so far.
  RecordingPtr make_recording(const std::vector<int64_t>& ticks, StorageRecordPtr target);

  int64_t ops() const { return ops_; }
  int64_t recorded_ops() const { return recorded_ops_; }
  // What the step has taken so far, without what it spent in Python on our behalf.
  double busy_seconds(double now = read_clock_seconds()) const { return now - begin_seconds_ - lost_seconds_; }
  void lose(double seconds) { lost_seconds_.fetch_add(seconds, std::memory_order_relaxed); }
  StorageTable& table() { return *table_; }

  std::atomic<int64_t> due_ops{NEVER};  // more are no ops of the step that is expected

  std::weak_ptr<SavedTensors> saved_tensors;  // of the same step

  static constexpr int64_t NEVER = int64_t{1} << 60;

 private:
  // Makes room for what an op reads and was there before the step, and has the ledger count it.
  void count_inputs(const c10::IValue* arguments, size_t count);
  RecordedOpPtr describe(
      const c10::OperatorHandle& op, const OpKind& kind, const c10::IValue* arguments, size_t count, int64_t tick);
  Count count(const std::string& name);
  bool is_expected(const std::string& name, int64_t* tick);
  // Calls `next`. Where the device has no memory, `restore` is called before it is called again; null: it is not.
  void call(
      const OpKind& kind, at::TensorList written, c10::function_ref<void()> next,
      const std::function<void()>* restore);
  void put_down(RecordedOpPtr op, const torch::jit::Stack& results, size_t count, at::TensorList written, int64_t tick);
  // It is not known any more how these were made.
  void forget_ops(at::TensorList written);
  // An op is about to write to these, or has.
  void tell(const std::function<void(const at::Tensor&)>& callback, at::TensorList written, bool forgets = false);

  const c10::DeviceType device_;
  const std::shared_ptr<StorageTable> table_;
  Scope* const scope_;  // null where no ledger counts
  const Callbacks callbacks_;
  std::atomic<Mode> mode_{Mode::PASS};
  std::atomic<bool> is_closed_{false};
  std::atomic<int64_t> ops_{0}, recorded_ops_{0};
  const double begin_seconds_ = read_clock_seconds();
  std::atomic<double> lost_seconds_{0};
  int64_t resting_bytes_ = 0, least_bytes_ = 0;
  // While it follows.
  std::vector<std::string> names_;
  std::vector<int64_t> ticks_;
  std::unordered_map<int64_t, std::vector<bool>> kept_;
  std::atomic<size_t> position_{0};
  std::unordered_map<int64_t, RecordedOpPtr> by_tick_;  // with the table's mutex
};

}  // namespace elbowroom
