// What Python sees of storages of model state.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "op_arguments.h"
#include "python_objects.h"
#include "settings.h"
#include "state_storages.h"
#include "watched_ops.h"

namespace elbowroom {

namespace py = pybind11;

namespace {

std::shared_ptr<StateTable> make_table(const py::object& host, const py::object& unwritten) {
  StateTable::Restore restore = [method = Method(host, "restore")](const StateStoragePtr& storage) {
    method.call([&](const py::object& restore) { restore(storage); });
  };
  StateTable::RunWaiting run_waiting = [method = Method(unwritten, "run_waiting")] {
    method.call([](const py::object& run) { run(); });
  };
  return std::make_shared<StateTable>(std::move(restore), std::move(run_waiting));
}

std::vector<const c10::StorageImpl*> list_storages(const std::vector<at::Tensor>& tensors) {
  std::vector<const c10::StorageImpl*> found;
  for (const at::Tensor& each : tensors) found.push_back(each.storage().unsafeGetStorageImpl());
  return found;
}

struct StateUses {
  StateUses() = default;
  StateUses(StateUses&&) = default;
  StateUses(const StateUses&) = delete;

  std::vector<std::unique_ptr<StateUse>> uses;
};

// Tensors without a storage, and those whose storages the table does not know, are left out.
StateUses use_all(const StateTable& table, const py::sequence& tensors) {
  StateUses found;
  std::unordered_set<const c10::StorageImpl*> seen;
  for (const py::handle each : tensors) {
    const c10::StorageImpl* const storage = find_storage(THPVariable_Unpack(each.ptr()));
    if (storage == nullptr || !seen.insert(storage).second) continue;
    if (const StateStoragePtr record = table.find(storage)) found.uses.push_back(std::make_unique<StateUse>(record, false));
  }
  return found;
}

// Bytes of the storages of tensors, each counted once.
int64_t count_storage_bytes(const py::sequence& tensors) {
  std::unordered_set<const c10::StorageImpl*> seen;
  int64_t nbytes = 0;
  for (const py::handle each : tensors) {
    const c10::StorageImpl* const storage = find_storage(THPVariable_Unpack(each.ptr()));
    if (storage != nullptr && seen.insert(storage).second) nbytes += static_cast<int64_t>(storage->nbytes());
  }
  return nbytes;
}

py::list list_unknown(const StateTable& table, const py::sequence& tensors, int64_t least_bytes) {
  py::list found;
  for (const py::handle each : tensors) {
    const c10::StorageImpl* const storage = find_storage(THPVariable_Unpack(each.ptr()));
    if (storage == nullptr || static_cast<int64_t>(storage->nbytes()) < least_bytes) continue;
    if (table.is_unknown(storage)) found.append(each);
  }
  return found;
}

// Calls compiled code, which reads its inputs and writes to some of them. It frees each input when it has read it, so
// that none may be held meanwhile.
py::object run_with_state(const py::list& inputs, const py::list& written, const py::function& call) {
  const auto list = [](const py::list& objects) {
    std::vector<at::Tensor> tensors;
    for (const py::handle each : objects) {
      if (THPVariable_Check(each.ptr())) tensors.push_back(THPVariable_Unpack(each.ptr()));
    }
    return tensors;
  };
  const StateUse use(list(inputs), list(written));
  const CalledBack called_back;
  return call();
}

}  // namespace

void bind_state(py::module_& module) {
  py::class_<StateStorage, StateStoragePtr>(module, "StateStorage", "A storage of model state, whose bytes may be away.")
      .def_property_readonly("nbytes", [](const StateStorage& storage) { return storage.nbytes.load(); })
      .def_property_readonly("misalignment", [](const StateStorage& storage) { return storage.misalignment; })
      .def_property_readonly("is_idle", &StateStorage::is_idle)
      .def_property_readonly("is_away", [](const StateStorage& storage) { return storage.is_away.load(); })
      .def_property_readonly("last_use", [](const StateStorage& storage) { return storage.last_use.load(); })
      .def_property(
          "is_written", [](const StateStorage& storage) { return storage.is_written.load(); },
          [](StateStorage& storage, bool is_written) { storage.is_written = is_written; })
      .def_property_readonly(
          "storage",
          [](const StateStorage& storage) -> py::object {
            auto held = storage.storage.lock();
            return held ? wrap(c10::Storage(std::move(held))) : py::none();
          })
      .def("begin_copy", &StateStorage::begin_copy, py::call_guard<py::gil_scoped_release>(),
          "Note writes from now on. Returns whether no op uses the storage, so that it may be copied.")
      .def("empty", &StateStorage::empty, py::call_guard<py::gil_scoped_release>(),
          "Free the memory, whose contents are copied. Returns whether that was possible.")
      .def("refill", [](StateStorage& storage, const py::handle& contents) { storage.refill(unpack(contents)); },
          py::arg("contents"), "Take over the memory of another storage.");
  py::class_<StateTable, std::shared_ptr<StateTable>>(module, "StateTable", "The storages of model state of one room.")
      .def(py::init(&make_table), py::arg("host"), py::arg("unwritten"))
      .def("add",
          [](StateTable& table, const py::handle& storage, bool is_movable) { return table.add(unpack(storage), is_movable); },
          py::arg("storage"), py::arg("is_movable") = false,
          "Return the record of a storage. `is_movable`: whether `choose` may choose it from now on.")
      .def("list_unknown", &list_unknown, py::arg("tensors"), py::arg("least_bytes"),
          "Return the tensors whose storages have so many bytes, and may not be chosen yet.")
      .def_static("forbid", &StateTable::forbid, py::arg("storage"), "Have `choose` not choose a storage any more.")
      .def("choose", &StateTable::choose, py::arg("missing_bytes"), py::arg("least_distance"),
          "Return movable storages that no op uses, of so many bytes if there are as many; what is used last comes first. "
          "What is used within `least_distance` events is left out.")
      .def("count_away", &StateTable::count_away, "Return the bytes that are away.")
      .def("make_away",
          [](StateTable& table, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, const py::object& like,
             int64_t nbytes) {
            const at::Tensor& model = THPVariable_Unpack(like.ptr());
            auto [tensor, record] = table.make_away(sizes, strides, model.scalar_type(), model.device(), nbytes);
            return py::make_tuple(wrap(tensor), record);
          },
          py::arg("sizes"), py::arg("strides"), py::arg("like"), py::arg("nbytes"),
          "Return a tensor whose bytes are away, with the dtype and device of another one, and its record.")
      .def("find", [](const StateTable& table, const py::handle& storage) {
            return table.find(unpack(storage).unsafeGetStorageImpl());
          }, py::arg("storage"))
      .def("use", &use_all, py::arg("tensors"), "Bring the storages of tensors back, and keep them in memory.")
      .def("list", &StateTable::list)
      .def("sweep", &StateTable::sweep, "Forget the storages that are gone, and return their records.")
      .def("clear", &StateTable::clear)
      .def("begin_step", &StateTable::begin_step)
      .def("watch_uses", &StateTable::watch_uses, py::arg("watches"),
          "Set whether ops note what they use although nothing is managed yet.")
      .def("note_waiting", [](StateTable& table, const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written) {
            table.note_waiting(list_storages(read), list_storages(written));
          }, py::arg("read"), py::arg("written"),
          "Note the tensors of ops that wait; `run_waiting` is called before what has to come after them.")
      .def_property_readonly("lost_waiting", &StateTable::lost_waiting,
          "Why ops that wait can never run, as their arguments were overwritten; empty if they can.")
      .def_property_readonly("events", &StateTable::events)
      .def_property_readonly("former_events", &StateTable::former_events);
  module.def("limit_lists", &StateTable::set_most_bytes, py::arg("most_bytes"),
      "Have ops over lists of tensors run over parts of the lists with at most so many bytes each.");
  module.def("count_storage_bytes", &count_storage_bytes, py::arg("tensors"),
      "Return the bytes of the storages of tensors, each counted once.");
  module.def("find_state", [](const py::handle& storage) { return find_state(unpack(storage).unsafeGetStorageImpl()); },
      py::arg("storage"), "Return the record of a storage, of whatever table; None if there is none.");
  module.def("is_any_state_managed", &StateTable::is_any_managed);
  module.def("run_with_state", &run_with_state, py::arg("inputs"), py::arg("written"), py::arg("call"));
  py::class_<StateUse>(module, "StateUse", "Brings a storage back, and keeps it in memory for as long as this object lives.")
      .def(py::init<const StateStoragePtr&, bool>(), py::arg("storage"), py::arg("is_written"));
  py::class_<StateUses>(module, "StateUses", "Keeps several storages in memory for as long as this object lives.");
  module.def("count_uses_elsewhere", [] {
        const UsesElsewhere uses = count_uses_elsewhere();
        return py::make_tuple(uses.begun, uses.running);
      }, "Return how many uses of memory other threads have begun, and how many of them have not ended.");
  py::class_<Settings>(module, "Settings", "What decides how ops compute: threads, precision, dtype by default and others.")
      .def("__eq__", [](const Settings& one, const Settings& other) { return one == other; });
  module.def("read_settings", &read_settings, "Return the present settings.");
  module.def("run_waiting", [](const py::function& run, const Settings& settings) {
        SettingsGuard guard;
        guard.change(settings);
        run_waiting([&] { run(); });
      }, py::arg("run"), py::arg("settings"), "Call a function that runs ops that waited, with the settings of theirs.");
  module.def("show_addresses", [](bool shows) { StateTable::show_addresses(shows, Shown::TO_PROFILER); },
      py::call_guard<py::gil_scoped_release>(), py::arg("shows"),
      "Have what is away show a null address to whatever asks for one, where it would raise an error.");
  module.def("watch_all_threads", &watch_all_threads, py::call_guard<py::gil_scoped_release>(),
      "Watch the ops of other threads if there is managed state.");
  module.def("update_watching", [] {
        update_key();
        show_to_callbacks();
        const py::gil_scoped_release released;
        watch_all_threads();
      }, "Watch ops from now on if there is managed state; those of this thread also if somebody else watches them.");
}

}  // namespace elbowroom
