// Tensors, their storages, and what is known of those: `find_storage`, `see`.
#pragma once

#include "book.h"
#include "state.h"

#include <utility>

namespace quick {

// Of `Residence`.
inline PyTypeObject* residence_class;
inline Slot residence_id, residence_nbytes, residence_outside, residence_staying;
inline Slot residence_version, residence_views, residence_readers, residence_made_by;
inline std::vector<std::pair<Slot, PyObject*>> residence_begins;  // what else one begins with
inline PyObject *no_views, *no_readers;

inline bool is_here(Watch* watch, const at::Tensor& tensor) {
  if (!watch->has_device) {
    const char* name = watch->device_type == nullptr ? nullptr : PyUnicode_AsUTF8(watch->device_type);
    if (name == nullptr) throw Failed();
    watch->device = c10::Device(name).type();
    watch->has_device = true;
  }
  return tensor.device().type() == watch->device;
}

inline int64_t get_nbytes(PyObject* storage) {
  return static_cast<int64_t>(THPStorage_Unpack(storage).nbytes());
}

// The storage of a tensor that is a block of bytes on the device; empty for any other. That of a tensor of zeros without
// bytes (PyTorch makes them in forward-mode AD) has a size all the same.
inline Ref find_storage(Watch* watch, PyObject* value) {
  if (!is_plain(value)) return Ref();
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (!is_here(watch, tensor) || tensor.layout() != c10::kStrided || !tensor.has_storage() || tensor._is_zerotensor()) {
    return Ref();
  }
  return need(torch::createPyObject(tensor.storage()));
}

// The same where the bytes are the value, too.
inline Ref find_plain_storage(Watch* watch, PyObject* value) {
  if (!is_plain(value)) return Ref();
  const at::Tensor& tensor = THPVariable_Unpack(value);
  const bool is_more = tensor.is_quantized() || tensor.is_nested() || tensor.is_conj() || tensor.is_neg();
  return is_more ? Ref() : find_storage(watch, value);
}

inline Ref make_residence(int64_t nbytes, bool is_staying) {
  Ref made = need(residence_class->tp_alloc(residence_class, 0));
  PyObject* residence = made.get();
  for (const auto& [slot, value] : residence_begins) slot.share(residence, value);
  residence_id.set(residence, PyLong_FromLong(-1));
  residence_version.set(residence, PyLong_FromLong(0));
  residence_nbytes.set(residence, PyLong_FromLongLong(nbytes));
  residence_outside.set(residence, PyBool_FromLong(is_staying));
  residence_staying.set(residence, PyBool_FromLong(is_staying));
  return made;
}

// As `Account.see`, of a storage that is counted; empty where its size is another one by now.
inline Ref see(Book* book, PyObject* place, int64_t nbytes) {
  PyObject* item = place_item.get(place);
  if (item != Py_None) return Ref::borrow(item);
  if (round_up(book, nbytes) != place_nbytes.number(place)) return Ref();
  Ref kept = Ref::borrow(place);
  Held held(book->lock);
  if (item = place_item.get(place); item != Py_None) return Ref::borrow(item);  // another thread has made it
  Ref residence = make_residence(nbytes, Py_IS_TYPE(place, staying_class));
  place_item.share(place, residence.get());
  return residence;
}

}  // namespace quick
