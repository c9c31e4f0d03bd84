// Runs each op of a thread by those that watch it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <pybind11/pybind11.h>

#include <cstdint>

namespace elbowroom {

class OpWatch;

// PyTorch up to 2.13 reserves this key and registers nothing for it.
constexpr c10::DispatchKey WATCHED_KEY = c10::DispatchKey::Fake;
constexpr c10::DispatchKeySet BELOW_WATCH(c10::DispatchKeySet::FULL_AFTER, WATCHED_KEY);

// Has an op run by all that watch it.
void run_watched(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// The watch that is to run an op of this thread, where it is the only one that watches; null otherwise.
OpWatch* find_only_watch();

// While one of the watchers runs an op: what it calls is not seen by it, nor by those that saw the op before it.
struct Busy {
  Busy();
  ~Busy();
};

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
