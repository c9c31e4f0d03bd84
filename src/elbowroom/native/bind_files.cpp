// Python bindings of moves between files and memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <tuple>
#include <vector>

#include "file_runs.h"

namespace elbowroom {

namespace py = pybind11;

namespace {

using Dimensions = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

// Raises OSError.
template <typename Move>
void move_runs(const Dimensions& given, const Move& move) {
  std::vector<RunDimension> dimensions;
  for (const auto& [count, file_stride, memory_stride] : given) dimensions.push_back({count, file_stride, memory_stride});
  int error = 0;
  {
    const py::gil_scoped_release released;
    try {
      move(dimensions);
    } catch (const std::system_error& failure) {
      error = failure.code().value();
    }
  }
  if (error == 0) return;
  errno = error;
  PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

}  // namespace

void bind_files(py::module_& module) {
  module.def("read_runs", [](int file, int64_t offset, uintptr_t memory, int64_t run_bytes, const Dimensions& dimensions) {
        move_runs(dimensions, [&](const std::vector<RunDimension>& each) {
          read_runs(file, offset, reinterpret_cast<char*>(memory), run_bytes, each);  // NOLINT
        });
      }, py::arg("file"), py::arg("offset"), py::arg("memory"), py::arg("run_bytes"), py::arg("dimensions"),
      "Read runs of bytes of a file. A dimension has so many runs, and their distances in the file and in memory.");
  module.def("write_runs", [](int file, int64_t offset, uintptr_t memory, int64_t run_bytes, const Dimensions& dimensions) {
        move_runs(dimensions, [&](const std::vector<RunDimension>& each) {
          write_runs(file, offset, reinterpret_cast<const char*>(memory), run_bytes, each);  // NOLINT
        });
      }, py::arg("file"), py::arg("offset"), py::arg("memory"), py::arg("run_bytes"), py::arg("dimensions"),
      "Write runs of bytes to a file.");
}

}  // namespace elbowroom
