// What a step has in its hands: the classes that those of runtime/ are derived from, member by member.
#pragma once

#include "sightings.h"

#include <vector>

namespace quick {

enum Event : signed char { SAVED, NEEDED, FREED };
inline PyObject* events[3];  // StorageSaved, StorageNeeded, StorageFreed

constexpr int64_t NO_STORAGE = -1;

// Of what a trace is made of.
inline Slot trace_saves, trace_needs, trace_storages, save_tick, save_storage, need_tick, need_save;
inline Slot storage_nbytes, storage_role;
inline std::vector<PyObject*> lasting_roles;

// Under `Historian`.
struct Watch {
  PyObject_HEAD
  Py_ssize_t pauses, ops;
  double busy_seconds;
  long long resting_bytes, least_bytes;
  PyObject *stand_in, *run_asleep, *host, *account, *estimates, *lessons, *is_recording, *device_type;
  PyObject *places, *settings;
  c10::DeviceType device;
  bool has_device;
  static constexpr PyObject* Watch::*owned[] = {
      &Watch::stand_in, &Watch::run_asleep,   &Watch::host,        &Watch::account, &Watch::estimates,
      &Watch::lessons,  &Watch::is_recording, &Watch::device_type, &Watch::places,  &Watch::settings};
};

inline PyMemberDef watch_members[] = {
    {"pauses", T_PYSSIZET, offsetof(Watch, pauses), 0, nullptr},
    {"ops", T_PYSSIZET, offsetof(Watch, ops), 0, nullptr},
    {"busy_seconds", T_DOUBLE, offsetof(Watch, busy_seconds), 0, nullptr},
    {"_resting_bytes", T_LONGLONG, offsetof(Watch, resting_bytes), 0, nullptr},
    {"_least_bytes", T_LONGLONG, offsetof(Watch, least_bytes), 0, nullptr},
    {"stand_in", T_OBJECT_EX, offsetof(Watch, stand_in), 0, nullptr},
    {"_run_asleep", T_OBJECT_EX, offsetof(Watch, run_asleep), 0, nullptr},
    {"_host", T_OBJECT_EX, offsetof(Watch, host), 0, nullptr},
    {"_account", T_OBJECT_EX, offsetof(Watch, account), 0, nullptr},
    {"_estimates", T_OBJECT_EX, offsetof(Watch, estimates), 0, nullptr},
    {"_lessons", T_OBJECT_EX, offsetof(Watch, lessons), 0, nullptr},
    {"_is_recording", T_OBJECT_EX, offsetof(Watch, is_recording), 0, nullptr},
    {"_device_type", T_OBJECT_EX, offsetof(Watch, device_type), 0, nullptr},
    {"_places", T_OBJECT_EX, offsetof(Watch, places), 0, nullptr},
    {"_settings", T_OBJECT_EX, offsetof(Watch, settings), 0, nullptr},
    {nullptr}};

// Under `Past`.
struct Log {
  struct Entry {
    Event event;
    int64_t storage, tick, nbytes, counted_bytes;
    double seconds, busy_seconds;
  };
  PyObject_HEAD
  PyObject *clock, *account, *guests;
  std::vector<Entry>* entries;
  static constexpr PyObject* Log::*owned[] = {&Log::clock, &Log::account, &Log::guests};
  void close() { delete entries; }
};

inline PyMemberDef log_members[] = {
    {"_clock", T_OBJECT_EX, offsetof(Log, clock), 0, nullptr},
    {"_account", T_OBJECT_EX, offsetof(Log, account), 0, nullptr},
    {"guests", T_OBJECT_EX, offsetof(Log, guests), 0, nullptr},
    {nullptr}};

// Under `Calm`.
struct Lull {
  PyObject_HEAD
  long long ids;
  PyObject* past;
  static constexpr PyObject* Lull::*owned[] = {&Lull::past};
};

inline PyMemberDef lull_members[] = {
    {"ids", T_LONGLONG, offsetof(Lull, ids), 0, nullptr},
    {"_past", T_OBJECT_EX, offsetof(Lull, past), 0, nullptr},
    {nullptr}};

// A trace, as it is followed.
struct Timetable {
  struct Save {
    int64_t tick, storage, nbytes;
    bool is_lasting;
  };
  struct Need {
    int64_t tick, save;
  };
  std::vector<Save> saves;
  std::vector<Need> needs;

  explicit Timetable(PyObject* trace) {
    PyObject *all_saves = trace_saves.get(trace), *all_needs = trace_needs.get(trace);
    PyObject* storages = trace_storages.get(trace);
    if (!PyTuple_Check(all_saves) || !PyTuple_Check(all_needs)) {
      PyErr_SetString(PyExc_TypeError, "a trace has its saves and needs in tuples");
      throw Failed();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all_saves); i++) {
      PyObject* save = PyTuple_GET_ITEM(all_saves, i);
      const int64_t storage = save_storage.number(save);
      PyObject* home = PyTuple_GetItem(storages, storage);
      if (home == nullptr) throw Failed();
      bool is_lasting = false;
      for (PyObject* role : lasting_roles) is_lasting = is_lasting || role == storage_role.get(home);
      saves.push_back({save_tick.number(save), storage, storage_nbytes.number(home), is_lasting});
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all_needs); i++) {
      PyObject* need = PyTuple_GET_ITEM(all_needs, i);
      needs.push_back({need_tick.number(need), need_save.number(need)});
    }
  }
};

// Under `Follower`.
struct Track {
  PyObject_HEAD
  long long saves, needs, tick, extra_ops, due_ops;
  PyObject *trace, *bound, *may_doubt;
  PyObject* described;  // the trace that `timetable` is of
  Timetable* timetable;
  static constexpr PyObject* Track::*owned[] = {&Track::trace, &Track::bound, &Track::may_doubt, &Track::described};
  void close() { delete timetable; }
};

inline PyMemberDef track_members[] = {
    {"_saves", T_LONGLONG, offsetof(Track, saves), 0, nullptr},
    {"_needs", T_LONGLONG, offsetof(Track, needs), 0, nullptr},
    {"tick", T_LONGLONG, offsetof(Track, tick), 0, nullptr},
    {"_extra_ops", T_LONGLONG, offsetof(Track, extra_ops), 0, nullptr},
    {"due_ops", T_LONGLONG, offsetof(Track, due_ops), 0, nullptr},
    {"trace", T_OBJECT_EX, offsetof(Track, trace), 0, nullptr},
    {"_bound", T_OBJECT_EX, offsetof(Track, bound), 0, nullptr},
    {"_may_doubt", T_OBJECT_EX, offsetof(Track, may_doubt), 0, nullptr},
    {nullptr}};

// Under `OnlineEngine`.
struct Hooks {
  PyObject_HEAD
  long long saves, needs, due_tick, alarm_bytes;
  PyObject *lock, *calm, *past, *touched, *follower, *observer, *retired, *account, *sizes, *watcher;
  static constexpr PyObject* Hooks::*owned[] = {
      &Hooks::lock,     &Hooks::calm,    &Hooks::past,    &Hooks::touched, &Hooks::follower,
      &Hooks::observer, &Hooks::retired, &Hooks::account, &Hooks::sizes,   &Hooks::watcher};
};

inline PyMemberDef hooks_members[] = {
    {"saves", T_LONGLONG, offsetof(Hooks, saves), 0, nullptr},
    {"needs", T_LONGLONG, offsetof(Hooks, needs), 0, nullptr},
    {"_due_tick", T_LONGLONG, offsetof(Hooks, due_tick), 0, nullptr},
    {"_alarm_bytes", T_LONGLONG, offsetof(Hooks, alarm_bytes), 0, nullptr},
    {"_lock", T_OBJECT_EX, offsetof(Hooks, lock), 0, nullptr},
    {"_calm", T_OBJECT_EX, offsetof(Hooks, calm), 0, nullptr},
    {"_past", T_OBJECT_EX, offsetof(Hooks, past), 0, nullptr},
    {"_touched", T_OBJECT_EX, offsetof(Hooks, touched), 0, nullptr},
    {"_follower", T_OBJECT_EX, offsetof(Hooks, follower), 0, nullptr},
    {"_observer", T_OBJECT_EX, offsetof(Hooks, observer), 0, nullptr},
    {"_retired", T_OBJECT_EX, offsetof(Hooks, retired), 0, nullptr},
    {"account", T_OBJECT_EX, offsetof(Hooks, account), 0, nullptr},
    {"sizes", T_OBJECT_EX, offsetof(Hooks, sizes), 0, nullptr},
    {"watcher", T_OBJECT_EX, offsetof(Hooks, watcher), 0, nullptr},
    {nullptr}};

inline PyTypeObject *watch_class, *log_class, *lull_class, *track_class, *hooks_class;

template <typename Made>
Made* find(PyObject* object, PyTypeObject* made_as) {
  return object != nullptr && PyObject_TypeCheck(object, made_as) ? as<Made>(object) : nullptr;
}

}  // namespace quick
