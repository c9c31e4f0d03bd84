// Runs each op of a thread by those that watch it.
#pragma once

#include <pybind11/pybind11.h>

namespace elbowroom {

// From now on these run every op of this thread, and of backward passes that it begins. The last sees it first. Each is an
// `OpWatch`, or an object with `__torch_dispatch__`.
void set_watchers(const pybind11::tuple& watchers);

// Those of this thread.
pybind11::tuple get_watchers();

}  // namespace elbowroom
