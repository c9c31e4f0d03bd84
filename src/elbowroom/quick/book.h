// `Account`: what is counted for each storage. The same dict, weak references and lock; see runtime/account.py.
#pragma once

#include "parts.h"

namespace quick {

constexpr Py_ssize_t MOST_DEAD = 256;

struct Book {
  PyObject_HEAD
  long long counted_bytes, limit_bytes, most_bytes, alignment;
  PyObject *places, *dead, *on_place_death, *lock;
  static constexpr PyObject* Book::*owned[] = {&Book::places, &Book::dead, &Book::on_place_death, &Book::lock};
};

// Of `_Place`.
inline PyTypeObject *book_class, *place_class, *staying_class;
inline Slot place_item, place_key, place_nbytes;

inline int64_t round_up(const Book* book, int64_t nbytes) {
  return (nbytes + book->alignment - 1) / book->alignment * book->alignment;
}

// Borrowed; null where a storage is not counted.
inline PyObject* find_place(const Book* book, PyObject* storage, PyObject* key) {
  PyObject* place = PyDict_GetItemWithError(book->places, key);
  if (place == nullptr) {
    if (PyErr_Occurred()) throw Failed();
    return nullptr;
  }
  return PyWeakref_GET_OBJECT(place) == storage ? place : nullptr;
}

inline Ref make_key(PyObject* storage) {
  return need(PyLong_FromVoidPtr(storage));
}

// The dead are taken off. The lock is held.
inline void bury(Book* book) {
  static PyObject* const popleft = intern("popleft");
  while (PyObject_Size(book->dead) > 0) {
    Ref place = call_method(book->dead, popleft);
    book->counted_bytes -= place_nbytes.number(place.get());
    PyObject* key = place_key.get(place.get());
    PyObject* there = PyDict_GetItemWithError(book->places, key);
    if (there == nullptr && PyErr_Occurred()) throw Failed();
    if (there == place.get() && PyDict_DelItem(book->places, key) < 0) throw Failed();
  }
}

inline bool count(Book* book, PyObject* storage, int64_t reserved_bytes, PyObject* item) {
  Ref key = make_key(storage);
  Held held(book->lock);
  if (find_place(book, storage, key.get()) != nullptr) {
    book->counted_bytes -= reserved_bytes;
    return false;
  }
  const int64_t nbytes = round_up(book, static_cast<int64_t>(THPStorage_Unpack(storage).nbytes()));
  Ref given = need(PyTuple_Pack(2, storage, book->on_place_death));
  Ref place = need(place_class->tp_new(place_class, given.get(), nullptr));
  place_item.share(place.get(), item);
  place_key.share(place.get(), key.get());
  place_nbytes.set(place.get(), PyLong_FromLongLong(nbytes));
  if (PyDict_SetItem(book->places, key.get(), place.get()) < 0) throw Failed();
  book->counted_bytes += nbytes - reserved_bytes;
  return true;
}

inline void reserve(Book* book, int64_t nbytes) {
  Held held(book->lock);
  book->counted_bytes += nbytes;
}

inline bool reserve_within(Book* book, int64_t nbytes) {
  Held held(book->lock);
  if (nbytes >= MOST_BYTES) return false;
  int64_t there = book->counted_bytes + nbytes;
  if (there > book->most_bytes || PyObject_Size(book->dead) > MOST_DEAD) {
    bury(book);
    there = book->counted_bytes + nbytes;
  }
  if (there > book->limit_bytes) return false;
  book->counted_bytes = there;
  if (there > book->most_bytes) book->most_bytes = there;
  return true;
}

// -- as Python sees it --------------------------------------------------------------------------------------------

inline PyObject* book_bury(PyObject* self, PyObject*) {
  return guarded([&] {
    bury(as<Book>(self));
    return Py_NewRef(Py_None);
  });
}

inline PyObject* book_count(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"storage", "reserved_bytes", "item", nullptr};
  PyObject *storage, *item = Py_None;
  long long reserved_bytes = 0;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "O|LO", const_cast<char**>(names), &storage, &reserved_bytes, &item)) {
    return nullptr;
  }
  return guarded([&] { return PyBool_FromLong(count(as<Book>(self), storage, reserved_bytes, item)); });
}

inline PyObject* book_reserve(PyObject* self, PyObject* nbytes) {
  return guarded([&] {
    reserve(as<Book>(self), as_int(nbytes));
    return Py_NewRef(Py_None);
  });
}

inline PyObject* book_reserve_within(PyObject* self, PyObject* nbytes) {
  return guarded([&] { return PyBool_FromLong(reserve_within(as<Book>(self), as_bytes(nbytes))); });
}

inline PyObject* book_find(PyObject* self, PyObject* storage) {
  return guarded([&] {
    PyObject* place = find_place(as<Book>(self), storage, make_key(storage).get());
    return Py_NewRef(place == nullptr ? Py_None : place_item.get(place));
  });
}

inline PyMemberDef book_members[] = {
    {"counted_bytes", T_LONGLONG, offsetof(Book, counted_bytes), 0, nullptr},
    {"limit_bytes", T_LONGLONG, offsetof(Book, limit_bytes), 0, nullptr},
    {"most_bytes", T_LONGLONG, offsetof(Book, most_bytes), 0, nullptr},
    {"_alignment", T_LONGLONG, offsetof(Book, alignment), 0, nullptr},
    {"_places", T_OBJECT_EX, offsetof(Book, places), 0, nullptr},
    {"_dead", T_OBJECT_EX, offsetof(Book, dead), 0, nullptr},
    {"_on_place_death", T_OBJECT_EX, offsetof(Book, on_place_death), 0, nullptr},
    {"lock", T_OBJECT_EX, offsetof(Book, lock), 0, nullptr},
    {nullptr}};

inline PyMethodDef book_methods[] = {
    {"_bury", book_bury, METH_NOARGS, nullptr},
    {"count", reinterpret_cast<PyCFunction>(book_count), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"find", book_find, METH_O, nullptr},
    {"reserve", book_reserve, METH_O, nullptr},
    {"reserve_within", book_reserve_within, METH_O, nullptr},
    {nullptr}};

}  // namespace quick
