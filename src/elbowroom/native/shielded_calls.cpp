#include "shielded_calls.h"

#include <memory>
#include <utility>

#include "python_call.h"

namespace elbowroom {

namespace py = pybind11;

namespace {

thread_local int depth = 0;

struct Depth {
  Depth() { ++depth; }
  ~Depth() { --depth; }
};

struct Raised {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
};

// Raises an exception in the main thread, between two bytecode instructions.
int raise_pending(void* pending) {
  if (depth > 0 && Py_AddPendingCall(&raise_pending, pending) == 0) return 0;
  const std::unique_ptr<Raised> raised(static_cast<Raised*>(pending));
  PyErr_Restore(raised->type, raised->value, raised->traceback);
  return -1;
}

std::unique_ptr<Raised> take_exception() {
  auto raised = std::make_unique<Raised>();
  PyErr_Fetch(&raised->type, &raised->value, &raised->traceback);
  return raised;
}

// Has an exception raised later.
void defer(std::unique_ptr<Raised> raised) {
  if (Py_AddPendingCall(&raise_pending, raised.get()) == 0) {
    raised.release();
    return;
  }
  PyErr_Restore(raised->type, raised->value, raised->traceback);
  PyErr_WriteUnraisable(nullptr);  // too many calls are pending
}

// A function that is called as a callback.
struct ShieldedFunction {
  py::object function;
};

// Stands for a saved tensor whose storage may move, in autograd's graph.
struct PackedTensor {
  PackedTensor(py::object append, py::object retire, int64_t index, py::object residence, int64_t version)
      : append(std::move(append)), retire(std::move(retire)), index(index), residence(std::move(residence)), version(version) {}
  PackedTensor(const PackedTensor&) = delete;
  PackedTensor& operator=(const PackedTensor&) = delete;
  ~PackedTensor() {
    if (!is_python_there()) {
      for (py::object* each : {&append, &retire, &residence}) each->release();
      return;
    }
    const py::error_scope former;
    const py::tuple save = py::make_tuple(index, residence);
    PyObject* const none = PyObject_CallOneArg(append.ptr(), save.ptr());  // in C, where no signal is handled
    none == nullptr ? PyErr_WriteUnraisable(append.ptr()) : Py_DECREF(none);
    call_shielded(retire, py::tuple());
  }

  py::object append, retire;
  const int64_t index;
  py::object residence;
  const int64_t version;
};

}  // namespace

void call_shielded(const py::handle& function, const py::tuple& arguments) {
  const Depth inside;
  const py::error_scope former;  // an exception may be on its way
  if (PyErr_CheckSignals() != 0) defer(take_exception());
  const auto call = [&] { return py::reinterpret_steal<py::object>(PyObject_CallObject(function.ptr(), arguments.ptr())); };
  if (call()) return;
  std::unique_ptr<Raised> first = take_exception();
  const bool is_own = !call();
  if (is_own) PyErr_WriteUnraisable(function.ptr());
  if (!is_own || !PyErr_GivenExceptionMatches(first->type, PyExc_Exception)) return defer(std::move(first));
  for (PyObject* each : {first->type, first->value, first->traceback}) Py_XDECREF(each);
}

void bind_shielded_calls(py::module_& module) {
  py::class_<ShieldedFunction>(module, "ShieldedFunction", "Calls a function in callbacks, in which exceptions of signals would be lost.")
      .def(py::init([](py::object function) { return ShieldedFunction{std::move(function)}; }), py::arg("function"))
      .def("__call__", [](const ShieldedFunction& shielded, const py::args& arguments) {
        call_shielded(shielded.function, arguments);
      });
  py::class_<PackedTensor>(module, "PackedTensor", "Stands for a saved tensor whose storage may move.")
      .def(py::init<py::object, py::object, int64_t, py::object, int64_t>(), py::arg("append"), py::arg("retire"),
          py::arg("index"), py::arg("residence").none(true), py::arg("version"),
          "When autograd releases the tensor, at any moment in any thread, `append` is called with the pair of index and "
          "residence, and then `retire`. `append` must be implemented in C.")
      .def_readonly("index", &PackedTensor::index, "Index of the save within the step.")
      .def_property_readonly("residence", [](const PackedTensor& packed) { return packed.residence; },
          "Storage of the tensor; None if it does not move.")
      .def_readonly("version", &PackedTensor::version, "Version counter of the tensor when it was saved.");
}

}  // namespace elbowroom
