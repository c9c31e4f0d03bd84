// Python bindings of the ledger.
#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "file_memory.h"
#include "ledger.h"
#include "python_call.h"
#include "python_objects.h"
#include "recorded_ops.h"

namespace elbowroom {

namespace py = pybind11;

namespace {

// Calls Python from an allocation in any thread. Python exceptions propagate through the op that allocates.
class AskPython {
 public:
  explicit AskPython(PyObject* callable) : callable_(callable) {}

  bool operator()(int64_t requested, int64_t missing) const {
    if (!can_call()) return false;
    const PythonCall call;
    return call.make([&] { return py::handle(callable_)(requested, missing); }).cast<bool>();
  }

 private:
  static bool can_call() {
    // A worker of a parallel loop must not wait for the GIL, which the loop's caller may hold.
    return is_python_there() && (PyGILState_Check() == 1 || !at::in_parallel_region());
  }

  PyObject* callable_;  // never freed, like the scope
};

py::tuple take_changes(Scope& scope) {
  const std::vector<Change> changes = scope.take_changes();
  std::vector<int64_t> times, lives;
  times.reserve(changes.size()), lives.reserve(changes.size());
  for (const Change& each : changes) {
    times.push_back(each.nanoseconds);
    lives.push_back(each.live_bytes);
  }
  const auto pack = [](const std::vector<int64_t>& values) {
    return py::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t));
  };
  return py::make_tuple(pack(times), pack(lives));
}

bool adopt_inputs(Scope& scope, const py::list& tensors) {
  bool is_new = false;
  for (const py::handle each : tensors) {
    if (!THPVariable_Check(each.ptr())) throw py::type_error("a tensor is expected");
    const at::Tensor& tensor = THPVariable_Unpack(each.ptr());
    if (is_plain(tensor, c10::kCPU)) is_new |= Ledger::get().adopt(tensor.storage(), scope, true);
  }
  return is_new;
}

}  // namespace

void bind_ledger(py::module_& module) {
  py::class_<Scope, std::unique_ptr<Scope, py::nodelete>>(
      module, "Scope", "Counts the bytes that one room's steps have allocated and not yet freed.")
      .def_property_readonly("live_bytes", &Scope::live_bytes)
      .def_property_readonly("adopted_bytes", &Scope::adopted_bytes)
      .def_property_readonly("peak_bytes", &Scope::peak_bytes)
      .def_property("limit_bytes", &Scope::limit_bytes, &Scope::set_limit)
      .def("take_recent_peak", &Scope::take_recent_peak, "Return the peak of live bytes since the last call.")
      .def("reset_peak", &Scope::reset_peak, "Reset `peak_bytes` to the live bytes.")
      .def(
          "set_make_room",
          [](Scope& scope, const py::function& make_room) {
            scope.set_make_room(AskPython(make_room.inc_ref().ptr()));
          },
          py::arg("make_room"),
          "Call `make_room(requested_bytes, missing_bytes)` before a request that would exceed the limit, and with 0 "
          "missing bytes if the system refuses memory. It returns True after freeing memory, returns False to let the "
          "request pass, or raises.")
      .def("set_recording", &Scope::set_recording, py::arg("is_recording"), "Start or stop recording changes of the live bytes.")
      .def("take_changes", &take_changes, "Return times (ns) and live bytes of the changes, as bytes of int64 arrays.")
      .def(
          "adopt",
          [](Scope& scope, const py::object& storage, bool is_input) {
            return Ledger::get().adopt(unpack(storage), scope, is_input);
          },
          py::arg("storage"), py::arg("is_input"),
          "Count an existing storage until it is freed, an input until `drop_inputs()`. Returns whether it was not "
          "counted before.")
      .def(
          "adopt_inputs", &adopt_inputs, py::arg("tensors"),
          "Adopt the storages of plain tensors as inputs. Returns whether one was not counted before.")
      .def(
          "own_loaded",
          [](Scope& scope, const py::object& storage, bool is_mapped) {
            return Ledger::get().own_loaded(unpack(storage), scope, is_mapped);
          },
          py::arg("storage"), py::arg("is_mapped"),
          "Let an adopted storage give up memory that was loaded from a file for it alone. Returns false if others may use "
          "that memory.")
      .def(
          "expect", &Scope::expect, py::arg("nbytes"),
          "Count bytes of storages that are there, but unknown, until a backward pass reads them. Replaces the last number.")
      .def_property_readonly("expected_bytes", &Scope::expected_bytes)
      .def("drop_inputs", &Scope::drop_inputs, "Stop counting adopted inputs.")
      .def(
          "inherit", [](Scope& scope, Scope& former) { Ledger::get().inherit(scope, former); }, py::arg("former"),
          "Count what a closed scope has counted, or would have since, and what is still there.")
      .def("close", [](Scope& scope) { Ledger::get().close_scope(scope); }, "Close the scope and remove its limit.");
  module.def(
      "make_scope", [] { return &Ledger::get().make_scope(); }, py::return_value_policy::reference,
      "Register the ledger as the CPU allocator, if it is not yet, and make a scope.");
  module.def(
      "find_mapping",
      [](const py::object& storage, const py::object& sliced) {
        const c10::Storage part = unpack(storage), slice = unpack(sliced);
        return reinterpret_cast<uintptr_t>(Ledger::find_mapping(*part.unsafeGetStorageImpl(), *slice.unsafeGetStorageImpl()));
      },
      py::arg("storage"), py::arg("sliced"),
      "Return the address of the storage that maps the file in which a storage lies; 0 if none does, or if the file receives "
      "what is written. `sliced`: any slice of any storage.");
  module.def(
      "count_users",
      [](const py::object& sliced) {
        const c10::Storage slice = unpack(sliced);
        auto* whole = static_cast<c10::StorageImpl*>(slice.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_context());
        const py::object object = wrap(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(whole)));
        return std::pair{c10::raw::intrusive_ptr::use_count(whole), Py_REFCNT(object.ptr())};
      },
      py::arg("sliced"), "Return the references of C++ and those of Python to what a storage is a slice of.");
  module.def(
      "allocate",
      [](int64_t nbytes, size_t misalignment) {
        Ledger& ledger = Ledger::get();
        c10::DataPtr memory = ledger.allocate_at(static_cast<size_t>(nbytes), misalignment);
        return wrap(c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(memory), &ledger, true));
      },
      py::arg("nbytes"), py::arg("misalignment"),
      "Return a storage of the CPU whose address is this many bytes beyond an aligned one. Raises RuntimeError if the "
      "system refuses the memory, and what making room raises.");
  module.def(
      "trim_pages", [](bool everywhere) { Ledger::get().trim(everywhere); }, py::arg("everywhere"),
      py::call_guard<py::gil_scoped_release>(),
      "Unmap the arena's pages that neither live blocks nor running steps can need, and with `everywhere` return the C "
      "library's free memory, too.");
  module.def(
      "set_file_folder",
      [](std::string folder) {
        Ledger::get();  // the CPU allocator from now on
        return set_file_folder(std::move(folder));
      },
      py::arg("folder"),
      "Put this thread's blocks of 4 KiB and more into temporary files of a folder, uncounted; \"\" ends that. Returns the "
      "former folder.");
  module.def(
      "enter_scope", &Ledger::enter, py::return_value_policy::reference, py::arg("scope"),
      "Let a scope (None: every scope) count this thread's allocations. Returns the previous scope.");
}

}  // namespace elbowroom
