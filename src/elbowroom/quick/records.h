// `Historian._describe_all`, `_make_run`: an op that may be run again is put down.
#pragma once

#include "storages.h"

namespace quick {

inline PyTypeObject *slot_class, *run_class, *reads_class;
inline PyObject* read_settings;

// What an op is given: tensors replaced by slots.
struct Record {
  Ref args, named;
  std::vector<PyObject*> residences;  // of what it reads; the slots own them
};

template <typename... Parts>
Ref make_tuple(PyTypeObject* made_as, Parts... owned) {
  Ref parts[] = {need(owned)...};
  Ref made = need(made_as->tp_alloc(made_as, sizeof...(owned)));
#if PY_VERSION_HEX >= 0x030E0000
  as<PyTupleObject>(made.get())->ob_hash = -1;
#endif
  Py_ssize_t place = 0;
  for (Ref& part : parts) PyTuple_SET_ITEM(made.get(), place++, part.release());
  return made;
}

// The geometry is remembered with the argument: only the offset may be another one.
inline Ref find_geometry(Watch* watch, const Argument& seen, PyObject* tensor) {
  static PyObject* const measure = intern("_measure");
  const int64_t offset = THPVariable_Unpack(tensor).storage_offset();
  if (!seen.geometry || as_int(PyTuple_GET_ITEM(seen.geometry.get(), 3)) != offset) {
    seen.geometry = call_method(reinterpret_cast<PyObject*>(watch), measure, tensor);
  }
  return Ref::borrow(seen.geometry.get());
}

inline bool is_simple(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value);
}

// Empty where it is not so simple.
inline Ref describe_one(Record& record, Watch* watch, Book* book, const Argument& seen, PyObject* value) {
  if (seen.manner != Argument::TENSOR) {
    if (PyList_CheckExact(value)) return need(PyList_GetSlice(value, 0, PyList_GET_SIZE(value)));
    return Ref::borrow(value);
  }
  Ref storage = find_plain_storage(watch, value);
  if (!storage) return Ref();
  PyObject* place = find_place(book, storage.get(), make_key(storage.get()).get());
  if (place == nullptr) return Ref();
  Ref residence = see(book, place, get_nbytes(storage.get()));
  if (!residence) return Ref();
  const bool is_outside = residence_outside.get(residence.get()) == Py_True;
  if (is_outside && residence_staying.get(residence.get()) != Py_True) return Ref();  // others may write to it unseen
  Ref geometry = find_geometry(watch, seen, value);
  record.residences.push_back(residence.get());
  PyObject* kept = is_outside ? storage.get() : Py_None;
  return make_tuple(
      slot_class, Py_NewRef(residence.get()), geometry.release(), Py_NewRef(kept), Py_NewRef(Py_None),
      PyLong_FromLong(0), Py_NewRef(residence_version.get(residence.get())), Py_NewRef(Py_True));
}

// Whether all of it is so simple. An op may write to what it reads, so it is described before it runs.
inline bool describe(Record& record, Watch* watch, Book* book, const Sighting* seen, PyObject* args, PyObject* named) {
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  record.args = need(PyTuple_New(count));
  for (Py_ssize_t i = 0; i < count; i++) {
    Ref described = describe_one(record, watch, book, seen->arguments[i], PyTuple_GET_ITEM(args, i));
    if (!described) return false;
    PyTuple_SET_ITEM(record.args.get(), i, described.release());
  }
  record.named = PyDict_GET_SIZE(named) == 0 ? Ref::borrow(named) : need(PyDict_New());
  Py_ssize_t place = 0, next = count;
  PyObject *name, *value;
  while (PyDict_Next(named, &place, &name, &value)) {
    Ref described = describe_one(record, watch, book, seen->arguments[next++], value);
    if (!described) return false;
    if (PyDict_SetItem(record.named.get(), name, described.get()) < 0) throw Failed();
  }
  return true;
}

// As `Account.meet`.
inline Ref meet(Book* book, PyObject* storage, int64_t reserved_bytes) {
  static PyObject* const see_else = intern("see");
  Ref key = make_key(storage);
  PyObject* place = find_place(book, storage, key.get());
  if (place == nullptr) {
    Ref residence = make_residence(get_nbytes(storage), false);
    if (count(book, storage, reserved_bytes, residence.get())) return residence;
  } else {
    reserve(book, -reserved_bytes);
  }
  return call_method(reinterpret_cast<PyObject*>(book), see_else, storage);
}

// What was described has run. As at the end of `Historian.run`.
inline void put_down(
    Record& record, Watch* watch, Book* book, PyObject* kind, PyObject* func, PyObject* result, int64_t nbytes,
    PyObject* estimate) {
  PyObject* self = reinterpret_cast<PyObject*>(watch);
  const bool is_one = Py_IS_TYPE(result, as<PyTypeObject>(THPVariableClass));
  Ref storage = is_one ? find_plain_storage(watch, result) : Ref();
  if (!storage) {
    static PyObject *const note = intern("_note"), *const put_down_else = intern("_record");
    if (nbytes != 0) reserve(book, -nbytes);
    Ref reads = need(PyList_New(0));
    for (PyObject* each : record.residences) {
      if (PyList_Append(reads.get(), each) < 0) throw Failed();
    }
    Ref given = make_tuple(reads_class, record.args.release(), record.named.release(), reads.release());
    Ref results = call_method(self, note, result), none = need(PyTuple_New(0));
    call_method(self, put_down_else, kind, given.get(), results.get(), none.get(), estimate);
    return;
  }
  Ref residence = meet(book, storage.get(), nbytes);
  if (residence_made_by.get(residence.get()) != Py_None || residence_outside.get(residence.get()) == Py_True ||
      residence_version.number(residence.get()) != 0) {
    return;
  }
  for (PyObject* each : record.residences) {
    if (each == residence.get()) return;
  }
  Ref settings = need(PyObject_CallNoArgs(read_settings));
  const int is_same = PyObject_RichCompareBool(settings.get(), watch->settings, Py_EQ);
  if (is_same < 0) throw Failed();
  if (!is_same) Py_SETREF(watch->settings, settings.release());  // one object for all that ran under the same
  Ref weak = need(PyWeakref_NewRef(residence.get(), nullptr));
  Ref made = need(PyTuple_Pack(2, weak.get(), residence_nbytes.get(residence.get())));
  Ref run = make_tuple(
      run_class, PyIter_Next(watch->places), Py_NewRef(func), record.args.release(), record.named.release(),
      made.release(), PyTuple_New(0), Py_NewRef(watch->settings), Py_NewRef(estimate));
  residence_made_by.set(residence.get(), run.release());
}

}  // namespace quick
