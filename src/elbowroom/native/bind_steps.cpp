// Python bindings of a step's storages and ops.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "device_bytes.h"
#include "ledger.h"
#include "op_arguments.h"
#include "op_watch.h"
#include "python_call.h"
#include "python_objects.h"
#include "watched_ops.h"

namespace elbowroom {

namespace py = pybind11;

namespace {

py::list find_residences(const std::vector<StorageRecordPtr>& records) {
  py::list found;
  for (const StorageRecordPtr& record : records) found.append(find_residence(record));
  return found;
}

StorageRecordPtr find_record(StorageTable& table, const c10::Storage& storage) {
  const std::lock_guard<std::mutex> guard(table.mutex);
  return table.find(storage.unsafeGetStorageImpl());
}

// Skips tensors on other devices or without a storage.
void mark_staying(StorageTable& table, const py::list& tensors, const std::string& device) {
  const c10::Device wanted(device);
  for (const py::handle each : tensors) {
    if (!THPVariable_Check(each.ptr())) throw py::type_error("a tensor is expected");
    const at::Tensor& tensor = THPVariable_Unpack(each.ptr());
    if (!is_on(tensor, wanted) || find_storage(tensor) == nullptr) continue;
    const std::lock_guard<std::mutex> guard(table.mutex);
    table.see(tensor.storage())->is_staying = true;
  }
}

// Counts by functions of an allocator in C. The first counts are those of `DeviceBytes`.
void count_by_functions(uintptr_t count, uintptr_t reset_peaks, uintptr_t memory, size_t fields) {
  using Count = void (*)(void*, int, int64_t*);
  using Reset = void (*)(void*, int);
  replace_device_counts(
      [=](c10::Device device) {
        std::vector<int64_t> counts(fields);
        reinterpret_cast<Count>(count)(reinterpret_cast<void*>(memory), device.index(), counts.data());
        return DeviceBytes{counts.at(0), counts.at(1), counts.at(2), counts.at(3)};
      },
      [=](c10::Device device) { reinterpret_cast<Reset>(reset_peaks)(reinterpret_cast<void*>(memory), device.index()); });
}

std::shared_ptr<OpWatch> make_watch(
    const std::string& device, std::shared_ptr<StorageTable> table, const py::object& host) {
  const auto tell = [&](const char* name) {
    return [method = Method(host, name)](const at::Tensor& tensor) {
      method.call([&](const py::object& tell) { tell(wrap(tensor)); });
    };
  };
  Callbacks callbacks;
  callbacks.before_write = tell("about_to_write");
  callbacks.after_write = tell("written");
  callbacks.leave = [method = Method(host, "leave")](const std::string& why) {
    method.call([&](const py::object& tell) { tell(why); });
  };
  callbacks.move_state = [method = Method(host, "move_state")](int64_t position, bool is_before) {
    method.call([&](const py::object& move) { move(position, is_before); });
  };
  if (table->scope == nullptr) {
    const Method limit(host, "device_limit");
    callbacks.make_room = [limit](const std::string& op, int64_t nbytes) {
      bool is_made = false;
      limit.call([&](const py::object& found) { is_made = found.attr("make_room")(op, nbytes).cast<bool>(); });
      return is_made;
    };
    callbacks.prepare_room = [limit](const std::string& op, int64_t nbytes, bool is_known, bool is_sliceable) {
      limit.call([&](const py::object& found) { found.attr("prepare_room")(op, nbytes, is_known, is_sliceable); });
    };
    callbacks.lift_limit = [limit] {
      limit.call([&](const py::object& found) { found.attr("lift_limit")(); });
    };
    callbacks.restore_limit = [limit] {
      limit.call([&](const py::object& found) { found.attr("restore_limit")(); });
    };
    callbacks.note_stream = [limit](c10::Stream stream) {
      limit.call([&](const py::object& found) {
        found.attr("note_stream")(stream.id(), static_cast<int64_t>(stream.device_index()), static_cast<int64_t>(stream.device_type()));
      });
    };
    callbacks.keep_budget = [limit](const std::string& op) {
      limit.call([&](const py::object& found) { found.attr("keep_budget")(op); });
    };
  }
  return std::make_shared<OpWatch>(c10::Device(device), std::move(table), std::move(callbacks));
}

OpKind unpack_kind(const py::dict& known) {
  const auto get = [&](const char* name) { return known[name].cast<bool>(); };
  OpKind kind;
  kind.name = known["name"].cast<std::string>();
  kind.is_traced = get("is_traced"), kind.is_idle = get("is_idle"), kind.uses_memory = get("uses_memory"), kind.may_write = get("may_write");
  kind.is_replayable = get("is_replayable"), kind.is_random = get("is_random");
  kind.is_source = get("is_source");
  kind.is_convolution = get("is_convolution");
  kind.has_other_ways = get("has_other_ways"), kind.uses_up = get("uses_up"), kind.takes_nothing = get("takes_nothing");
  kind.is_sliceable = get("is_sliceable");
  kind.written = known["written"].cast<std::vector<int64_t>>();
  kind.dropout = known["dropout"].cast<int64_t>();
  const auto statistics = known["statistics"].cast<std::vector<int64_t>>();
  kind.mean = statistics.at(0), kind.variance = statistics.at(1), kind.training = statistics.at(2);
  return kind;
}

py::list replay_all(const std::vector<RecordingPtr>& recordings, const py::list& leaves) {
  std::unordered_map<StorageRecord*, c10::Storage> there;
  for (const py::handle pair : leaves) {
    const auto [record, storage] = pair.cast<std::pair<StorageRecordPtr, py::object>>();
    if (!storage.is_none()) there.emplace(record.get(), unpack(storage));
  }
  std::vector<c10::Storage> made;
  {
    const py::gil_scoped_release released;
    made = replay(recordings, there);
  }
  py::list found;
  for (const c10::Storage& storage : made) found.append(wrap(storage));
  return found;
}

template <auto ask, typename... Args>
bool ask_with_mutex(const Recording& recording, StorageTable& table, const Args&... args) {
  const std::lock_guard<std::mutex> guard(table.mutex);
  return (recording.*ask)(args...);
}

void bind_records(py::module_& module) {
  py::class_<StorageRecord, StorageRecordPtr>(module, "StorageRecord", "Record of one storage of a step.")
      .def_property_readonly("ops", [](const StorageRecord& record) {
        py::list names;
        if (record.made_by) names.append(record.made_by->kind.name);
        for (const RecordedOpPtr& op : record.changed_by) names.append(op->kind.name);
        return names;
      })
      .def_property(
          "id", [](const StorageRecord& record) { return record.id.load(); },
          [](StorageRecord& record, int64_t id) { record.id = id; })
      .def_readwrite("nbytes", &StorageRecord::nbytes)
      .def_readwrite("version", &StorageRecord::version)
      .def_readwrite("views", &StorageRecord::views)
      .def_property_readonly("kept_count", [](const StorageRecord& record) { return record.kept_count.load(); },
          "Number of its saved tensors that the extension keeps.")
      .def_property_readonly("storage",
          [](const StorageRecord& record) -> py::object {
            const auto storage = record.storage.lock();
            return storage ? wrap(c10::Storage(storage)) : py::none();
          },
          "The latest storage; None if it was freed.")
      .def_property("is_handled", nullptr, [](StorageRecord& record, bool is_it) { record.is_handled = is_it; })
      .def("forget_saves", &StorageRecord::forget_saves, "Forget what the step knew of it: autograd has released it.")
      .def_readwrite("is_staying", &StorageRecord::is_staying)
      .def_readwrite("is_guarded", &StorageRecord::is_guarded);
  py::class_<StorageTable, std::shared_ptr<StorageTable>>(module, "StorageTable", "The records of one step's storages.")
      .def(py::init<Scope*>(), py::arg("scope").none(true))
      .def(
          "see",
          [](StorageTable& table, const py::handle& storage) {
            std::unique_lock<std::mutex> guard(table.mutex);
            const StorageRecordPtr record = table.see_counted(unpack(storage), guard);
            guard.unlock();
            return find_residence(record);
          },
          py::arg("storage"), "Return the Python object of a storage's record, which is created if needed.")
      .def(
          "find",
          [](StorageTable& table, const py::handle& storage) -> py::object {
            const StorageRecordPtr record = find_record(table, unpack(storage));
            return record ? find_residence(record) : py::none();
          },
          py::arg("storage"), "Return the Python object of a storage's record; None if there is no record.")
      .def(
          "put",
          [](StorageTable& table, const py::handle& storage, const StorageRecordPtr& record) {
            const std::lock_guard<std::mutex> guard(table.mutex);
            table.put(unpack(storage), record);
          },
          py::arg("storage"), py::arg("record"), "Give a record a new storage with the same contents.")
      .def(
          "stay",
          [](StorageTable& table, const py::handle& storage) {
            const std::lock_guard<std::mutex> guard(table.mutex);
            table.see(unpack(storage))->is_staying = true;
          },
          py::arg("storage"), "Mark a storage as if it outlived the step.")
      .def("mark_staying", &mark_staying, py::arg("tensors"), py::arg("device"), "Mark the storages of tensors that outlive the step.")
      .def("find_recording",
          [](StorageTable& table, const StorageRecordPtr& target) {
            const std::lock_guard<std::mutex> guard(table.mutex);
            return find_recording(target);
          },
          py::arg("target"), "Return the recording that recomputes a storage; None if there is none.")
      .def("clear", &StorageTable::clear, py::call_guard<py::gil_scoped_release>(), "Remove all records.");
  py::enum_<Source>(module, "Source", "Where a replay finds what an op read.")
      .value("STEP", Source::STEP)
      .value("KEPT", Source::KEPT)
      .value("COMES_BACK", Source::COMES_BACK);
  py::class_<Recording, RecordingPtr>(module, "Recording", "The ops that recompute one storage.")
      .def_property_readonly("places", [](const Recording& recording) {
        py::list places;
        for (const RecordedOpPtr& op : recording.ops) places.append(op->place);
        return py::tuple(places);
      })
      .def_property_readonly("names", [](const Recording& recording) {
        py::list names;
        for (const RecordedOpPtr& op : recording.ops) names.append(op->kind.name);
        return names;
      })
      .def_property_readonly("leaves", [](const Recording& recording) { return find_residences(recording.leaves); })
      .def_property_readonly("sources", [](const Recording& recording) { return find_residences(recording.sources); })
      .def_property_readonly("kept", [](const Recording& recording) {
        py::list kept;
        for (const c10::Storage& storage : recording.kept) kept.append(wrap(storage));
        return kept;
      })
      .def_readonly("seconds", &Recording::seconds)
      .def_readonly("nbytes", &Recording::nbytes)
      .def_readonly("read_bytes", &Recording::read_bytes)
      .def("is_back", &Recording::is_back, py::call_guard<py::gil_scoped_release>())
      .def("is_intact", &ask_with_mutex<&Recording::is_intact, std::vector<StorageRecord*>>, py::arg("table"), py::arg("copied"))
      .def("is_open", &ask_with_mutex<&Recording::is_open>, py::arg("table"))
      .def("is_current", &ask_with_mutex<&Recording::is_current>, py::arg("table"));
  module.def(
      "digest", [](const py::handle& storage) { return Digest(unpack(storage)).number(); }, py::arg("storage"),
      "Return a number for the bytes of a storage.");
  module.def("count_replay", &count_replay, py::arg("recordings"), "Return the peak bytes that a replay allocates.");
  module.def(
      "replay", &replay_all, py::arg("recordings"), py::arg("leaves"),
      "Replay recordings and return the storages of their targets. `leaves`: pairs of record and storage.");
}

py::object run_region(
    OpWatch& watch, const std::string& name, const py::sequence& inputs, const std::vector<at::Tensor>& written,
    const py::function& call) {
  int64_t nbytes = 0;
  for (const py::handle each : inputs) {
    if (THPVariable_Check(each.ptr())) nbytes += count_tensor_bytes(THPVariable_Unpack(each.ptr()));
  }
  py::object result;
  watch.run_region(name, nbytes, written, [&] { result = call(); });
  return result;
}

// Runs in the main thread between two bytecode instructions. Steals the reference to `function`.
int run_pending(void* function) {
  if (PythonCall::is_inside()) return Py_AddPendingCall(&run_pending, function);
  try {
    py::reinterpret_steal<py::object>(static_cast<PyObject*>(function))();
  } catch (py::error_already_set& raised) {
    raised.restore();
    return -1;
  }
  return 0;
}

void call_soon(const py::object& function) {
  PyObject* const taken = py::object(function).release().ptr();
  if (Py_AddPendingCall(&run_pending, taken) == 0) return;
  Py_DECREF(taken);
  throw std::runtime_error("too many calls are pending");
}

void bind_watch(py::module_& module) {
  py::class_<OpWatch, std::shared_ptr<OpWatch>>(module, "OpWatch", "Watches the ops of one step.")
      .def(py::init(&make_watch), py::arg("device"), py::arg("table"), py::arg("host"))
      .def("record", &OpWatch::record, py::arg("resting_bytes"), py::arg("least_bytes"))
      .def("skip", &OpWatch::skip, py::arg("ops"), "Count ops that have run before the watch began.")
      .def("follow", &OpWatch::follow, py::arg("names"), py::arg("ticks"), py::arg("sources"),
          py::arg("required"))
      .def("set_state_moves", &OpWatch::set_state_moves, py::arg("before"), py::arg("after"))
      .def("set_slicer",
          [](OpWatch& watch, const py::object& slicer, int64_t least_bytes) {
            watch.set_slicer(share(py::weakref(slicer)), least_bytes);
          },
          py::arg("slicer"), py::arg("least_bytes"),
          "Have an object run ops in slices that are refused memory; `wants` is asked about these, and beforehand about "
          "ops whose tensor arguments take at least so many bytes.")
      .def("stop_recording", &OpWatch::pass)
      .def("note_results", &OpWatch::note_results, py::arg("least_bytes"), "Note results of at least so many bytes, from now on.")
      .def("note_saved", &OpWatch::note_saved, py::arg("tensor"),
          "Note a saved tensor that autograd is given, as results of ops are noted.")
      .def("list_results", [](const OpWatch& watch) {
            py::list found;
            for (const auto& [storage, is_gradient] : watch.list_results()) found.append(py::make_tuple(wrap(storage), is_gradient));
            return found;
          }, "Return the storages of tensors that were noted, as far as they are still there and may leave in place, and "
             "whether they may be gradients, or buffers for them.")
      .def("restore_limit", &OpWatch::restore_limit, "Have a device's allocator limit requests, unless an op runs that must not be refused any.")
      .def("run_region", &run_region, py::arg("name"), py::arg("inputs"), py::arg("written"), py::arg("call"),
          "Run compiled code, which writes to the `written` tensors, as one op, and return the result of `call`.")
      .def("close", &OpWatch::close, py::call_guard<py::gil_scoped_release>())
      .def("make_recording", &OpWatch::make_recording, py::arg("ticks"), py::arg("target"))
      .def_property_readonly("ops", &OpWatch::ops)
      .def_property_readonly("recorded_ops", &OpWatch::recorded_ops)
      .def_property_readonly("busy_seconds", [](const OpWatch& watch) { return watch.busy_seconds(); })
      .def_property(
          "due_ops", [](const OpWatch& watch) { return watch.due_ops.load(); },
          [](OpWatch& watch, int64_t ops) { watch.due_ops = ops; })
      .def_property(
          "limit_bytes", [](const OpWatch& watch) { return watch.limit_bytes.load(); },
          [](OpWatch& watch, int64_t nbytes) { watch.limit_bytes = nbytes; });
  module.def("began_with_gil", &PythonCall::began_with_gil, "Return whether this thread held the GIL when an op called Python.");
  module.def(
      "set_aside", [](bool is_aside) { return std::exchange(get_thread().is_aside, is_aside); }, py::arg("is_aside"),
      "Set whether the ops of this thread are left out of its step, which is told what they write. Return the former value.");
  module.def(
      "announce_rises", [](const std::vector<at::Tensor>& tensors) { announce_rises(tensors); }, py::arg("tensors"),
      "Expect watched writes of this thread to tensors whose version counters are raised now.");
  module.def("set_watchers", &set_watchers, py::arg("watchers"), "Set the watchers that run every op of this thread.");
  module.def(
      "replace_device_counts",
      [](const py::object& count, const py::object& reset_peaks) {
        if (count.is_none()) return replace_device_counts(nullptr, nullptr);
        PyObject* const counts = py::object(count).release().ptr();  // never freed: a thread may be calling it
        PyObject* const resets = py::object(reset_peaks).release().ptr();
        const auto count_bytes = [counts](c10::Device) {
          const PythonCall call;
          const py::object found = call.make([&] { return py::handle(counts)(); });
          const auto [live, peak, reserved, reserved_peak] = found.cast<std::array<int64_t, 4>>();
          return DeviceBytes{live, peak, reserved, reserved_peak};
        };
        const auto reset = [resets](c10::Device) {
          const PythonCall call;
          call.make([&] { return py::handle(resets)(); });
        };
        replace_device_counts(count_bytes, reset);
      },
      py::arg("count"), py::arg("reset_peaks"), "Set functions that count, as `count_device_bytes` does, and that reset the peaks, instead of the device's allocator; None to unset.");
  module.def(
      "replace_device_counts",
      [](Scope& scope) {  // which is never freed
        replace_device_counts(
            [&scope](c10::Device) {
              const int64_t live = scope.live_bytes(), peak = scope.peak_bytes();
              return DeviceBytes{live, peak, live, peak};
            },
            [&scope](c10::Device) { scope.reset_peak(); });
      },
      py::arg("scope"), "Count the bytes of a scope instead of the device's allocator, as if it reserved no more.");
  module.def("replace_device_counts", &count_by_functions, py::arg("count"), py::arg("reset_peaks"), py::arg("memory"), py::arg("fields"),
      "Count by C functions at these addresses, which take an allocator, a device, and an array of so many counts. Neither needs the GIL.");
  const auto find_kept = [](const std::string& device, PeakReader reader) {
    const DevicePeaks found = find_kept_peaks(c10::Device(device), reader);
    return std::array{found.allocated, found.reserved};
  };
  module.def(
      "begin_peaks",
      [](const std::string& device) {
        reset_device_peaks(c10::Device(device));
        forget_kept_peaks(c10::Device(device), PeakReader::STEP);
      },
      py::arg("device"), "Begin to measure the peaks of a step. Those that the program reads go on.");
  module.def("reset_peaks", [](const std::string& device) { reset_device_peaks(c10::Device(device)); }, py::arg("device"), "Reset the peaks of a device's allocator, to measure what runs next; those of the step and of the program go on.");
  module.def("find_step_peaks", [find_kept](const std::string& device) { return find_kept(device, PeakReader::STEP); }, py::arg("device"), "Return the peaks of allocated and reserved bytes of a step, from before the allocator's were reset.");
  module.def("find_program_peaks", [find_kept](const std::string& device) { return find_kept(device, PeakReader::PROGRAM); }, py::arg("device"), "Return the peaks since `forget_program_peaks`, from before the allocator's were reset.");
  module.def("forget_program_peaks", [](const std::string& device) { forget_kept_peaks(c10::Device(device), PeakReader::PROGRAM); }, py::arg("device"), "Forget those peaks.");
  module.def(
      "find_growth",
      [](const std::string& op, const std::vector<at::Tensor>& tensors) {
        Sizes sizes;
        for (const at::Tensor& each : tensors) sizes.add(each);
        return find_growth(op, sizes).value_or(Growth()).nbytes;
      },
      py::arg("op"), py::arg("tensors"), "Return the most bytes that an op with such arguments took on a device whose allocator does not ask for room; 0 if it was not seen there.");
  module.def(
      "count_device_bytes",
      [](const std::string& device) {
        const DeviceBytes found = count_device_bytes(c10::Device(device));
        return std::array{found.live, found.peak, found.reserved, found.reserved_peak};
      },
      py::arg("device"), "Return the bytes that a device's allocator has handed out and their peak, and those that it has reserved and theirs.");
  module.def("update_key", &update_key, "Watch the ops of this thread if it has watchers, or there is managed state.");
  module.def("get_watchers", &get_watchers, "Return the watchers of this thread.");
  module.def("get_active_watchers", &get_active_watchers, "Return the watchers that would run an op now.");
  module.def("hide_from_guards", &hide_from_guards, "Hide the watchers' dispatch key from Dynamo's guards in this thread.");
  module.def("stop_hiding", &stop_hiding, "Undo `hide_from_guards`.");
  module.def("call_soon", &call_soon, py::arg("function"), "Have the main thread call a function between two bytecode instructions, not inside an op.");
  module.def("name_running_op", [] { return get_thread().running == nullptr ? std::string() : *get_thread().running; }, "Return the name of the op that this thread runs; empty outside of watched ops.");
  module.def(
      "learn",
      [](const py::function& find_kind, const py::object& residence) {
        PyObject* ask = py::object(find_kind).release().ptr();
        set_find_kind([ask](const std::string& name, const std::string& overload) {
          const PythonCall call;
          return unpack_kind(call.make([&] { return py::handle(ask)(name, overload); }).cast<py::dict>());
        });
        set_residence_class(residence);
      },
      py::arg("find_kind"), py::arg("residence"), "Set the function that returns the facts about an op, and the Python class of records.");
}

}  // namespace

void bind_steps(py::module_& module) {
  bind_records(module);
  bind_watch(module);
}

}  // namespace elbowroom
