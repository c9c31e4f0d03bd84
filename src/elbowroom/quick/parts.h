// What all of it is made of: owned references, and the slots of classes that are written in Python.
#pragma once

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <structmember.h>

#include <cstdint>
#include <utility>

namespace quick {

// An owned reference; empty where a call of Python's has failed.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    Py_XSETREF(object_, std::exchange(other.object_, nullptr));
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }

  static Ref borrow(PyObject* object) { return Ref(Py_XNewRef(object)); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }
  PyObject** address() { return &object_; }

 private:
  PyObject* object_ = nullptr;
};

// Python has set an error.
struct Failed {};

inline Ref need(PyObject* owned) {
  if (owned == nullptr) throw Failed();
  return Ref(owned);
}

inline int64_t as_int(PyObject* number) {
  const long long value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred()) throw Failed();
  return value;
}

// No more than this is ever counted, so that two of it can be added.
constexpr int64_t MOST_BYTES = int64_t{1} << 62;

inline int64_t as_bytes(PyObject* number) {
  int overflowed = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number, &overflowed);
  if (value == -1 && PyErr_Occurred()) throw Failed();
  return overflowed > 0 || value > MOST_BYTES ? MOST_BYTES : value;
}

// Where an attribute in `__slots__` of a class lies in its instances: read and written there without a call.
class Slot {
 public:
  void find(PyObject* made_as, const char* name) {
    Ref descriptor = need(PyObject_GetAttrString(made_as, name));
    if (!Py_IS_TYPE(descriptor.get(), &PyMemberDescr_Type)) {
      PyErr_Format(PyExc_TypeError, "%R has no slot %s", made_as, name);
      throw Failed();
    }
    offset_ = reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member->offset;
  }
  PyObject* get(PyObject* of) const { return at(of); }  // borrowed
  int64_t number(PyObject* of) const { return as_int(at(of)); }
  void set(PyObject* of, PyObject* owned) const {
    if (owned == nullptr) throw Failed();
    Py_XSETREF(at(of), owned);
  }
  void share(PyObject* of, PyObject* value) const { set(of, Py_NewRef(value)); }

 private:
  PyObject*& at(PyObject* of) const { return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(of) + offset_); }
  Py_ssize_t offset_ = 0;
};

// A name that is looked up often.
inline PyObject* intern(const char* name) {
  PyObject* made = PyUnicode_InternFromString(name);
  if (made == nullptr) throw Failed();
  return made;
}

template <typename... Given>
Ref call_method(PyObject* object, PyObject* name, Given... more) {
  PyObject* given[] = {object, more...};
  return need(PyObject_VectorcallMethod(name, given, (1 + sizeof...(more)) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

// A lock of Python's, held for as long as this lives. Others may run while it is waited for.
class Held {
 public:
  explicit Held(PyObject* lock) : lock_(lock) {
    static PyObject* const acquire = intern("acquire");
    call_method(lock_, acquire);
  }
  ~Held() {
    static PyObject* const release = intern("release");
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject* given[] = {lock_};
    Py_XDECREF(PyObject_VectorcallMethod(release, given, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    PyErr_Restore(kind, value, trace);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  PyObject* lock_;
};

// Errors of C++ become Python's.
template <typename Function>
PyObject* guarded(Function function) {
  try {
    return function();
  } catch (const Failed&) {
    return nullptr;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

inline bool is_none(PyObject* value) {
  return value == nullptr || value == Py_None;
}

// Of class Tensor or Parameter.
inline bool is_plain(PyObject* value) {
  return THPVariable_CheckExact(value);
}

// -- classes that those in Python are derived from. Each has a list `owned` of its members that are references. ------

template <typename Made>
Made* as(PyObject* self) {
  return reinterpret_cast<Made*>(self);
}

template <typename Made>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (auto each : Made::owned) Py_VISIT(as<Made>(self)->*each);
  return 0;
}

template <typename Made>
int clear(PyObject* self) {
  for (auto each : Made::owned) Py_CLEAR(as<Made>(self)->*each);
  return 0;
}

template <typename Made>
void free(PyObject* self) {
  PyTypeObject* made_as = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear<Made>(self);
  if constexpr (requires(Made* made) { made->close(); }) as<Made>(self)->close();
  made_as->tp_free(self);
  Py_DECREF(made_as);
}

}  // namespace quick
