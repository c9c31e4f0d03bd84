#include "record_views.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace elbowroom {

namespace py = pybind11;

namespace {

py::object write_value(const at::IValue& value) {
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isString()) return py::str(value.toStringRef());
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    return py::reinterpret_steal<py::object>(PyComplex_FromDoubles(number.real(), number.imag()));
  }
  if (value.isDevice()) return py::reinterpret_steal<py::object>(THPDevice_New(value.toDevice()));
  py::list list;
  if (value.isIntList()) {
    for (const int64_t item : value.toIntVector()) list.append(item);
  } else if (value.isDoubleList()) {
    for (const double item : value.toDoubleVector()) list.append(item);
  } else if (value.isBoolList()) {
    for (const bool item : value.toBoolList()) list.append(item);
  } else if (value.isList()) {
    for (const at::IValue& item : value.toListRef()) list.append(write_value(item));
  } else {
    return py::none();
  }
  return list;
}

py::object write_number(uint32_t number) {
  return number == NONE ? py::object(py::none()) : py::object(py::int_(number));
}

py::object write_tensor(const Log& log, const TensorUse& use) {
  return use.is_defined ? py::cast(TensorView{log, use}) : py::object(py::none());
}

py::tuple write_tensors(const Log& log, const std::vector<TensorUse>& uses) {
  py::tuple tensors(uses.size());
  for (size_t index = 0; index < uses.size(); ++index) tensors[index] = write_tensor(log, uses[index]);
  return tensors;
}

py::tuple write_numbers(const std::vector<uint32_t>& numbers) {
  py::tuple written(numbers.size());
  for (size_t index = 0; index < numbers.size(); ++index) written[index] = numbers[index];
  return written;
}

// An argument of an op, copied: making Python objects may run other ops (finalizers), so nothing is locked meanwhile.
struct ArgumentCopy {
  ArgumentKind kind;
  at::IValue value;
  std::vector<TensorUse> tensors;
  bool is_statistic;
};

std::vector<ArgumentCopy> copy_arguments(const OpView& view) {
  const std::lock_guard lock(view.log->mutex);
  const OpRecord& op = view.log->ops[view.number];
  std::vector<ArgumentCopy> copies;
  for (size_t position = 0; position < op.info->argument_count; ++position) {
    const Argument& argument = view.log->arguments[op.arguments + position];
    ArgumentCopy copy{argument.kind, {}, {}, view.log->is_statistic(op, position)};
    if (argument.kind == ArgumentKind::VALUE || argument.kind == ArgumentKind::NUMBER) {
      copy.value = view.log->values[argument.first];
    } else {
      const auto first = view.log->tensors.begin() + argument.first;
      copy.tensors.assign(first, first + argument.count);
    }
    copies.push_back(std::move(copy));
  }
  return copies;
}

py::tuple write_arguments(const OpView& view) {
  const std::vector<ArgumentCopy> copies = copy_arguments(view);
  py::tuple arguments(copies.size());
  for (size_t position = 0; position < copies.size(); ++position) {
    const ArgumentCopy& copy = copies[position];
    if (copy.kind == ArgumentKind::VALUE || copy.kind == ArgumentKind::NUMBER) {
      arguments[position] = write_value(copy.value);
    } else if (copy.kind == ArgumentKind::TENSOR) {
      arguments[position] = write_tensor(view.log, copy.tensors.front());
    } else {
      arguments[position] = write_tensors(view.log, copy.tensors);
    }
  }
  return arguments;
}

// The tensors that an op reads: all of its arguments but the statistics that it only updates.
py::tuple write_reads(const OpView& view) {
  std::vector<TensorUse> reads;
  for (const ArgumentCopy& copy : copy_arguments(view)) {
    for (const TensorUse& use : copy.tensors) {
      if (use.is_defined && !copy.is_statistic) reads.push_back(use);
    }
  }
  return write_tensors(view.log, reads);
}

py::tuple write_results(const OpView& view) {
  std::vector<TensorUse> results;
  {
    const std::lock_guard lock(view.log->mutex);
    const OpRecord& op = view.log->ops[view.number];
    const auto first = view.log->tensors.begin() + op.results;
    results.assign(first, first + op.result_count);
  }
  return write_tensors(view.log, results);
}

py::tuple write_written(const OpView& view) {
  std::vector<uint32_t> written;
  {
    const std::lock_guard lock(view.log->mutex);
    view.log->visit_written(view.log->ops[view.number], [&](uint32_t storage) {
      if (std::find(written.begin(), written.end(), storage) == written.end()) written.push_back(storage);
    });
  }
  return write_numbers(written);
}

template <typename Get>
auto read_op(Get get) {
  return [get](const OpView& view) {
    const std::lock_guard lock(view.log->mutex);
    return get(view.log->ops[view.number]);
  };
}

template <typename Get>
auto read_storage(Get get) {
  return [get](const StorageView& view) {
    const std::lock_guard lock(view.log->mutex);
    return get(view.log->storages[view.number]);
  };
}

// The number of an op or a record, where there may be none.
template <typename Get>
auto read_number(Get get) {
  return [get](const StorageView& view) { return write_number(read_storage(get)(view)); };
}

py::tuple write_geometry(const TensorView& view, bool is_strides) {
  std::vector<int64_t> values;
  {
    const std::lock_guard lock(view.log->mutex);
    const auto first = view.log->geometry.begin() + view.use.geometry + (is_strides ? view.use.dimensions : 0);
    values.assign(first, first + view.use.dimensions);
  }
  py::tuple written(values.size());
  for (size_t index = 0; index < values.size(); ++index) written[index] = values[index];
  return written;
}

py::tuple write_writers(const StorageView& view) {
  std::vector<uint32_t> writers;
  {
    const std::lock_guard lock(view.log->mutex);
    for (uint32_t at = view.log->storages[view.number].last_write; at != NONE; at = view.log->writes[at].previous) {
      writers.push_back(view.log->writes[at].op);
    }
  }
  std::reverse(writers.begin(), writers.end());
  return write_numbers(writers);
}

}  // namespace

void bind_records(py::module_& module) {
  py::class_<TensorView>(module, "TensorUse", "A tensor in an argument or a result of an op. It holds nothing alive.")
      .def_property_readonly("storage", [](const TensorView& view) { return write_number(view.use.storage); })
      .def_property_readonly("version", [](const TensorView& view) { return view.use.version; })
      .def_property_readonly("dtype", [](const TensorView& view) {
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(view.use.dtype)));
      })
      .def_property_readonly("device", [](const TensorView& view) {
        const c10::Device device(view.use.device_type, static_cast<c10::DeviceIndex>(view.use.device_index));
        return py::reinterpret_steal<py::object>(THPDevice_New(device));
      })
      .def_property_readonly("shape", [](const TensorView& view) { return write_geometry(view, false); })
      .def_property_readonly("strides", [](const TensorView& view) { return write_geometry(view, true); })
      .def_property_readonly("offset", [](const TensorView& view) { return view.use.offset; })
      .def_property_readonly("requires_grad", [](const TensorView& view) { return view.use.requires_grad; })
      .def_property_readonly("obstacle", [](const TensorView& view) { return describe(view.use.obstacle); });
  py::class_<OpView>(module, "RecordedOp", "An op of a step: what it read, made and wrote.")
      .def_readonly("number", &OpView::number)
      .def_property_readonly("name", read_op([](const OpRecord& op) { return op.info->name; }))
      .def_property_readonly("arguments", &write_arguments)
      .def_property_readonly("reads", &write_reads)
      .def_property_readonly("results", &write_results)
      .def_property_readonly("written", &write_written)
      .def_property_readonly("begin_seconds", read_op([](const OpRecord& op) { return double(op.begin) * 1e-9; }))
      .def_property_readonly("end_seconds", read_op([](const OpRecord& op) { return double(op.end) * 1e-9; }))
      .def_property_readonly("thread", read_op([](const OpRecord& op) { return op.thread; }))
      .def_property_readonly("has_ended", read_op([](const OpRecord& op) { return op.has_ended; }))
      .def_property_readonly("obstacle", read_op([](const OpRecord& op) { return describe(op.obstacle); }));
  py::class_<StorageView>(module, "StorageRecord", "A storage of a step. It does not hold it alive.")
      .def_readonly("number", &StorageView::number)
      .def_property_readonly("nbytes", read_storage([](const StorageRecord& record) { return record.nbytes; }))
      .def_property_readonly("made_by", read_number([](const StorageRecord& record) { return record.made_by; }))
      .def_property_readonly("died_before", read_number([](const StorageRecord& record) { return record.died_before; }))
      .def_property_readonly("version", read_storage([](const StorageRecord& record) { return record.version; }))
      .def_property_readonly("is_watched", read_storage([](const StorageRecord& record) { return record.is_watched; }))
      .def_property_readonly("is_resizable", read_storage([](const StorageRecord& record) { return record.is_resizable; }))
      .def_property_readonly("is_alive", read_storage([](const StorageRecord& record) { return record.is_alive(); }))
      .def_property_readonly("writers", &write_writers);
}

}  // namespace elbowroom
