// Calls Python from the middle of an op.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <chrono>

#include "watched_ops.h"

namespace elbowroom {

inline bool is_python_there() {
  if (!Py_IsInitialized()) return false;
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsFinalizing();
#else
  return !_Py_IsFinalizing();
#endif
}

// Allows this thread to call Python while it exists. This time does not count as the op's.
class PythonCall {
 public:
  PythonCall() {
    if (depth_++ == 0) began_with_gil_ = had_gil_;
    PyErr_Fetch(&type_, &value_, &traceback_);  // an allocation may be part of handling an error
  }
  ~PythonCall() {
    PyErr_Restore(type_, value_, traceback_);
    --depth_;
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin_;
    if (depth_ == 0) lose_seconds(taken.count());
  }
  PythonCall(const PythonCall&) = delete;
  PythonCall& operator=(const PythonCall&) = delete;

  // Returns whether this thread calls Python from the middle of an op.
  static bool is_inside() { return depth_ > 0; }

  // Returns whether this thread held the GIL before: PyTorch's ops do not, and extensions in C++ often do.
  static bool began_with_gil() { return depth_ > 0 && began_with_gil_; }

  // Python exceptions in `call` propagate through the op.
  template <typename Call>
  pybind11::object make(const Call& call) const {
    try {
      return call();
    } catch (pybind11::error_already_set& raised) {
      raised.restore();
      python_error error;
      error.persist();
      throw error;
    }
  }

 private:
  static inline thread_local int depth_ = 0;
  static inline thread_local bool began_with_gil_ = false;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  const bool had_gil_ = PyGILState_Check() != 0;
  const pybind11::gil_scoped_acquire gil_;
  // The op excludes dispatch keys for its own inner ops, which must not apply to ops of Python.
  const c10::impl::ForceDispatchKeyGuard default_keys_{
      c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
  const c10::AutoGradMode no_grad_{false};
  const CalledBack called_back_;
  PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

}  // namespace elbowroom
