// The observer's Python side: a library of its own for as long as no step is observed by it.
#include <pybind11/pybind11.h>

namespace elbowroom {
void bind_observer(pybind11::module_& module);
}

PYBIND11_MODULE(_observer, module) {
  module.doc() = "An observer of ops.";
  elbowroom::bind_observer(module);
}
