// Calls Python where no exception can propagate: in destructors, and in callbacks of weak references.
#pragma once

#include <pybind11/pybind11.h>

namespace elbowroom {

// Calls a function with the GIL held. Signals are handled before: an exception of their handler (Ctrl-C) would be lost in
// the function's first line, where Python looks for them, and is raised in the main thread once no such call runs. A call
// that is interrupted all the same is made again. An error that comes again is the function's own: it is only printed, as
// Python does, and not raised in a line of the program that has nothing to do with it.
void call_shielded(const pybind11::handle& function, const pybind11::tuple& arguments);

void bind_shielded_calls(pybind11::module_& module);

}  // namespace elbowroom
