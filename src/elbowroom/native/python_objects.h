// Python objects of the extension's objects.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

#include "python_call.h"
#include "storage_records.h"

namespace elbowroom {

// Sets the Python class (`SavedStorage`) that wraps records, once.
void set_residence_class(const pybind11::object& residence);

// Returns the Python object that wraps a record. There is at most one at a time; it lives while Python refers to it.
pybind11::object find_residence(const StorageRecordPtr& record);

inline pybind11::object wrap(const at::Tensor& tensor) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
}

inline pybind11::object wrap(const c10::Storage& storage) {
  return pybind11::reinterpret_steal<pybind11::object>(torch::createPyObject(storage));
}

// The storage that an object in Python stands for.
inline const c10::Storage& unpack(const pybind11::handle& storage) {
  if (!THPStorage_Check(storage.ptr())) throw pybind11::type_error("an UntypedStorage is expected");
  return THPStorage_Unpack(storage.ptr());
}

inline std::shared_ptr<c10::SafePyObject> share(pybind11::object object) {
  return std::make_shared<c10::SafePyObject>(object.release().ptr(), getPyInterpreter());
}

// Returns the object of a weak reference; None if it was freed.
inline pybind11::object find_referent(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) throw pybind11::error_already_set();
  return found == nullptr ? pybind11::none() : pybind11::reinterpret_steal<pybind11::object>(found);
#else
  return pybind11::reinterpret_borrow<pybind11::object>(PyWeakref_GetObject(reference));
#endif
}

// A method of the Python object that runs the step, held weakly.
class Method {
 public:
  Method(const pybind11::object& host, const char* name) : host_(share(pybind11::weakref(host))), name_(name) {}

  // Passes the method to `use`, with the GIL. Python exceptions are thrown. Does nothing if the object was freed.
  template <typename Use>
  void call(const Use& use) const {
    if (!is_python_there()) return;
    const PythonCall python;
    python.make([&]() -> pybind11::object {
      const pybind11::object host = find_referent(host_->ptr(getPyInterpreter()));
      if (!host.is_none()) use(host.attr(name_));
      return pybind11::none();
    });
  }

 private:
  std::shared_ptr<c10::SafePyObject> host_;
  const char* name_;
};

}  // namespace elbowroom
