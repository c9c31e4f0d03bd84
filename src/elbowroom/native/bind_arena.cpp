// Python bindings of the arena, for tests and figures. Addresses are integers, 0 for none.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "arena.h"

namespace elbowroom {

namespace py = pybind11;

namespace {

py::dict describe(const ArenaStatistics& counts) {
  py::dict found;
  found["live_bytes"] = counts.live_bytes;
  found["live_peak_bytes"] = counts.live_peak_bytes;
  found["mapped_bytes"] = counts.mapped_bytes;
  found["mapped_peak_bytes"] = counts.mapped_peak_bytes;
  found["limit_bytes"] = counts.limit_bytes;
  found["blocks"] = counts.blocks;
  found["requests"] = counts.requests;
  found["reused"] = counts.reused;
  found["failed"] = counts.failed;
  found["newly_mapped_bytes"] = counts.newly_mapped_bytes;
  found["given_back_bytes"] = counts.given_back_bytes;
  return found;
}

py::list list_segments(const Arena& arena) {
  constexpr const char* names[] = {"live", "mapped", "unmapped", "lost"};
  py::list found;
  for (const Segment& each : arena.list_segments())
    found.append(py::make_tuple(each.begin, each.nbytes, names[static_cast<int>(each.state)]));
  return found;
}

}  // namespace

void bind_arena(py::module_& module) {
  const auto to_address = [](void* block) { return reinterpret_cast<uintptr_t>(block); };
  const auto to_block = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  using no_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<Arena, std::unique_ptr<Arena>>(module, "Arena", "CPU memory with few unused pages.", py::module_local())
      .def(py::init<>())
      .def(
          "allocate", [=](Arena& arena, size_t nbytes) { return to_address(arena.allocate(nbytes)); },
          py::arg("nbytes"), no_gil(), "Return the address of a new block; 0 if the system refuses memory.")
      .def(
          "free", [=](Arena& arena, uintptr_t address) { return arena.free(to_block(address)); }, py::arg("address"),
          no_gil(), "Free a block. Returns False if none begins at the address.")
      .def(
          "owns", [=](const Arena& arena, uintptr_t address) { return arena.owns(to_block(address)); },
          py::arg("address"), "Tell whether a block begins at the address.")
      .def(
          "forget_peak", &Arena::forget_peak, py::arg("nbytes"),
          "Lower the peak of live bytes that limits the mapped bytes.")
      .def("trim", &Arena::trim, py::arg("keep_bytes"), "Unmap free pages beyond `keep_bytes`. Returns their bytes.")
      .def("reset_peaks", &Arena::reset_peaks)
      .def("statistics", [](const Arena& arena) { return describe(arena.get_statistics()); })
      .def("count_resident_bytes", &Arena::count_resident_bytes, "Resident bytes according to the kernel.")
      .def("list_segments", &list_segments, "Return address, bytes and state of each segment.")
      .def("check", &Arena::check, "Return the invariant that the segments violate; None if there is none.");
  module.def(
      "get_arena", &Arena::get, py::return_value_policy::reference, "Return the arena of this process.");
}

}  // namespace elbowroom
