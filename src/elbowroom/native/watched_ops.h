// Runs each op of a thread by those that watch it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>

namespace elbowroom {

class OpWatch;
struct Watchers;

// What a thread does, for all steps. One variable: to find a thread's own takes a call.
struct Thread {
  const Watchers* watchers = nullptr;  // that it has entered; null also where autograd has handed it some
  OpWatch* only = nullptr;  // of them, if there is one
  size_t busy = 0;  // watchers, from the innermost, that run an op: they do not see the ops that it calls
  const std::string* running = nullptr;  // name of the op; null outside of ops that are watched
  double lost_seconds = 0;  // that it has spent in Python on our behalf: no op is charged with them
};

inline Thread& get_thread() {
  static thread_local constinit Thread thread;
  return thread;
}

// PyTorch up to 2.13 reserves this key and registers nothing for it.
constexpr c10::DispatchKey WATCHED_KEY = c10::DispatchKey::Fake;
constexpr c10::DispatchKeySet BELOW_WATCH(c10::DispatchKeySet::FULL_AFTER, WATCHED_KEY);

// Has an op run by all that watch it.
void run_watched(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// The only one of the watchers that autograd has handed this thread, if it is an `OpWatch`; else null.
OpWatch* find_handed_watch();

// The watch that is to run an op of this thread, where it is the only one that watches; null otherwise.
inline OpWatch* find_only_watch(const Thread& thread) {
  if (thread.busy > 0) return nullptr;
  return thread.watchers != nullptr ? thread.only : find_handed_watch();
}

// While one of the watchers runs an op: what it calls is not seen by it, nor by those that saw the op before it.
class Busy {
 public:
  explicit Busy(Thread& thread = get_thread()) : thread_(thread) { ++thread_.busy; }
  ~Busy() { --thread_.busy; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  Thread& thread_;
};

// While an op of this name runs.
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

// This thread has spent so long in Python on behalf of the step that it runs.
void lose_seconds(double seconds);

// From now on these run every op of this thread, and of backward passes that it begins. The last sees it first. Each is an
// `OpWatch`, or an object with `__torch_dispatch__`.
void set_watchers(const pybind11::tuple& watchers);

// Those of this thread.
pybind11::tuple get_watchers();

// The innermost `OpWatch` of this thread; null where there is none, or ops are hidden from it.
OpWatch* find_watch();

// Those that run an op of this thread now: none inside of an op that they run, or where they are excluded.
pybind11::tuple get_active_watchers();

// Have Dynamo, which compares this thread's dispatch keys with those that it compiled for, not see that ops are watched,
// from now on until the other is called with what this returned: 0 where that is so already.
uint64_t hide_from_guards();
void stop_hiding(uint64_t handle);

}  // namespace elbowroom
