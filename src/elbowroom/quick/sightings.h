// `Sighting` and `Order`: ops that come again, told by what came before. See hooks/sightings.py.
#pragma once

#include "parts.h"

#include <ATen/Context.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <c10/core/DefaultDtype.h>

#include <vector>

namespace quick {

constexpr size_t MOST_AFTER = 8;

// An argument as it was given once.
struct Argument {
  enum Manner { TENSOR, EQUAL, ANY_FLOAT } manner;
  PyTypeObject* made_as;  // of what class a tensor was, which lives as long as PyTorch
  Ref value;              // that is compared
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::Device device{c10::kCPU};
  bool wants_gradient = false;
  std::vector<int64_t> lies;  // sizes, then strides
  mutable Ref geometry;       // of the last one that was recorded
};

struct Sighting {
  PyObject_HEAD
  PyObject *kind, *item, *names;  // names: a tuple
  std::vector<Argument> arguments;
  std::vector<Sighting*> after;  // owned
  c10::ScalarType default_dtype;
  signed char has_onednn;  // -1 where it does not matter
  bool is_certain;
  static constexpr PyObject* Sighting::*owned[] = {&Sighting::kind, &Sighting::item, &Sighting::names};
  void close() {
    arguments.~vector();
    after.~vector();
  }
};

struct Order {
  PyObject_HEAD
  PyObject* last;  // a Sighting
  static constexpr PyObject* Order::*owned[] = {&Order::last};
};

inline PyTypeObject *sighting_class, *order_class;

// What a program may be asked about without an op, and without code of its own.
inline bool may_compare(PyObject* value) {
  if (value == Py_None || PyLong_CheckExact(value) || PyBool_Check(value) || PyFloat_CheckExact(value) ||
      PyComplex_CheckExact(value) || PyUnicode_CheckExact(value)) {
    return true;
  }
  return THPDtype_Check(value) || THPLayout_Check(value) || THPMemoryFormat_Check(value) || THPDevice_Check(value);
}

inline bool is_number(PyObject* value) {
  return PyLong_CheckExact(value) || PyBool_Check(value) || PyFloat_CheckExact(value);
}

// 1, 1.0 and True are equal, so what they are comes first.
inline bool is_equal(PyObject* one, PyObject* other) {
  if (one == other) return true;
  if (Py_TYPE(one) != Py_TYPE(other)) return false;
  if (PyLong_CheckExact(one)) {
    int overflowed = 0, also = 0;
    const long long left = PyLong_AsLongLongAndOverflow(one, &overflowed);
    const long long right = PyLong_AsLongLongAndOverflow(other, &also);
    if (!overflowed && !also) return left == right;
  } else if (PyFloat_CheckExact(one)) {
    return PyFloat_AS_DOUBLE(one) == PyFloat_AS_DOUBLE(other);
  } else if (PyList_CheckExact(one)) {
    const Py_ssize_t count = PyList_GET_SIZE(one);
    if (PyList_GET_SIZE(other) != count) return false;
    for (Py_ssize_t i = 0; i < count; i++) {
      if (!is_number(PyList_GET_ITEM(other, i)) || !is_equal(PyList_GET_ITEM(one, i), PyList_GET_ITEM(other, i))) {
        return false;
      }
    }
    return true;
  }
  const int equal = PyObject_RichCompareBool(one, other, Py_EQ);
  if (equal < 0) throw Failed();
  return equal != 0;
}

inline const c10::TensorImpl* find_impl(PyObject* tensor) {
  return THPVariable_Unpack(tensor).unsafeGetTensorImpl();
}

inline bool is_alike(const Argument& seen, PyObject* given) {
  switch (seen.manner) {
    case Argument::EQUAL:
      return is_equal(seen.value.get(), given);
    case Argument::ANY_FLOAT:
      return PyFloat_CheckExact(given);
    default:
      break;
  }
  if (Py_TYPE(given) != seen.made_as) return false;
  const c10::TensorImpl* impl = find_impl(given);
  if (impl->key_set() != seen.keys || impl->dtype() != seen.dtype || impl->has_symbolic_sizes_strides()) return false;
  const auto sizes = impl->sizes(), strides = impl->strides();
  const size_t count = sizes.size();
  if (2 * count != seen.lies.size()) return false;
  for (size_t i = 0; i < count; i++) {
    if (sizes[i] != seen.lies[i] || strides[i] != seen.lies[count + i]) return false;
  }
  return impl->device() == seen.device && impl->requires_grad() == seen.wants_gradient;
}

inline bool see_tensor(Argument& seen, PyObject* given) {
  const c10::TensorImpl* impl = find_impl(given);
  if (impl->layout() != c10::kStrided || impl->is_python_dispatch() || impl->has_symbolic_sizes_strides() ||
      THPVariable_Unpack(given).is_nested()) {
    return false;
  }
  seen.manner = Argument::TENSOR;
  seen.made_as = Py_TYPE(given);
  seen.keys = impl->key_set();
  seen.dtype = impl->dtype();
  seen.device = impl->device();
  seen.wants_gradient = impl->requires_grad();
  const auto sizes = impl->sizes(), strides = impl->strides();
  seen.lies.assign(sizes.begin(), sizes.end());
  seen.lies.insert(seen.lies.end(), strides.begin(), strides.end());
  return true;
}

inline bool see_argument(Argument& seen, PyObject* given, bool may_write) {
  if (is_plain(given)) return see_tensor(seen, given);
  if (may_write && PyFloat_CheckExact(given)) {  // a new learning rate changes nothing of what it allocates
    seen.manner = Argument::ANY_FLOAT;
    return true;
  }
  seen.manner = Argument::EQUAL;
  if (PyList_CheckExact(given)) {
    const Py_ssize_t count = PyList_GET_SIZE(given);
    for (Py_ssize_t i = 0; i < count; i++) {
      if (!is_number(PyList_GET_ITEM(given, i))) return false;
    }
    seen.value = need(PyList_GetSlice(given, 0, count));  // of its own: the program may change the one that it gave
    return true;
  }
  if (!may_compare(given)) return false;
  seen.value = Ref::borrow(given);
  return true;
}

// `named`: a dict, or any other collection of names; null for none.
inline bool has_names(const Sighting* sighting, PyObject* named) {
  const Py_ssize_t count = PyTuple_GET_SIZE(sighting->names);
  if (named == nullptr || named == Py_None) return count == 0;
  if (!PyDict_CheckExact(named)) {
    Ref given = need(PySequence_Tuple(named));
    const int equal = PyObject_RichCompareBool(given.get(), sighting->names, Py_EQ);
    if (equal < 0) throw Failed();
    return equal != 0;
  }
  if (PyDict_GET_SIZE(named) != count) return false;
  Py_ssize_t place = 0;
  PyObject* name;
  for (Py_ssize_t i = 0; PyDict_Next(named, &place, &name, nullptr); i++) {
    PyObject* seen = PyTuple_GET_ITEM(sighting->names, i);
    if (name != seen && PyUnicode_Compare(name, seen) != 0) return false;
  }
  return true;
}

// Whether an op of the same kind is given the like; asked of what is certain.
inline bool is_again(const Sighting* sighting, PyObject* const* values, size_t count, PyObject* named) {
  const auto& arguments = sighting->arguments;
  if (arguments.size() != count || c10::get_default_dtype_as_scalartype() != sighting->default_dtype ||
      !has_names(sighting, named)) {
    return false;
  }
  if (sighting->has_onednn >= 0 && at::globalContext().userEnabledMkldnn() != (sighting->has_onednn == 1)) return false;
  for (size_t i = 0; i < count; i++) {
    if (!is_alike(arguments[i], values[i])) return false;
  }
  return true;
}

// Borrowed: what is known of an op, if it came like this after the last one before.
inline Sighting* expect(Order* order, PyObject* kind, PyObject* const* values, size_t count, PyObject* named) {
  if (order->last == nullptr) return nullptr;
  for (Sighting* sighting : as<Sighting>(order->last)->after) {
    if (sighting->kind == kind && is_again(sighting, values, count, named)) {
      Py_SETREF(order->last, Py_NewRef(reinterpret_cast<PyObject*>(sighting)));
      return sighting;
    }
  }
  return nullptr;
}

// -- as Python sees them ------------------------------------------------------------------------------------------

inline PyObject* sighting_new(PyTypeObject* made_as, PyObject* args, PyObject*) {
  PyObject *kind, *values, *named, *item;
  if (!PyArg_ParseTuple(args, "OO!OO", &kind, &PyTuple_Type, &values, &named, &item)) return nullptr;
  Ref made(made_as->tp_alloc(made_as, 0));
  if (!made) return nullptr;
  Sighting* sighting = as<Sighting>(made.get());
  new (&sighting->arguments) std::vector<Argument>();
  new (&sighting->after) std::vector<Sighting*>();
  return guarded([&] {
    static PyObject *const may_write = intern("may_write"), *const is_convolution = intern("is_convolution");
    sighting->kind = Py_NewRef(kind);
    sighting->item = Py_NewRef(item);
    sighting->names = need(PySequence_Tuple(named)).release();
    sighting->default_dtype = c10::get_default_dtype_as_scalartype();
    const bool writes = need(PyObject_GetAttr(kind, may_write)).get() == Py_True;
    const bool convolves = need(PyObject_GetAttr(kind, is_convolution)).get() == Py_True;
    sighting->has_onednn = !convolves ? -1 : at::globalContext().userEnabledMkldnn();
    const Py_ssize_t count = PyTuple_GET_SIZE(values);
    sighting->arguments.resize(count);
    sighting->is_certain = true;
    for (Py_ssize_t i = 0; i < count && sighting->is_certain; i++) {
      sighting->is_certain = see_argument(sighting->arguments[i], PyTuple_GET_ITEM(values, i), writes);
    }
    if (!sighting->is_certain) sighting->arguments.clear();
    return made.release();
  });
}

inline int sighting_traverse(PyObject* self, visitproc visit, void* arg) {
  for (Sighting* each : as<Sighting>(self)->after) Py_VISIT(each);
  return traverse<Sighting>(self, visit, arg);
}

inline void forget_after(Sighting* sighting) {
  std::vector<Sighting*> after;
  after.swap(sighting->after);
  for (Sighting* each : after) Py_DECREF(each);
}

inline int sighting_clear(PyObject* self) {
  forget_after(as<Sighting>(self));
  return 0;  // the rest is of others, which lead back to none
}

inline void sighting_free(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Py_TRASHCAN_BEGIN(self, sighting_free);  // one may lead to thousands
  forget_after(as<Sighting>(self));
  free<Sighting>(self);
  Py_TRASHCAN_END;
}

inline PyObject* sighting_is_again(PyObject* self, PyObject* args) {
  PyObject *values, *named;
  if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &values, &named)) return nullptr;
  return guarded([&] {
    PyObject* const* given = reinterpret_cast<PyTupleObject*>(values)->ob_item;
    return PyBool_FromLong(is_again(as<Sighting>(self), given, PyTuple_GET_SIZE(values), named));
  });
}

inline PyObject* sighting_after(PyObject* self, void*) {
  const auto& after = as<Sighting>(self)->after;
  PyObject* made = PyList_New(static_cast<Py_ssize_t>(after.size()));
  for (size_t i = 0; made != nullptr && i < after.size(); i++) {
    PyList_SET_ITEM(made, i, Py_NewRef(reinterpret_cast<PyObject*>(after[i])));
  }
  return made;
}

inline PyMemberDef sighting_members[] = {
    {"kind", T_OBJECT_EX, offsetof(Sighting, kind), READONLY, nullptr},
    {"item", T_OBJECT_EX, offsetof(Sighting, item), READONLY, nullptr},
    {"is_certain", T_BOOL, offsetof(Sighting, is_certain), READONLY, nullptr},
    {nullptr}};

inline PyGetSetDef sighting_properties[] = {{"after", sighting_after, nullptr, nullptr, nullptr}, {nullptr}};

inline PyMethodDef sighting_methods[] = {{"is_again", sighting_is_again, METH_VARARGS, nullptr}, {nullptr}};

inline PyObject* order_expect(PyObject* self, PyObject* args) {
  PyObject *kind, *values, *named;
  if (!PyArg_ParseTuple(args, "OO!O", &kind, &PyTuple_Type, &values, &named)) return nullptr;
  return guarded([&] {
    PyObject* const* given = reinterpret_cast<PyTupleObject*>(values)->ob_item;
    Sighting* found = expect(as<Order>(self), kind, given, PyTuple_GET_SIZE(values), named);
    return Py_NewRef(found == nullptr ? Py_None : found->item);
  });
}

inline PyObject* order_follow(PyObject* self, PyObject* given) {
  if (!PyObject_TypeCheck(given, sighting_class)) {
    PyErr_SetString(PyExc_TypeError, "a Sighting follows");
    return nullptr;
  }
  return guarded([&] {
    Sighting* sighting = as<Sighting>(given);
    Ref last(std::exchange(as<Order>(self)->last, Py_NewRef(given)));
    if (last && sighting->is_certain) {
      auto& after = as<Sighting>(last.get())->after;
      Ref forgotten;
      if (after.size() >= MOST_AFTER) {
        forgotten = Ref(reinterpret_cast<PyObject*>(after.front()));
        after.erase(after.begin());
      }
      after.push_back(sighting);
      Py_INCREF(sighting);
    }
    return Py_NewRef(Py_None);
  });
}

inline PyMethodDef order_methods[] = {
    {"expect", order_expect, METH_VARARGS, nullptr}, {"follow", order_follow, METH_O, nullptr}, {nullptr}};

}  // namespace quick
