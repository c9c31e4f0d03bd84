// `Engine`, `Calm`, `Past` and `Follower`: what autograd saves and needs while nothing has to move. See the methods of
// the same names in runtime/engine.py, calm.py, past.py and follower.py.
#pragma once

#include "storages.h"

#include <torch/csrc/utils/disable_torch_function.h>

#include <chrono>

namespace quick {

// Of `Keepsake` and `Guest`.
inline PyTypeObject *keepsake_class, *guest_class;
inline Slot keepsake_index, keepsake_tensor, keepsake_version, guest_residence, guest_seen, guest_handle;

constexpr int64_t SLACK_OPS = 64;
constexpr int64_t NEVER = int64_t{1} << 60;

// -- Past ---------------------------------------------------------------------------------------------------------

inline bool is_able(const Log* log) {
  return log != nullptr && find<Watch>(log->clock, watch_class) != nullptr &&
      find<Book>(log->account, book_class) != nullptr && log->guests != nullptr;
}

inline void note(Log* log, Event event, int64_t storage, int64_t tick, int64_t nbytes) {
  if (log->entries == nullptr) log->entries = new std::vector<Log::Entry>();
  const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();  // `perf_counter`
  log->entries->push_back(
      {event, storage, tick, nbytes, as<Book>(log->account)->counted_bytes, now.count(),
       as<Watch>(log->clock)->busy_seconds});
}

inline PyObject* log_add(PyObject* self, PyObject* args) {
  PyObject* event;
  long long storage, tick, nbytes = 0;
  if (!PyArg_ParseTuple(args, "OLL|L", &event, &storage, &tick, &nbytes)) return nullptr;
  for (int each = 0; each < 3; each++) {
    if (events[each] != event) continue;
    if (!is_able(as<Log>(self))) break;
    return guarded([&] {
      note(as<Log>(self), static_cast<Event>(each), storage, tick, nbytes);
      return Py_NewRef(Py_None);
    });
  }
  PyErr_Format(PyExc_TypeError, "no event to put down: %R", event);
  return nullptr;
}

// As `Past._events`: one flat list.
inline PyObject* log_events(PyObject* self, void*) {
  return guarded([&] {
    Ref made = need(PyList_New(0));
    if (as<Log>(self)->entries == nullptr) return made.release();
    const auto entries = *as<Log>(self)->entries;  // as they are now: there may be more before all are told
    for (const Log::Entry& each : entries) {
      Ref parts[] = {
          Ref::borrow(events[each.event]),       need(PyLong_FromLongLong(each.storage)),
          need(PyLong_FromLongLong(each.tick)),  need(PyLong_FromLongLong(each.nbytes)),
          need(PyFloat_FromDouble(each.seconds)), need(PyFloat_FromDouble(each.busy_seconds)),
          need(PyLong_FromLongLong(each.counted_bytes))};
      for (Ref& part : parts) {
        if (PyList_Append(made.get(), part.get()) < 0) throw Failed();
      }
    }
    return made.release();
  });
}

inline int log_forget(PyObject* self, PyObject*, void*) {
  if (as<Log>(self)->entries != nullptr) as<Log>(self)->entries->clear();
  return 0;
}

inline PyMethodDef log_methods[] = {{"add", log_add, METH_VARARGS, nullptr}, {nullptr}};
inline PyGetSetDef log_properties[] = {{"_events", log_events, log_forget, nullptr, nullptr}, {nullptr}};

// -- what is kept of a tensor -------------------------------------------------------------------------------------

// A plain tensor without its graph, unseen by modes.
inline Ref make_alias(const at::Tensor& tensor) {
  torch::DisableTorchDispatch hidden;
  c10::impl::ExcludeDispatchKeyGuard unwatched{c10::DispatchKeySet(c10::DispatchKey::Fake)};
  return need(THPVariable_Wrap(tensor.detach()));
}

// What stays may be a leaf, which has no graph to hold: that itself.
inline Ref make_witness(PyObject* tensor) {
  const at::Tensor& inner = THPVariable_Unpack(tensor);
  return inner.is_leaf() ? Ref::borrow(tensor) : make_alias(inner);
}

inline Ref make_keepsake(PyTypeObject* made_as, int64_t index, Ref tensor, int64_t version) {
  Ref made = need(made_as->tp_alloc(made_as, 0));
  keepsake_index.set(made.get(), PyLong_FromLongLong(index));
  keepsake_tensor.set(made.get(), tensor.release());
  keepsake_version.set(made.get(), PyLong_FromLongLong(version));
  return made;
}

inline Ref make_guest(Log* log, int64_t index, PyObject* residence, Ref alias, int64_t version) {
  Ref made = make_keepsake(guest_class, index, std::move(alias), version);
  guest_residence.share(made.get(), residence);
  guest_seen.share(made.get(), residence_version.get(residence));
  guest_handle.share(made.get(), Py_None);
  if (PyList_Append(log->guests, need(PyWeakref_NewRef(made.get(), nullptr)).get()) < 0) throw Failed();
  return made;
}

inline void append_number(PyObject* list, int64_t number) {
  if (PyList_Append(list, need(PyLong_FromLongLong(number)).get()) < 0) throw Failed();
}

// -- Follower -----------------------------------------------------------------------------------------------------

inline Timetable* find_timetable(Track* track) {
  if (is_none(track->trace)) return nullptr;
  if (track->described != track->trace) {
    delete std::exchange(track->timetable, nullptr);
    Py_CLEAR(track->described);
    track->timetable = new Timetable(track->trace);
    track->described = Py_NewRef(track->trace);
  }
  return track->timetable;
}

inline void reach(Track* track, const Timetable* timetable, int64_t tick, int64_t ops) {
  track->tick = tick;
  track->extra_ops = ops - (tick + 1 - track->saves - track->needs);
  const size_t next = static_cast<size_t>(track->saves), also = static_cast<size_t>(track->needs);
  if (next >= timetable->saves.size() ||
      (also < timetable->needs.size() && timetable->needs[also].tick < timetable->saves[next].tick)) {
    track->due_ops = NEVER;
  } else {
    track->due_ops = timetable->saves[next].tick - track->saves - track->needs + SLACK_OPS;
  }
}

// -- Engine -------------------------------------------------------------------------------------------------------

inline PyObject *pack_else, *unpack_else;

// A tensor that is a plain block of bytes on the device, where the step counts what it holds.
struct Given {
  const at::Tensor* tensor = nullptr;
  Ref storage;
  PyObject* place = nullptr;  // borrowed
  int64_t nbytes = 0;
};

inline Given look(Watch* watch, Book* book, PyObject* value) {
  Given given;
  given.storage = find_plain_storage(watch, value);
  if (!given.storage) return given;
  given.place = find_place(book, given.storage.get(), make_key(given.storage.get()).get());
  if (given.place == nullptr) return given;
  given.nbytes = get_nbytes(given.storage.get());
  given.tensor = &THPVariable_Unpack(value);
  return given;
}

inline Ref save_calmly(Hooks* hooks, Lull* lull, Watch* watch, Book* book, PyObject* tensor) {
  Log* log = find<Log>(lull->past, log_class);
  if (!is_able(log)) return Ref();
  const Given given = look(watch, book, tensor);
  if (given.tensor == nullptr) return Ref();
  const int64_t index = hooks->saves, version = given.tensor->_version();
  if (Py_IS_TYPE(given.place, staying_class)) {
    Ref made = make_keepsake(keepsake_class, index, make_witness(tensor), version);
    append_number(hooks->sizes, given.nbytes);
    note(log, SAVED, NO_STORAGE, index, 0);
    hooks->saves = index + 1;
    return made;
  }
  Ref residence = see(book, given.place, given.nbytes);
  if (!residence || residence_nbytes.number(residence.get()) != given.nbytes) return Ref();
  Ref alias = make_alias(*given.tensor);
  int64_t id = residence_id.number(residence.get());
  if (id < 0) {
    id = lull->ids++;
    residence_id.set(residence.get(), PyLong_FromLongLong(id));
  }
  append_number(hooks->sizes, given.nbytes);
  note(log, SAVED, id, index, given.nbytes);
  hooks->saves = index + 1;
  return make_guest(log, index, residence.get(), std::move(alias), version);
}

// Where nothing that is planned is due, of what no plan touches.
inline Ref save_asleep(Hooks* hooks, Watch* watch, Book* book, PyObject* tensor) {
  Log* log = find<Log>(hooks->past, log_class);
  Track* track = as<Track>(hooks->follower);
  const int64_t index = hooks->saves;
  Timetable* timetable = find_timetable(track);
  if (!is_able(log) || timetable == nullptr || static_cast<size_t>(index) >= timetable->saves.size()) return Ref();
  const Timetable::Save& save = timetable->saves[index];
  if (save.tick >= hooks->due_tick || save.nbytes == 0) return Ref();
  if (track->may_doubt != Py_False && save.tick != watch->ops + index + track->needs) return Ref();
  const Given given = look(watch, book, tensor);
  if (given.tensor == nullptr || given.nbytes != save.nbytes) return Ref();
  Ref key = need(PyLong_FromLongLong(save.storage));
  if (!save.is_lasting) {
    const int touches = PySet_Contains(hooks->touched, key.get());
    if (touches < 0) throw Failed();
    if (touches) return Ref();
  }
  Ref residence = see(book, given.place, given.nbytes);
  if (!residence || residence_nbytes.number(residence.get()) != given.nbytes) return Ref();
  const int64_t id = residence_id.number(residence.get());
  PyObject* bound = PyDict_GetItemWithError(track->bound, key.get());
  if (bound == nullptr && PyErr_Occurred()) throw Failed();
  if (bound != residence.get() && (bound != nullptr || (id != -1 && id != save.storage))) return Ref();
  const int64_t version = given.tensor->_version();
  Ref made;
  if (save.is_lasting) {
    made = make_keepsake(keepsake_class, index, make_witness(tensor), version);
    note(log, SAVED, NO_STORAGE, save.tick, 0);
  } else {
    Ref alias = make_alias(*given.tensor);
    if (id < 0) {
      residence_id.share(residence.get(), key.get());
      if (PyDict_SetItem(track->bound, key.get(), residence.get()) < 0) throw Failed();
    }
    made = make_guest(log, index, residence.get(), std::move(alias), version);
    note(log, SAVED, save.storage, save.tick, given.nbytes);
  }
  append_number(hooks->sizes, given.nbytes);
  hooks->saves = index + 1;
  track->saves = index + 1;
  reach(track, timetable, save.tick, watch->ops);
  return made;
}

// What a handle has, where it is there, and nobody has written to it since.
inline PyObject* find_kept(PyObject* handle, PyObject** residence) {
  const bool is_guest = Py_IS_TYPE(handle, guest_class);
  if (!is_guest && !Py_IS_TYPE(handle, keepsake_class)) return nullptr;
  PyObject* tensor = keepsake_tensor.get(handle);
  if (tensor == Py_None || !is_plain(tensor)) return nullptr;
  if (THPVariable_Unpack(tensor)._version() != keepsake_version.number(handle)) return nullptr;
  *residence = is_guest ? guest_residence.get(handle) : nullptr;
  return tensor;
}

inline Ref need_calmly(Hooks* hooks, Lull* lull, PyObject* handle) {
  Log* log = find<Log>(lull->past, log_class);
  PyObject* residence;
  PyObject* given = is_able(log) ? find_kept(handle, &residence) : nullptr;
  if (given == nullptr) return Ref();
  note(log, NEEDED, residence == nullptr ? NO_STORAGE : residence_id.number(residence), hooks->needs, 0);
  hooks->needs++;
  return Ref::borrow(given);
}

inline Ref need_asleep(Hooks* hooks, Watch* watch, PyObject* handle) {
  Log* log = find<Log>(hooks->past, log_class);
  Track* track = as<Track>(hooks->follower);
  const int64_t index = hooks->needs;
  Timetable* timetable = find_timetable(track);
  if (!is_able(log) || timetable == nullptr || static_cast<size_t>(index) >= timetable->needs.size()) return Ref();
  const Timetable::Need& need = timetable->needs[index];
  PyObject* residence;
  PyObject* given = need.tick < hooks->due_tick ? find_kept(handle, &residence) : nullptr;
  if (given == nullptr || keepsake_index.number(handle) != need.save) return Ref();
  note(log, NEEDED, residence == nullptr ? NO_STORAGE : residence_id.number(residence), need.tick, 0);
  hooks->needs = track->needs = index + 1;
  reach(track, timetable, need.tick, watch->ops);
  return Ref::borrow(given);
}

enum Way { CALM, ASLEEP, ELSE };

inline Way find_way(const Hooks* hooks) {
  const bool is_counted = find<Book>(hooks->account, book_class) != nullptr;
  if (!is_counted || find<Watch>(hooks->watcher, watch_class) == nullptr) return ELSE;
  if (!is_none(hooks->calm)) return PyObject_TypeCheck(hooks->calm, lull_class) ? CALM : ELSE;
  const bool is_asleep = !is_none(hooks->touched) && is_none(hooks->observer) &&
      find<Track>(hooks->follower, track_class) != nullptr && PyObject_Size(hooks->retired) == 0;
  return is_asleep ? ASLEEP : ELSE;
}

inline PyObject* hooks_pack(PyObject* self, PyObject* tensor) {
  Hooks* hooks = as<Hooks>(self);
  return guarded([&]() -> PyObject* {
    if (find_way(hooks) != ELSE) {
      Held held(hooks->lock);
      const Way way = find_way(hooks);  // another thread may have changed it
      Watch* watch = as<Watch>(hooks->watcher);
      Book* book = as<Book>(hooks->account);
      Ref made;
      if (way == CALM) {
        made = save_calmly(hooks, as<Lull>(hooks->calm), watch, book, tensor);
      } else if (way == ASLEEP) {
        made = save_asleep(hooks, watch, book, tensor);
      }
      if (made) return made.release();
    }
    PyObject* given[] = {self, tensor};
    return PyObject_Vectorcall(pack_else, given, 2, nullptr);
  });
}

inline PyObject* hooks_unpack(PyObject* self, PyObject* handle) {
  Hooks* hooks = as<Hooks>(self);
  return guarded([&]() -> PyObject* {
    if (find_way(hooks) != ELSE) {
      Held held(hooks->lock);
      const Way way = find_way(hooks);
      Ref made;
      if (way == CALM) {
        made = need_calmly(hooks, as<Lull>(hooks->calm), handle);
      } else if (way == ASLEEP) {
        made = need_asleep(hooks, as<Watch>(hooks->watcher), handle);
      }
      if (made) return made.release();
    }
    PyObject* given[] = {self, handle};
    return PyObject_Vectorcall(unpack_else, given, 2, nullptr);
  });
}

inline PyMethodDef hooks_methods[] = {
    {"pack", hooks_pack, METH_O, nullptr}, {"unpack", hooks_unpack, METH_O, nullptr}, {nullptr}};

}  // namespace quick
