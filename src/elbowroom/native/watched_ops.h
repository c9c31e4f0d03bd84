// Runs each op of a thread through its watchers.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "op_kinds.h"
#include "state_storages.h"

namespace elbowroom {

class OpWatch;
struct Watchers;

// State of a thread. One variable, since each access to a thread-local variable may take a call.
struct Thread {
  const Watchers* watchers = nullptr;  // entered by this thread; null if inherited through autograd
  OpWatch* only = nullptr;  // the only one of them, if there is one
  size_t busy = 0;  // innermost watchers that are running an op: they do not see the ops that it calls
  const std::string* running = nullptr;  // name of the op; null outside of watched ops
  OpWatch* moves = nullptr;  // whose plan may move state after the op that has run last
  int64_t position = -1;  // of that op among the expected ones
  double lost_seconds = 0;  // spent in our own Python code: not charged to ops
  bool skips_callbacks = false;  // its ops come to its watchers, and PyTorch does not call callbacks for them
  bool has_skipped = false;  // it has since its step began: autograd may skip them again when a hook returns
  unsigned called_back = 0;  // `CalledBack` objects that have switched callbacks on
  unsigned ops_without_callbacks = 0;
  bool is_aside = false;  // its ops are not part of the step, but what they write is reported
  bool has_left = false;  // its step ended in a backward pass, which restores the state that the thread had before
};

inline Thread& get_thread() {
  static thread_local constinit Thread thread;
  return thread;
}

// PyTorch up to 2.15 reserves this key and registers nothing for it.
constexpr c10::DispatchKey WATCHED_KEY = c10::DispatchKey::Fake;
constexpr c10::DispatchKeySet BELOW_WATCH(c10::DispatchKeySet::FULL_AFTER, WATCHED_KEY);

// Whether ops reach the watchers' key before dispatch modes and tensor subclasses, as in PyTorch 2.11 and 2.12.
constexpr bool IS_ABOVE_MODES = WATCHED_KEY > c10::DispatchKey::Python;

// Whether callbacks are skipped for this thread's ops, by us and not by the program.
bool are_callbacks_skipped(const Thread& thread);

// While the ops of a thread come to its watchers, PyTorch does not call callbacks for them where ours would be the only
// one (`RecordFunction`), since that costs as much as watching. It does while this object exists, for ops that use more
// than the arguments of the op that they run in.
class CalledBack {
 public:
  CalledBack() : is_needed_(StateTable::is_any_managed() && are_callbacks_skipped(get_thread())) {
    if (!is_needed_) return;
    ++get_thread().called_back;
    at::enableRecordFunction(true);
  }
  ~CalledBack() {
    if (!is_needed_) return;
    Thread& thread = get_thread();
    --thread.called_back;
    if (thread.skips_callbacks || thread.watchers == nullptr) at::enableRecordFunction(false);
  }
  CalledBack(const CalledBack&) = delete;
  CalledBack& operator=(const CalledBack&) = delete;

 private:
  const bool is_needed_;
};

// Leaves a step that ended in a backward pass once more after that pass: it has restored the step's watchers, dispatch key
// and skipped callbacks. Does nothing before.
void leave_again(Thread& thread);

// Has PyTorch call the callbacks that the program has added in the middle of a step, such as a profiler's.
void heed_profilers(Thread& thread);

// Hides ops from watchers and dispatch modes. For plain tensors only: others need their modes.
class HiddenOps {
 public:
  HiddenOps() = default;

 private:
  const c10::impl::ExcludeDispatchKeyGuard keys_{
      c10::DispatchKeySet({WATCHED_KEY, c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  const CalledBack called_back_;
};

// Returns whether a dispatch mode or a tensor subclass still has to run an op. Watchers see the ops that it calls.
inline bool is_for_python(c10::DispatchKeySet keys) { return IS_ABOVE_MODES && keys.has(c10::DispatchKey::Python); }

// Runs an op through all watchers.
void run_watched(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Runs an op in slices that has failed as a whole with this error, and has not written to anything. Its arguments are on
// the stack, and its results take their place. Returns false if it is not to run in slices.
bool run_refused(
    OpWatch& watch, const c10::OperatorHandle& op, const OpKind& kind, torch::jit::Stack* stack, python_error& refusal);

// Returns the only watcher that this thread has inherited through autograd, if it is an `OpWatch`; else null.
OpWatch* find_handed_watch();

// Whether this thread has entered watchers, or has inherited them through autograd.
bool has_watchers(const Thread& thread);

// Returns the watch to run an op of this thread, if it is the only watcher; else null.
inline OpWatch* find_only_watch(const Thread& thread) {
  if (thread.busy > 0) return nullptr;
  return thread.watchers != nullptr ? thread.only : find_handed_watch();
}

// Calls `run`, which runs ops that waited. Those of their slices are below autograd, and unseen by watchers.
void run_waiting(c10::function_ref<void()> run);
// Whether this thread does so.
bool is_running_waiting();

// Marks a watcher as running an op: neither it nor the watchers that ran before it see the ops that it calls.
class Busy {
 public:
  explicit Busy(Thread& thread = get_thread()) : thread_(thread) { ++thread_.busy; }
  ~Busy() { --thread_.busy; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  Thread& thread_;
};

// Marks an op of this name as running.
class Running {
 public:
  explicit Running(const std::string& name, Thread& thread = get_thread())
      : thread_(thread), before_(std::exchange(thread_.running, &name)) {}
  ~Running() { thread_.running = before_; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  Thread& thread_;
  const std::string* const before_;
};

// Whether this thread's ops come to the watchers' dispatch key.
bool is_key_active();
// Whether this thread runs a backward pass.
bool is_in_backward_pass();
// Whether what an op makes now may be a gradient, and not what checkpointing computes again: a backward pass that keeps no
// graph runs without gradient mode.
bool may_make_gradients();

// Notes seconds that this thread has spent in our own Python code.
void lose_seconds(double seconds);

// Sets the watchers that run every op of this thread and of backward passes that it begins. The last is called first.
// Each is an `OpWatch`, or an object with `__torch_dispatch__`.
void set_watchers(const pybind11::tuple& watchers);
// Has ops of this thread come to its watchers again, if there are any or there is managed state.
void update_key();

// Tells the watchers of this thread that it raises the version counters of tensors to which watched code writes then.
void announce_rises(at::TensorList tensors);

// Returns the watchers of this thread.
pybind11::tuple get_watchers();

// Returns the innermost `OpWatch` of this thread; null if there is none, or ops are hidden from it.
OpWatch* find_watch();

// Returns the watchers that would run an op of this thread now: none inside an op that they run, or if they are
// excluded.
pybind11::tuple get_active_watchers();

// Hides the watchers' dispatch key from Dynamo while `function` is its lookup of compiled code; else returns null.
std::unique_ptr<at::ObserverContext> hide_from_lookup(const at::RecordFunction& function);

// Hides the watchers' dispatch key from Dynamo's guards, which compare this thread's keys, until `stop_hiding` has been
// called as often.
void hide_from_guards();
void stop_hiding();

}  // namespace elbowroom
