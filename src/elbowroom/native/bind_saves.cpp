// Python bindings of saved tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <tuple>
#include <vector>

#include "op_watch.h"
#include "python_objects.h"
#include "saved_tensors.h"
#include "saved_view.h"
#include "trace_follower.h"

namespace elbowroom {

namespace py = pybind11;

namespace {

py::object find_residence_or_none(const StorageRecordPtr& record) { return record ? find_residence(record) : py::none(); }

// Takes a tensor apart by a function in Python.
std::optional<SavedTensors::Opened> open_by(const std::shared_ptr<c10::SafePyObject>& open, const at::Tensor& tensor) {
  const PythonCall python;
  std::optional<SavedTensors::Opened> opened;
  python.make([&]() -> py::object {
    const auto ask = py::reinterpret_borrow<py::object>(open->ptr(getPyInterpreter()));
    const py::object found = ask(wrap(tensor));
    if (found.is_none()) return found;
    opened.emplace();
    opened->inner = THPVariable_Unpack(found.attr("local").ptr());
    opened->close = [close = share(found.attr("close"))](const at::Tensor& inner) {
      const PythonCall python;
      const auto make = [&] { return py::reinterpret_borrow<py::object>(close->ptr(getPyInterpreter()))(wrap(inner)); };
      return THPVariable_Unpack(python.make(make).ptr());
    };
    return py::none();
  });
  return opened;
}

std::shared_ptr<SavedTensors> make_saved_tensors(
    const std::shared_ptr<OpWatch>& watch, const std::string& device, const py::object& host,
    std::vector<std::shared_ptr<Timetable>> known, int64_t least_bytes) {
  SavedTensors::Callbacks callbacks;
  const Method save(host, "save"), need(host, "need"), change(host, "leave_trace");
  const Method move(host, "move"), bring(host, "bring");
  callbacks.save = [save](int64_t index, const at::Tensor& tensor, const StorageRecordPtr& record) {
    SavedTensors::Answer answer;
    save.call([&](const py::object& ask) {
      py::object made = ask(index, wrap(tensor), find_residence_or_none(record));
      if (made.is_none()) return;
      answer.stays = made.attr("residence").is_none();
      answer.handle = share(std::move(made));
    });
    return answer;
  };
  callbacks.need = [need](int64_t index, const SavePtr& save) {
    at::Tensor given;
    need.call([&](const py::object& ask) {
      const py::object made = ask(index, save);
      if (!made.is_none()) given = THPVariable_Unpack(made.ptr());
    });
    return given;
  };
  callbacks.move = [move](int64_t tick) { move.call([&](const py::object& tell) { tell(tick); }); };
  callbacks.bring = [bring](const SavePtr& save, int64_t storage, int64_t tick) {
    at::Tensor given;
    bring.call([&](const py::object& ask) { given = THPVariable_Unpack(ask(save, storage, tick).ptr()); });
    return given;
  };
  callbacks.change = [change](const std::string& why) { change.call([&](const py::object& tell) { tell(why); }); };
  callbacks.open = [open = share(py::module_::import("elbowroom.hooks.wrapped_saves").attr("open_wrapper"))](
                       const at::Tensor& tensor) { return open_by(open, tensor); };
  std::vector<TimetablePtr> traces(known.begin(), known.end());
  auto made = std::make_shared<SavedTensors>(
      watch, c10::Device(device), std::move(callbacks), std::move(traces), least_bytes);
  watch->saved_tensors = made;
  return made;
}

std::shared_ptr<Timetable> make_timetable(
    const std::vector<std::tuple<int64_t, int64_t, int64_t, bool>>& saves,
    const std::vector<std::tuple<int64_t, int64_t>>& needs, int64_t storages) {
  auto made = std::make_shared<Timetable>();
  for (const auto& [tick, storage, nbytes, is_persistent] : saves) made->saves.push_back({tick, storage, nbytes, is_persistent});
  for (const auto& [tick, save] : needs) made->needs.push_back({tick, save});
  made->storages = storages;
  return made;
}

py::list list_entries(const std::vector<SavedTensors::Entry>& entries) {
  py::list list;
  for (const SavedTensors::Entry& each : entries) {
    list.append(py::make_tuple(
        static_cast<int>(each.event), each.storage, each.tick, each.nbytes, each.seconds, each.busy_seconds,
        each.live_bytes));
  }
  return list;
}

py::object unshare(const PythonObject& object) {
  return object ? py::reinterpret_borrow<py::object>(object->ptr(getPyInterpreter())) : py::none();
}

py::object wrap_if_any(const c10::Storage& storage) { return storage ? wrap(storage) : py::none(); }

py::object describe(const PlannedStorages::Handover* given) {
  if (given == nullptr) return py::none();
  return py::make_tuple(
      given->view, given->is_first, static_cast<int>(given->place), unshare(given->copy), wrap_if_any(given->back),
      given->released ? wrap(*given->released) : py::none());
}

void bind_planned_storages(py::module_& module) {
  using Planned = PlannedStorages;
  py::class_<Planned>(module, "PlannedStorages", "The storages that a plan moves by copies alone, by their ids.")
      .def("find_resident",
          [](Planned& planned, int64_t id) -> py::object {
            const auto found = planned.find_resident(id);
            return found ? wrap(*found) : py::none();
          },
          "Return the storage if it can be offloaded, else None.")
      .def("begin_leaving", [](Planned& planned, int64_t id, py::object copy) { planned.begin_leaving(id, share(std::move(copy))); },
          "Note that a copy of the storage is being made.")
      .def("release",
          [](Planned& planned, int64_t id) {
            PythonObject copy;
            {
              const py::gil_scoped_release released;
              copy = planned.release(id);
            }
            return unshare(copy);
          },
          "Release a storage that has a copy. If its transfer may still run, return the copy instead.")
      .def("find_away", [](Planned& planned, int64_t id) { return unshare(planned.find_away(id)); },
          "Return the copy of a storage that is away, else None. One that the program still holds comes back.")
      .def("begin_arriving",
          [](Planned& planned, int64_t id, const py::handle& back) { planned.begin_arriving(id, unpack(back)); },
          "Note that a copy is being read into a new storage.")
      .def("find_arriving", [](Planned& planned, int64_t id) { return unshare(planned.find_arriving(id)); },
          "Return the copy of a storage that is coming back, if its transfer may still run; else None.")
      .def("finish", &Planned::finish, "Note that compute waits for the transfer.")
      .def("lose", &Planned::lose, "Note that a storage did not arrive.")
      .def("holds", &Planned::holds, "Return whether autograd holds a storage of this id.")
      .def("take_freed",
          [](Planned& planned) {
            py::list list;
            for (const auto& [copy, is_moving] : planned.take_freed()) list.append(py::make_tuple(unshare(copy), is_moving));
            return list;
          },
          "Return the copies of storages that autograd has given up, and whether their transfers may still run.");
}

}  // namespace

void bind_saves(py::module_& module) {
  py::class_<Timetable, std::shared_ptr<Timetable>>(
      module, "Timetable", "The saves and needs of a trace.")
      .def(
          py::init(&make_timetable), py::arg("saves"), py::arg("needs"), py::arg("storages"),
          "`saves`: tick, storage, bytes, and whether the storage outlives the step; `needs`: tick and save.");
  py::class_<SavedView, SavedViewPtr>(module, "SavedView", "One saved tensor of a storage that may leave memory and come back.")
      .def(py::init([](const py::handle& tensor) { return SavedView(THPVariable_Unpack(tensor.ptr())); }), py::arg("tensor"))
      .def_property_readonly("tensor", [](const SavedView& view) { return wrap(view.tensor()); },
          "Shares the saved tensor's version counter, and until the release its bytes.")
      .def("check_version",
          [](const SavedView& view, int64_t expected) {
            try {
              view.check_version(expected);
            } catch (const c10::Error& error) {
              throw std::runtime_error(error.what_without_backtrace());
            }
          },
          py::arg("expected"),
          "Raise PyTorch's error if the saved tensor was modified in place since it had this version.")
      .def_property_readonly("is_released", &SavedView::is_released)
      .def_property_readonly(
          "storage",
          [](const SavedView& view) -> py::object { return view.is_released() ? py::none() : wrap(view.tensor().storage()); },
          "Its storage; None once it is released.")
      .def("release", [](SavedView& view) { view.release(); }, py::call_guard<py::gil_scoped_release>(), "Let go of the storage.")
      .def("make", [](const SavedView& view, const py::handle& storage) { return wrap(view.make(unpack(storage))); },
          py::arg("storage"), "Return the saved tensor, of a storage with its bytes.");
  bind_planned_storages(module);
  py::class_<Save, SavePtr>(module, "Save", "One tensor that autograd has saved.")
      .def_readonly("index", &Save::index)
      .def_readonly("version", &Save::version)
      .def_property_readonly("tensor", [](const Save& save) { return save.tensor.defined() ? wrap(save.tensor) : py::none(); })
      .def_property_readonly("residence", [](const Save& save) { return find_residence_or_none(save.record); })
      .def_property_readonly(
          "handle",
          [](const Save& save) { return unshare(save.handle); })
      .def_property_readonly(
          "is_written", [](const Save& save) { return save.record && save.record->version != save.seen; },
          "True if an op has written to its storage since the save.");
  py::class_<SavedTensors, std::shared_ptr<SavedTensors>>(
      module, "SavedTensors", "The tensors that autograd saves and needs in one step.")
      .def(
          py::init(&make_saved_tensors), py::arg("watch"), py::arg("device"), py::arg("host"), py::arg("known"),
          py::arg("least_bytes"))
      .def("log", &SavedTensors::log, py::arg("touched"), py::arg("planned"), py::arg("due_tick"))
      .def("defer", &SavedTensors::defer)
      .def("set_marks", &SavedTensors::set_marks, py::arg("low_bytes"), py::arg("high_bytes"))
      .def("take_log", [](SavedTensors& saved) { return list_entries(saved.take_log()); })
      .def("take_new",
          [](SavedTensors& saved) {
            py::list list;
            for (const auto& [record, is_written] : saved.take_new()) {
              list.append(py::make_tuple(find_residence(record), is_written));
            }
            return list;
          })
      .def("take_released",
          [](SavedTensors& saved) {
            py::list list;
            for (const StorageRecordPtr& each : saved.take_released()) list.append(find_residence(each));
            return list;
          })
      .def(
          "hand_over",
          [](SavedTensors& saved, const StorageRecordPtr& record, const py::function& make_handle) {
            saved.hand_over(record, [&](const SavePtr& save, const PlannedStorages::Handover* given) {
              return share(make_handle(save, describe(given)));
            });
          },
          py::arg("record"), py::arg("make_handle"))
      .def("tell", [](SavedTensors& saved) { return list_entries(saved.tell()); })
      .def("end", &SavedTensors::end)
      .def(
          "note",
          [](SavedTensors& saved, int event, int64_t storage, int64_t tick, int64_t nbytes) {
            saved.note(static_cast<SavedTensors::Event>(event), storage, tick, nbytes);
          },
          py::arg("event"), py::arg("storage"), py::arg("tick"), py::arg("nbytes"))
      .def(
          "settle",
          [](SavedTensors& saved, const py::function& make_handle, bool only_planned) {
            const auto make = [&](const SavePtr& save, const PlannedStorages::Handover* given) {
              return share(make_handle(save, describe(given)));
            };
            saved.settle(make, only_planned);
          },
          py::arg("make_handle"), py::arg("only_planned"))
      .def("make",
          [](SavedTensors& saved, const Save& save) -> py::object {
            const at::Tensor made = saved.make(save);
            return made.defined() ? wrap(made) : py::none();
          },
          py::arg("save"), "Return the saved tensor, of a planned storage that is there; None otherwise.")
      .def_property_readonly("planned", &SavedTensors::planned, py::return_value_policy::reference_internal)
      .def("follow_save", &SavedTensors::follow_save, py::arg("index"), py::arg("record").none(true))
      .def("follow_need", &SavedTensors::follow_need, py::arg("index"), py::arg("save"))
      .def("leave", &SavedTensors::leave, py::arg("why"))
      .def("stop", &SavedTensors::stop, py::arg("why"))
      .def("is_persistent", &SavedTensors::is_persistent, py::arg("save"))
      .def("make_id", &SavedTensors::make_id)
      .def_property("due_tick", nullptr, &SavedTensors::set_due_tick)
      .def_property_readonly("followed", [](const SavedTensors& saved) { return saved.followed(); })
      .def_property_readonly("tick", &SavedTensors::tick)
      .def_property_readonly("saves", &SavedTensors::saves)
      .def_property_readonly("needs", &SavedTensors::needs)
      .def_property_readonly("sizes", &SavedTensors::sizes);
}

}  // namespace elbowroom
