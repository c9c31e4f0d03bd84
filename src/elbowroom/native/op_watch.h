// Watches the ops of one step: reports writes, and records the ops that may be replayed.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <c10/core/SafePyObject.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "device_bytes.h"
#include "side_streams.h"
#include "recorded_ops.h"
#include "scope.h"
#include "state_storages.h"
#include "storage_records.h"

namespace elbowroom {

// Functions that are called during an op, in its thread. Exceptions propagate through the op.
struct Callbacks {
  std::function<void(const at::Tensor&)> before_write;  // an op is about to write to a guarded storage
  std::function<void(const at::Tensor&)> after_write;
  std::function<void(const std::string&)> leave;  // the step differs from the expected one, with the reason
  std::function<void(int64_t, bool)> move_state;  // position of an expected op, -1 if none is expected any more; whether it is to run
  std::function<bool(const std::string&, int64_t)> make_room;  // refused an op, of about so many bytes; true to retry
  // An op is about to take so many bytes; whether that is known, and whether it can run in slices. Raises an error if it
  // is to be refused without room for them.
  std::function<void(const std::string&, int64_t, bool, bool)> prepare_room;
  std::function<void()> lift_limit, restore_limit;  // in between, the allocator refuses nothing that it has
  std::function<void(const std::string&)> keep_budget;  // an op went over it
  std::function<void(c10::Stream)> note_stream;  // the step computes on this one and on another
};

class SavedTensors;

// Seconds on the steady clock.
inline double read_clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class OpWatch {
 public:
  static constexpr int64_t NEVER = int64_t{1} << 60;

  enum class Mode {
    PASS,    // writes are reported, and nothing is recorded
    FOLLOW,  // ops are compared with the expected ones, and those that the plan replays are recorded
    RECORD,  // every op that may be replayed is recorded
  };

  OpWatch(c10::Device device, std::shared_ptr<StorageTable> table, Callbacks callbacks)
      : side_streams(device, callbacks.note_stream),
        device_(device), table_(std::move(table)), scope_(table_->scope), callbacks_(std::move(callbacks)) {}

  // Position of an op in the step.
  struct Count {
    int64_t place = 0;
    int64_t tick = -1;  // in the trace, if the op must be recorded; else -1
    int64_t position = -1;  // among the expected ops; -1 if none are expected
  };

  // The facts about an op; null once the step is over.
  const OpKind* find_open_kind(const c10::OperatorHandle& op) const { return is_closed_ ? nullptr : find_kind(op); }
  bool is_closed() const { return is_closed_; }
  Count count(const OpKind& kind);
  // Returns whether an op may have to be recorded, regardless of its arguments.
  bool may_record(const Count& count) const;

  // Runs a counted op by `next`, with its arguments on the stack.
  void run(
      const c10::OperatorHandle& op, const OpKind& kind, const Count& count, torch::jit::Stack* stack,
      c10::function_ref<void()> next);
  // Runs an op that is not recorded, and writes to these tensors. `sizes`: of its arguments. `next` may be called again.
  void run_unrecorded(const OpKind& kind, at::TensorList written, const Sizes& sizes, c10::function_ref<void()> next);
  // Returns whether an op may be retried after running out of device memory: not if it draws random numbers or writes
  // to its arguments.
  bool may_retry(const OpKind& kind, at::TensorList written = {}) const {
    return callbacks_.make_room != nullptr && written.empty() && !kind.is_random && !kind.uses_up;
  }
  // Runs a counted op by `next` in slices; it writes to these tensors and is never recorded.
  void run_sliced(const OpKind& kind, at::TensorList written, c10::function_ref<void()> next);
  // Runs compiled code by `next` as one op, which writes to these tensors and is never recorded.
  void run_region(
      const std::string& name, int64_t nbytes, const std::vector<at::Tensor>& written, c10::function_ref<void()> next);

  // Records ops from now on: those that make at least `least_bytes`, write to an argument or read no tensor, while more
  // than `resting_bytes` are live.
  void record(int64_t resting_bytes, int64_t least_bytes);
  // Follows a trace from now on: names of the expected ops, the tick of each op to record (else -1), and for each
  // tensor that such an op reads, where a replay finds it. The first `required` ops must run as expected; if a later one
  // differs, the watch stops following.
  void follow(std::vector<std::string> names, std::vector<int64_t> ticks, std::unordered_map<int64_t, std::vector<Source>> kept,
      size_t required);
  // Positions of ops before and after which model state moves.
  void set_state_moves(std::unordered_set<int64_t> before, std::unordered_set<int64_t> after) {
    moves_before_ = std::move(before);
    moves_after_ = std::move(after);
  }
  // Makes the moves of state that the plan has before or after an expected op.
  void move_state(int64_t position, bool is_before) const {
    if (position < 0 || mode_ != Mode::FOLLOW) return;
    if ((is_before ? moves_before_ : moves_after_).count(position) > 0) callbacks_.move_state(position, is_before);
  }
  void pass() { mode_ = Mode::PASS; }
  // Has an object run ops in slices that have no room as a whole. It knows some such ops already, if their tensor
  // arguments take at least `least_bytes`. `slicer`: a weak reference to it. Others keep the state of a step's threads,
  // and this with it, for as long as they live (DDP's reducer does), and the object refers to the model.
  void set_slicer(std::shared_ptr<c10::SafePyObject> slicer, int64_t least_bytes) {
    slicer_ = std::move(slicer);
    sliced_bytes = least_bytes;
  }
  // Whether requests are limited by what the device's allocator counts.
  bool limits_device() const { return limit_bytes < NEVER; }
  // Calls `next`, which is refused nothing that the device has.
  void run_unrefused(c10::function_ref<void()> next);
  // Has the device's allocator limit requests again, unless an op runs that must not be refused any.
  void restore_limit();
  // Whether there is room on a device for what an op took before, with such arguments.
  bool is_known_to_fit(const OpKind& kind, const c10::IValue* arguments, size_t count) const;
  // Whether an op may be refused memory that takes as much as its arguments, twice.
  bool is_tight(int64_t nbytes) const { return scope_ != nullptr && scope_->live_bytes() + 2 * nbytes > scope_->limit_bytes(); }
  // Whether ops run in slices.
  bool has_slicer() const { return slicer_ != nullptr; }
  // The object that runs them, None if it is gone. With the GIL.
  pybind11::object find_slicer() const {
    return pybind11::reinterpret_steal<pybind11::object>(PyObject_CallNoArgs(slicer_->ptr(getPyInterpreter())));
  }
  // Notes results of at least so many bytes from now on, while there is managed state: they may have to leave as it does.
  void note_results(int64_t least_bytes) { noted_bytes_ = least_bytes; }
  bool notes_results() const { return noted_bytes_ < NEVER && StateTable::is_any_managed() && !is_closed_; }
  enum class Origin {
    OP,
    FACTORY,  // an op without tensor arguments
    SAVED,    // autograd is given a saved tensor
  };
  void note_result(const at::Tensor& tensor, Origin origin);
  // Notes a saved tensor that autograd is given, unless an op of another thread may use it that began unnoticed.
  void note_saved(const at::Tensor& tensor) {
    if (knows_uses_ && notes_results()) note_result(tensor, Origin::SAVED);
  }
  // Returns the storages of noted tensors that are still there, oldest first, and whether they may be
  // gradients, or buffers for them.
  std::vector<std::pair<c10::Storage, bool>> list_results() const;

  // Ends the step: every op passes unwatched.
  void close();

  // Returns the target's recording, made of the ops recorded at these ticks so far.
  RecordingPtr make_recording(const std::vector<int64_t>& ticks, StorageRecordPtr target);

  int64_t ops() const { return ops_; }
  // Counts ops that have run before the watch began. Call it before `follow`.
  void skip(int64_t ops) { ops_ = ops, position_ = static_cast<size_t>(ops); }
  int64_t recorded_ops() const { return recorded_ops_; }
  // Seconds of the step so far, without those spent in our own Python code.
  double busy_seconds(double now = read_clock_seconds()) const { return now - begin_seconds_ - lost_seconds_; }
  void lose(double seconds) { lost_seconds_.fetch_add(seconds, std::memory_order_relaxed); }
  StorageTable& table() { return *table_; }

  // Bytes that may be live on a device whose allocator does not ask for room itself; NEVER while a plan keeps them.
  std::atomic<int64_t> limit_bytes{NEVER};

  std::atomic<int64_t> due_ops{NEVER};  // number of ops after which the step differs from the expected one

  // Bytes of the tensor arguments of the smallest op that is known to have no room as a whole.
  std::atomic<int64_t> sliced_bytes{NEVER};

  std::atomic<bool> has_waiting{false};  // whether ops wait, to run in slices together with the next one

  std::weak_ptr<SavedTensors> saved_tensors;  // of the same step

  SideStreams side_streams;

  // Returns whether the bytes of a tensor may move in this step: autograd has saved it, or it is state.
  bool may_move(const at::Tensor& tensor) const;

 private:
  // Makes room for what an op reads and was there before the step, and has the ledger count it.
  void count_inputs(const c10::IValue* arguments, size_t count);
  RecordedOpPtr describe(
      const c10::OperatorHandle& op, const OpKind& kind, const c10::IValue* arguments, size_t count, int64_t tick);
  Count count(const std::string& name);
  bool is_expected(const std::string& name, Count& count);
  // Calls `next`, within the limit if there is one. If the device refuses memory, calls `restore` and retries; null: no
  // retry.
  void call(
      const OpKind& kind, at::TensorList written, const Sizes& sizes, c10::function_ref<void()> next,
      const std::function<void()>* restore);
  // The same without making room first. `before`: the bytes when `next` began, if they are limited.
  void retry(
      const OpKind& kind, at::TensorList written, const Sizes& sizes, c10::function_ref<void()> next,
      const std::function<void()>* restore, const DeviceBytes* before = nullptr);
  void put_down(RecordedOpPtr op, const torch::jit::Stack& results, size_t count, at::TensorList written, int64_t tick);
  // Calls `next` on a device whose allocator does not ask for room. Room is made before, as far as is known what it
  // takes; an op that can run in slices is refused if much of that is missing. Unless it is repeated after a refusal, it
  // is refused nothing that the device has. `before` is set to the bytes when it begins; if it is repeated, `next` sets
  // it to those when it began for the last time.
  void run_within_limit(
      const std::string& name, const Sizes& sizes, int64_t guess, bool is_repeated, bool is_sliceable, DeviceBytes& before,
      c10::function_ref<void()> next);
  class Unrefused;
  void lift_limit();
  // After a failed op: forgets the ops that made what it may have written to.
  void forget_ops(at::TensorList written);
  enum class Write { BEGINS, ENDS, ENDS_UNRECORDED, ENDS_IN_REGION };
  // Reports that an op is about to write to these, or has written.
  void tell(Write moment, at::TensorList written);

  const c10::Device device_;
  const std::shared_ptr<StorageTable> table_;
  Scope* const scope_;  // null without a ledger
  const Callbacks callbacks_;
  std::atomic<Mode> mode_{Mode::PASS};
  std::atomic<bool> is_closed_{false};
  std::atomic<int64_t> ops_{0}, recorded_ops_{0};
  const double begin_seconds_ = read_clock_seconds();
  std::atomic<double> lost_seconds_{0};
  int64_t resting_bytes_ = 0, least_bytes_ = 0;
  std::mutex lift_mutex_;
  std::atomic<int64_t> unrefused_ops_{0};  // that run and must not be refused memory
  std::atomic<bool> is_lifted_{false};  // changes with the mutex
  // In mode FOLLOW.
  std::vector<std::string> names_;
  std::vector<int64_t> ticks_;
  std::unordered_map<int64_t, std::vector<Source>> kept_;
  std::atomic<size_t> position_{0};
  std::unordered_set<int64_t> moves_before_, moves_after_;
  size_t required_ = 0;
  std::shared_ptr<c10::SafePyObject> slicer_;
  std::unordered_map<int64_t, RecordedOpPtr> by_tick_;  // with the table's mutex
  struct Result {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    bool may_be_gradient;
  };
  std::vector<Result> results_;  // likewise
  const bool knows_uses_ = StateTable::is_any_managed();  // of all ops, from the beginning of the step
  size_t sweep_results_at_ = 256;
  std::atomic<int64_t> noted_bytes_{NEVER};
};

}  // namespace elbowroom
