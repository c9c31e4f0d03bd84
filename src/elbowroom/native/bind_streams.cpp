// Python bindings of copies on streams.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <tuple>

#include "copy_streams.h"
#include "python_objects.h"
#include "side_streams.h"

namespace elbowroom {

namespace py = pybind11;

namespace {

// `stream_id`, `device_index` and `device_type` of a stream in Python.
using StreamNumbers = std::tuple<int64_t, int64_t, int64_t>;

c10::Stream unpack_stream(const StreamNumbers& numbers) {
  const auto [id, index, type] = numbers;
  return c10::Stream::unpack3(id, static_cast<c10::DeviceIndex>(index), static_cast<c10::DeviceType>(type));
}

}  // namespace

void bind_streams(py::module_& module) {
  module.def(
      "replace_current_stream",
      [](const py::object& find) {
        if (find.is_none()) return replace_current_stream(nullptr);
        PyObject* const found = py::object(find).release().ptr();  // never freed: a thread may be calling it
        replace_current_stream([found] {
          const py::gil_scoped_acquire gil;
          return py::handle(found)().cast<c10::StreamId>();
        });
      },
      py::arg("find"), "Set a function that returns the id of the current stream, instead of the device's; None to unset.");
  py::class_<StreamEvent, StreamEventPtr>(module, "StreamEvent", "A point in a stream.")
      .def("is_done", [](const StreamEvent& event) { return event.event.query(); }, "Return whether the stream has passed it.")
      .def("block", [](const StreamEvent& event, const StreamNumbers& stream) { event.event.block(unpack_stream(stream)); },
          py::arg("stream"), "Have a stream wait for it.")
      .def("synchronize", [](const StreamEvent& event) { event.event.synchronize(); },
          py::call_guard<py::gil_scoped_release>(), "Wait until the stream has passed it.");
  py::class_<CopyStreams>(module, "CopyStreams", "Streams of a device that copy beside the one that computes.")
      .def(py::init([](const StreamNumbers& out, const StreamNumbers& back) {
             return std::make_unique<CopyStreams>(unpack_stream(out), unpack_stream(back));
           }), py::arg("out"), py::arg("back"))
      .def("record_compute", &CopyStreams::record_compute, "Return an event after all that was enqueued on the current stream.")
      .def("copy_out",
          [](const CopyStreams& streams, const py::handle& source, int64_t offset, uintptr_t host, int64_t nbytes,
             const StreamEvents& after) {
            const c10::Storage& storage = unpack(source);
            const py::gil_scoped_release released;
            return streams.copy_out(storage, offset, host, nbytes, after);
          },
          py::arg("source"), py::arg("offset"), py::arg("host"), py::arg("nbytes"), py::arg("after"),
          "Copy bytes of a storage to a host address after events, and return the event of its end.")
      .def("copy_in",
          [](const CopyStreams& streams, uintptr_t host, const py::handle& target, int64_t offset, int64_t nbytes,
             const StreamEvents& after) {
            const c10::Storage& storage = unpack(target);
            const py::gil_scoped_release released;
            return streams.copy_in(host, storage, offset, nbytes, after);
          },
          py::arg("host"), py::arg("target"), py::arg("offset"), py::arg("nbytes"), py::arg("after"),
          "Copy bytes from a host address into a storage after events, and return the event of its end.")
      .def("compute_waits", [](const CopyStreams& streams, const StreamEventPtr& event) { streams.compute_waits(*event); },
          py::arg("event"), "Have the current stream wait for an event.");
}

}  // namespace elbowroom
