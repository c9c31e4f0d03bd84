// `Historian`: the flat ways of an op that finds room, asleep or awake. Everything else is left to the methods of
// runtime/historian.py, which says what all of it is for.
#pragma once

#include "records.h"

#include <ATen/core/grad_mode.h>

#include <memory>
#include <unordered_map>

namespace quick {

constexpr int64_t ENOUGH_RUNS = 4;  // `Pace.ENOUGH`

// Of `Estimate` and `Pace`.
inline Slot estimate_nbytes, estimate_result_bytes, estimate_pace, pace_begun, pace_seconds;
inline PyObject *no_names, *find_kind;

// What `Kind` has, as it is asked for here.
struct Kind {
  Ref object, func, call;  // for good: as are the ops themselves
  Py_ssize_t written = -1;         // position of the one argument that it writes to; -1 where that is not so simple
  bool may_write, is_idle, is_traced, is_replayable, is_source, is_certain;
};

inline const Kind* get_kind(PyObject* func) {
  static auto& known = *new std::unordered_map<PyObject*, std::unique_ptr<Kind>>();  // Python is gone before statics
  if (const auto found = known.find(func); found != known.end()) return found->second.get();
  auto made = std::make_unique<Kind>();
  Ref object = need(PyObject_CallOneArg(find_kind, func));
  const auto ask = [&](const char* name) {
    return PyObject_IsTrue(need(PyObject_GetAttrString(object.get(), name)).get()) == 1;
  };
  made->may_write = ask("may_write");
  made->is_idle = ask("is_idle");
  made->is_traced = ask("is_traced");
  made->is_replayable = ask("is_replayable");
  made->is_source = ask("is_source");
  made->is_certain = !ask("has_conditions") && !ask("has_statistics");
  Ref writes = need(PyObject_GetAttrString(object.get(), "writes"));
  if (PyTuple_GET_SIZE(writes.get()) == 1 && !ask("has_statistics")) {
    made->written = as_int(PyTuple_GET_ITEM(PyTuple_GET_ITEM(writes.get(), 0), 0));
  }
  made->call = need(PyObject_GetAttrString(object.get(), "call"));
  made->func = Ref::borrow(func);
  made->object = std::move(object);
  return known.try_emplace(func, std::move(made)).first->second.get();  // another thread may have come first
}

// -- writes -------------------------------------------------------------------------------------------------------

// What an op writes to, if nobody has to be told: no replay reads it, autograd has not saved it, and no op has made it.
struct Target {
  PyObject* tensor = nullptr;  // borrowed
  Ref storage;
};

inline bool is_quiet(PyObject* residence) {
  return residence_views.get(residence) == no_views && residence_readers.get(residence) == no_readers &&
      residence_made_by.get(residence) == Py_None;
}

// Its version grows before and after, as `about_to_write` and `written` have it.
inline bool note_write(Book* book, PyObject* storage) {
  PyObject* place = find_place(book, storage, make_key(storage).get());
  if (place == nullptr) return false;
  PyObject* residence = place_item.get(place);
  if (residence == Py_None) return true;
  if (!is_quiet(residence)) return false;
  residence_version.set(residence, PyLong_FromLongLong(residence_version.number(residence) + 1));
  return true;
}

inline Target find_target(Watch* watch, Book* book, const Kind* kind, PyObject* args) {
  Target target;
  if (kind->written < 0 || kind->written >= PyTuple_GET_SIZE(args)) return target;
  PyObject* tensor = PyTuple_GET_ITEM(args, kind->written);
  target.storage = find_storage(watch, tensor);
  if (target.storage && note_write(book, target.storage.get())) target.tensor = tensor;
  return target;
}

// As `Account.measure`: it may have grown.
inline void tell_size(Book* book, PyObject* storage) {
  static PyObject* const measure = intern("measure");
  PyObject* place = find_place(book, storage, make_key(storage).get());
  const int64_t nbytes = get_nbytes(storage);
  if (place == nullptr || round_up(book, nbytes) != place_nbytes.number(place)) {
    call_method(reinterpret_cast<PyObject*>(book), measure, storage);
  } else if (place_item.get(place) != Py_None || !Py_IS_TYPE(place, staying_class)) {
    residence_nbytes.set(see(book, place, nbytes).get(), PyLong_FromLongLong(nbytes));
  }
}

inline void tell(PyObject* self, PyObject* method, PyObject* tensor) {
  need(PyObject_CallOneArg(need(PyObject_GetAttr(self, method)).get(), tensor));
}

// An op that writes to what somebody has to be told of.
inline Ref write(Watch* watch, const Kind* kind, PyObject* args, PyObject* named, PyObject* stand_in) {
  static PyObject *const list_written = intern("list_written"), *const before_write = intern("_before_write"),
                         *const on_write = intern("_on_write"), *const run = intern("run");
  PyObject* self = reinterpret_cast<PyObject*>(watch);
  Ref targets = call_method(kind->object.get(), list_written, args, named);
  Ref told = need(PySequence_Tuple(targets.get()));
  const Py_ssize_t count = PyTuple_GET_SIZE(told.get());
  for (Py_ssize_t i = 0; i < count; i++) tell(self, before_write, PyTuple_GET_ITEM(told.get(), i));
  Ref runner = stand_in == nullptr ? need(PyObject_GetAttr(self, run)) : Ref::borrow(stand_in);
  PyObject* given[] = {kind->object.get(), args, named, targets.get()};
  Ref result = need(PyObject_Vectorcall(runner.get(), given, 4, nullptr));
  for (Py_ssize_t i = 0; i < count; i++) tell(self, on_write, PyTuple_GET_ITEM(told.get(), i));
  return result;
}

// -- results ------------------------------------------------------------------------------------------------------

// Results that are not recorded take room all the same.
inline void count_result(Watch* watch, Book* book, PyObject* result, int64_t reserved_bytes) {
  constexpr Py_ssize_t most = 8;
  Ref storages[most];
  PyObject* const* results = &result;
  Py_ssize_t size = 1;
  if (PyTuple_CheckExact(result)) {
    results = as<PyTupleObject>(result)->ob_item;
    size = PyTuple_GET_SIZE(result);
  }
  bool are_plain = size > 0 && size <= most;
  for (Py_ssize_t i = 0; are_plain && i < size; i++) {
    storages[i] = find_storage(watch, results[i]);
    are_plain = storages[i] || (size > 1 && results[i] == Py_None);
  }
  if (!are_plain) {
    static PyObject* const count_else = intern("_count");
    Ref reserved = need(PyLong_FromLongLong(reserved_bytes));
    call_method(reinterpret_cast<PyObject*>(watch), count_else, result, reserved.get());
    return;
  }
  for (Py_ssize_t i = 0; i < size; i++) {
    if (storages[i]) count(book, storages[i].get(), std::exchange(reserved_bytes, 0), Py_None);
  }
  if (reserved_bytes != 0) reserve(book, -reserved_bytes);
}

// -- ops ----------------------------------------------------------------------------------------------------------

// Borrowed arguments, those with names last.
class Values {
 public:
  Values(PyObject* args, PyObject* named) : values_(as<PyTupleObject>(args)->ob_item), count_(PyTuple_GET_SIZE(args)) {
    if (PyDict_GET_SIZE(named) == 0) return;
    joined_.assign(values_, values_ + count_);
    Py_ssize_t place = 0;
    PyObject *name, *value;
    while (PyDict_Next(named, &place, &name, &value)) joined_.push_back(value);
    count_ = static_cast<Py_ssize_t>(joined_.size());
    values_ = joined_.data();
  }
  PyObject* const* get() const { return values_; }
  size_t size() const { return static_cast<size_t>(count_); }

 private:
  PyObject* const* values_;
  Py_ssize_t count_;
  std::vector<PyObject*> joined_;
};

// What an op takes, and the sighting that tells it; that is borrowed, and null where it was found otherwise.
struct Found {
  Ref estimate;
  Ref sighting;
};

inline Found find_estimate(Watch* watch, const Kind* kind, PyObject* args, PyObject* named) {
  static PyObject *const order_name = intern("_order"), *const find_of = intern("find_of");
  Ref order = need(PyObject_GetAttr(watch->estimates, order_name));
  if (Py_IS_TYPE(order.get(), order_class)) {
    const Values values(args, named);
    Sighting* found = expect(as<Order>(order.get()), kind->object.get(), values.get(), values.size(), named);
    if (found != nullptr) {
      return {Ref::borrow(found->item), Ref::borrow(reinterpret_cast<PyObject*>(found))};
    }
  }
  return {call_method(watch->estimates, find_of, kind->object.get(), args, named), Ref()};
}

inline Ref call(const Kind* kind, PyObject* args, PyObject* named) {
  return need(PyObject_Call(kind->call.get(), args, PyDict_GET_SIZE(named) == 0 ? nullptr : named));
}

// By a method of Python's, which is told what the op takes.
inline Ref run_else(
    Watch* watch, PyObject* method, const Found& found, const Kind* kind, PyObject* args, PyObject* named,
    const Target& target) {
  static PyObject* const on_write = intern("_on_write");
  PyObject* self = reinterpret_cast<PyObject*>(watch);
  Ref targets = need(target.tensor == nullptr ? PyTuple_New(0) : PyTuple_Pack(1, target.tensor));
  Ref result = call_method(self, method, kind->object.get(), args, named, targets.get(), found.estimate.get());
  if (target.tensor != nullptr) tell(self, on_write, target.tensor);
  return result;
}

inline void count_written(Watch* watch, Book* book, PyObject* result, const Target& target) {
  static PyObject *const on_write = intern("_on_write"), *const note_written = intern("_note_written");
  PyObject* self = reinterpret_cast<PyObject*>(watch);
  const bool is_same = find_storage(watch, target.tensor).get() == target.storage.get();  // `set_` gives it another one
  if (is_same) {
    tell_size(book, target.storage.get());
  } else {
    call_method(self, note_written, need(PyTuple_Pack(1, target.tensor)).get());
  }
  if (result != target.tensor) count_result(watch, book, result, 0);
  if (!is_same || !note_write(book, target.storage.get())) tell(self, on_write, target.tensor);
}

inline bool has_reserved(Book* book, int64_t nbytes) {
  static PyObject* const reserve_within = intern("reserve_within");
  Ref asked = need(PyLong_FromLongLong(nbytes));
  return call_method(reinterpret_cast<PyObject*>(book), reserve_within, asked.get()).get() == Py_True;
}

inline Ref run_awake(
    Watch* watch, Book* book, const Kind* kind, PyObject* args, PyObject* named, const Target& target) {
  static PyObject* const run = intern("run");
  const Found found = find_estimate(watch, kind, args, named);
  PyObject* estimate = found.estimate.get();
  PyObject* pace = estimate_pace.get(estimate);
  const int64_t all_bytes = as_bytes(estimate_nbytes.get(estimate));
  const bool is_recording = watch->is_recording == Py_True;
  bool is_flat = is_none(watch->lessons) && pace_begun.number(pace) >= ENOUGH_RUNS;
  bool is_recorded = false;
  if (is_recording && kind->is_replayable && book->counted_bytes > watch->resting_bytes) {
    const bool may_matter = all_bytes >= watch->least_bytes || kind->is_source || target.tensor != nullptr;
    is_recorded = may_matter && at::GradMode::is_enabled();
  }
  Record record;
  if (is_flat && is_recorded) {
    is_flat = target.tensor == nullptr && kind->is_certain && found.sighting &&
        describe(record, watch, book, as<Sighting>(found.sighting.get()), args, named);
  }
  const int64_t nbytes = is_recording ? all_bytes : as_bytes(estimate_result_bytes.get(estimate));
  if (!is_flat || !has_reserved(book, nbytes)) return run_else(watch, run, found, kind, args, named, target);
  Ref result(PyObject_Call(kind->call.get(), args, PyDict_GET_SIZE(named) == 0 ? nullptr : named));
  if (!result) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    reserve(book, -nbytes);
    PyErr_Restore(type, value, trace);
    throw Failed();
  }
  watch->busy_seconds += PyFloat_AsDouble(pace_seconds.get(pace));
  if (is_recorded) {
    put_down(record, watch, book, kind->object.get(), kind->func.get(), result.get(), nbytes, estimate);
  } else if (target.tensor == nullptr) {
    count_result(watch, book, result.get(), nbytes);
  } else {
    if (nbytes != 0) reserve(book, -nbytes);
    count_written(watch, book, result.get(), target);
  }
  return result;
}

// As `OnlineEngine.stays_asleep`, where nothing has to be done for it. Another thread may have ended the step, or
// woken it.
inline bool stays_asleep(const Watch* watch, const Book* book, int64_t nbytes) {
  const Hooks* host = find<Hooks>(watch->host, hooks_class);
  const Track* track = host == nullptr ? nullptr : find<Track>(host->follower, track_class);
  return track != nullptr && !is_none(watch->stand_in) && book->limit_bytes >= MOST_BYTES &&
      book->counted_bytes + nbytes <= host->alarm_bytes && PyObject_Size(book->dead) <= MOST_DEAD &&
      watch->ops <= track->due_ops;
}

// As planned, where that is no more than the plan has room for.
inline Ref run_asleep(
    Watch* watch, Book* book, const Kind* kind, PyObject* args, PyObject* named, const Target& target) {
  static PyObject* const watch_else = intern("watch");
  const Found found = find_estimate(watch, kind, args, named);
  if (!stays_asleep(watch, book, as_bytes(estimate_nbytes.get(found.estimate.get())))) {
    return run_else(watch, watch_else, found, kind, args, named, target);
  }
  Ref result;
  if (is_none(watch->run_asleep)) {
    result = call(kind, args, named);
  } else {
    Ref runner = Ref::borrow(watch->run_asleep);  // it may be gone before the op is
    Ref targets = need(target.tensor == nullptr ? PyTuple_New(0) : PyTuple_Pack(1, target.tensor));
    PyObject* given[] = {kind->object.get(), args, named, targets.get()};
    result = need(PyObject_Vectorcall(runner.get(), given, 4, nullptr));
  }
  if (target.tensor == nullptr) {
    count_result(watch, book, result.get(), 0);
  } else {
    count_written(watch, book, result.get(), target);
  }
  return result;
}

// As PyTorch calls it: the op, types, `args`, and `kwargs` or nothing.
inline PyObject* watch_dispatch(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  PyObject *func = count > 0 ? given[0] : nullptr, *args = count > 2 ? given[2] : nullptr;
  PyObject* named = count > 3 ? given[3] : nullptr;
  bool is_clear = count >= 2 && count <= 4;
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); i++) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    const bool is_args = PyUnicode_CompareWithASCIIString(name, "args") == 0;
    is_clear = is_clear && (is_args || PyUnicode_CompareWithASCIIString(name, "kwargs") == 0);
    (is_args ? args : named) = given[count + i];
  }
  Ref none(args == nullptr ? PyTuple_New(0) : nullptr);
  if (args == nullptr) args = none.get();
  if (is_none(named)) named = no_names;
  if (!is_clear || args == nullptr || !PyTuple_Check(args) || !PyDict_Check(named)) {
    PyErr_SetString(
        PyExc_TypeError, "__torch_dispatch__ takes an op, types, arguments in a tuple, and named ones in a dict");
    return nullptr;
  }
  Watch* watch = as<Watch>(self);
  return guarded([&]() -> PyObject* {
    if (watch->pauses != 0) return PyObject_Call(func, args, named);
    const Kind* kind = get_kind(func);
    watch->ops += kind->is_traced;
    Ref stand_in = Ref::borrow(is_none(watch->stand_in) ? nullptr : watch->stand_in);
    const bool is_plain_asleep = stand_in && is_none(watch->run_asleep);
    if (kind->is_idle && (!stand_in || is_plain_asleep)) return call(kind, args, named).release();
    Book* book = find<Book>(watch->account, book_class);
    if (book == nullptr || kind->is_idle) {
      if (kind->may_write) return write(watch, kind, args, named, stand_in.get()).release();
      static PyObject* const run = intern("run");
      Ref runner = stand_in ? std::move(stand_in) : need(PyObject_GetAttr(self, run));
      PyObject* passed[] = {kind->object.get(), args, named};
      return PyObject_Vectorcall(runner.get(), passed, 3, nullptr);
    }
    Target target;
    if (kind->may_write) {
      target = find_target(watch, book, kind, args);
      if (target.tensor == nullptr) return write(watch, kind, args, named, stand_in.get()).release();
    }
    return (stand_in ? run_asleep(watch, book, kind, args, named, target)
                     : run_awake(watch, book, kind, args, named, target))
        .release();
  });
}

inline PyMethodDef watch_methods[] = {
    {"__torch_dispatch__", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(watch_dispatch)),
     METH_FASTCALL | METH_KEYWORDS, nullptr},
    {nullptr}};

}  // namespace quick
