// The extension's Python side.
#include <pybind11/pybind11.h>

namespace elbowroom {
void bind_arena(pybind11::module_& module);
void bind_files(pybind11::module_& module);
void bind_ledger(pybind11::module_& module);
void bind_state(pybind11::module_& module);
void bind_steps(pybind11::module_& module);
void bind_saves(pybind11::module_& module);
void bind_shielded_calls(pybind11::module_& module);
void bind_streams(pybind11::module_& module);
}

PYBIND11_MODULE(_native, module) {
  module.doc() = "Elbowroom's C++ extension: a counting CPU allocator, and watching of ops and saved tensors.";
  elbowroom::bind_arena(module);
  elbowroom::bind_files(module);
  elbowroom::bind_ledger(module);
  elbowroom::bind_state(module);
  elbowroom::bind_steps(module);
  elbowroom::bind_saves(module);
  elbowroom::bind_shielded_calls(module);
  elbowroom::bind_streams(module);
}
