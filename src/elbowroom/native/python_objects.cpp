#include "python_objects.h"

namespace elbowroom {

namespace py = pybind11;

namespace {

PyObject* residence_class = nullptr;  // never freed

}  // namespace

void set_residence_class(const py::object& residence) { residence_class = py::object(residence).release().ptr(); }

py::object find_residence(const StorageRecordPtr& record) {
  if (record->residence) {
    py::object there = find_referent(record->residence->ptr(getPyInterpreter()));
    if (!there.is_none()) return there;
  }
  py::object made = py::handle(residence_class)(record);
  record->residence = share(py::weakref(made));
  return made;
}

}  // namespace elbowroom
