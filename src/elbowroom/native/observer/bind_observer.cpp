// What Python sees of the observer.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "observer.h"
#include "record_views.h"
#include "replay.h"

namespace elbowroom {

namespace py = pybind11;

namespace {

// A Python callable that may be called, and let go, by threads without the interpreter's lock.
class Callable {
 public:
  explicit Callable(py::object callable) : callable_(callable.release().ptr()) {}
  ~Callable() {
    if (!is_python_there()) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(callable_);
  }
  Callable(const Callable&) = delete;
  Callable& operator=(const Callable&) = delete;

  static bool is_python_there() {
    if (!Py_IsInitialized()) return false;
#if PY_VERSION_HEX >= 0x030D0000
    return !Py_IsFinalizing();
#else
    return !_Py_IsFinalizing();
#endif
  }

  void operator()(uint32_t op, const std::vector<uint32_t>& storages, bool is_before) const {
    if (!is_python_there()) return;
    const py::gil_scoped_acquire gil;
    const py::error_scope kept;  // an op may be part of handling an error
    py::tuple numbers(storages.size());
    for (size_t index = 0; index < storages.size(); ++index) numbers[index] = storages[index];
    py::handle{callable_}(op, numbers, is_before);
  }

 private:
  PyObject* callable_;
};

// Python's own: when it goes, nobody will stop the observer.
class PythonObserver {
 public:
  PythonObserver(bool tracks_deaths, bool reads_clock)
      : observer(std::make_shared<Observer>(tracks_deaths, reads_clock)) {}
  ~PythonObserver() {
    if (observer->is_started()) observer->abandon();
  }

  const std::shared_ptr<Observer> observer;
};

c10::StorageImpl* find_storage_impl(const py::object& value) {
  if (THPStorage_Check(value.ptr())) return THPStorage_Unpack(value.ptr()).unsafeGetStorageImpl();
  if (!THPVariable_Check(value.ptr())) throw py::type_error("a tensor or an UntypedStorage is needed");
  const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
  if (!tensor.has_storage()) throw py::value_error("this tensor has no storage of its own");
  return tensor.storage().unsafeGetStorageImpl();
}

StorageView find_record(const PythonObserver& self, const py::object& value) {
  Log log = self.observer->log();
  c10::StorageImpl* storage = find_storage_impl(value);
  const std::lock_guard lock(log->mutex);
  return {log, log->find_storage(storage)};
}

template <typename Entry>
size_t count_entries(StepLog& log, const std::vector<Entry>& entries) {
  const std::lock_guard lock(log.mutex);
  return entries.size();
}

py::list list_ops(const PythonObserver& self) {
  Log log = self.observer->log();
  const size_t count = count_entries(*log, log->ops);
  py::list ops;
  for (uint32_t number = 0; number < count; ++number) ops.append(OpView{log, number});
  return ops;
}

py::list list_storages(const PythonObserver& self) {
  Log log = self.observer->log();
  const size_t count = count_entries(*log, log->storages);
  py::list storages;
  for (uint32_t number = 0; number < count; ++number) storages.append(StorageView{log, number});
  return storages;
}

void stop(const PythonObserver& self) {
  self.observer->stop();
  if (const std::exception_ptr error = self.observer->take_error()) std::rethrow_exception(error);
}

void tell_statistics(const std::map<std::string, std::tuple<int, int, std::optional<int>>>& statistics) {
  std::map<std::string, Statistics> told;
  for (const auto& [name, places] : statistics) {
    const auto& [mean, variance, training] = places;
    told.emplace("aten::" + name, Statistics{mean, variance, training.value_or(-1)});
  }
  set_statistics(std::move(told));
}

py::dict replay_ops(
    const PythonObserver& self, const std::vector<uint32_t>& ops, const py::dict& present, const std::vector<uint32_t>& wanted) {
  std::unordered_map<uint32_t, Bytes> given;
  for (const auto& [storage, bytes] : present) {
    const auto pair = bytes.cast<std::pair<py::object, uint32_t>>();
    if (!THPStorage_Check(pair.first.ptr())) throw py::type_error("a replay is given (UntypedStorage, version)");
    given.emplace(storage.cast<uint32_t>(), Bytes{THPStorage_Unpack(pair.first.ptr()), pair.second});
  }
  std::unordered_map<uint32_t, Bytes> made;
  {
    const py::gil_scoped_release released;
    made = replay(*self.observer->log(), ops, std::move(given), wanted);
  }
  py::dict storages;
  for (auto& [storage, bytes] : made) {
    storages[py::int_(storage)] = py::reinterpret_steal<py::object>(torch::createPyObject(bytes.storage));
  }
  return storages;
}

}  // namespace

void bind_observer(py::module_& module) {
  bind_records(module);
  py::class_<PythonObserver>(module, "Observer", "Records the ops of this thread, and of the backward passes it starts.")
      .def(py::init<bool, bool>(), py::arg("tracks_deaths") = false, py::arg("reads_clock") = false)
      .def("start", [](const PythonObserver& self) { self.observer->start(); }, "Begin a new step.")
      .def("stop", &stop, "End the step, and raise what `on_write` has raised first.")
      .def_property_readonly("is_started", [](const PythonObserver& self) { return self.observer->is_started(); })
      .def_static("pause", &Observer::pause, "Record no op of this thread, whoever observes it, until `resume`.")
      .def_static("resume", &Observer::resume)
      .def("ops", &list_ops, "The ops of the step so far, in order.")
      .def("storages", &list_storages, "The storages that they have used.")
      .def("storage_record", &find_record, py::arg("tensor"), "The record of a tensor's storage, made if there is none.")
      .def(
          "watch",
          [](const PythonObserver& self, const py::object& storage, bool is_watched) {
            const StorageView view = find_record(self, storage);
            const std::lock_guard lock(view.log->mutex);
            view.log->storages[view.number].is_watched = is_watched;
          },
          py::arg("storage"), py::arg("is_watched") = true, "Whether `on_write` is told of writes to a storage.")
      .def(
          "set_on_write",
          [](const PythonObserver& self, const py::object& on_write) {
            if (self.observer->is_started()) throw std::runtime_error("this observer is started already");
            auto callable = std::make_shared<Callable>(on_write);
            self.observer->set_on_write([callable](uint32_t op, const std::vector<uint32_t>& storages, bool is_before) {
              (*callable)(op, storages, is_before);
            });
          },
          py::arg("on_write"),
          "Call `on_write(op, storages, is_before)` before and after each op that writes to watched storages.")
      .def("replay", &replay_ops, py::arg("ops"), py::arg("present"), py::arg("wanted"),
           "Run ops again, in this order. `present`: by record, the storages that they read, with their versions. "
           "Returns the storages of the `wanted` records, which they have made.");
  module.def("set_statistics", &tell_statistics, py::arg("statistics"),
             "Which arguments of an op are statistics that it updates and does not read: by its name, without overload, "
             "(mean, variance, the flag for training or None).");
}

}  // namespace elbowroom
