// The flat ways of the runtime, in C++: each does what a method in Python does, for what comes most often, on the same
// objects, and leaves the rest to that method. Elbowroom works without it.
#include "ops.h"
#include "saves.h"

namespace quick {
namespace {

// Looks up where the attributes lie that are read here. Given: every class and constant, by name.
// Looks up where the attributes lie that are read here. Given: every class and constant, by name.
PyObject* learn(PyObject*, PyObject* given) {
  return guarded([&] {
    const auto get = [&](const char* name) {
      PyObject* found = PyDict_GetItemString(given, name);
      if (found == nullptr) {
        PyErr_Format(PyExc_KeyError, "%s", name);
        throw Failed();
      }
      return Py_NewRef(found);  // for good
    };
    const auto get_class = [&](const char* name) { return as<PyTypeObject>(get(name)); };
    const auto find_slots = [&](const char* name, std::initializer_list<std::pair<const char*, Slot*>> slots) {
      for (const auto& [attribute, slot] : slots) slot->find(get(name), attribute);
    };
    find_slots("Place", {{"item", &place_item}, {"key", &place_key}, {"nbytes", &place_nbytes}});
    find_slots("Residence", {
        {"id", &residence_id}, {"nbytes", &residence_nbytes}, {"version", &residence_version},
        {"is_outside", &residence_outside}, {"is_staying", &residence_staying}, {"views", &residence_views},
        {"readers", &residence_readers}, {"made_by", &residence_made_by}});
    find_slots("Estimate", {
        {"nbytes", &estimate_nbytes}, {"result_bytes", &estimate_result_bytes}, {"pace", &estimate_pace}});
    find_slots("Pace", {{"begun", &pace_begun}, {"seconds", &pace_seconds}});
    find_slots("Keepsake", {{"index", &keepsake_index}, {"tensor", &keepsake_tensor}, {"version", &keepsake_version}});
    find_slots("Guest", {{"residence", &guest_residence}, {"seen", &guest_seen}, {"handle", &guest_handle}});
    find_slots("Trace", {{"saves", &trace_saves}, {"needs", &trace_needs}, {"storages", &trace_storages}});
    find_slots("Save", {{"tick", &save_tick}, {"storage", &save_storage}});
    find_slots("Need", {{"tick", &need_tick}, {"save", &need_save}});
    find_slots("Storage", {{"nbytes", &storage_nbytes}, {"role", &storage_role}});
    place_class = get_class("Place");
    staying_class = get_class("StayingPlace");
    residence_class = get_class("Residence");
    keepsake_class = get_class("Keepsake");
    guest_class = get_class("Guest");
    slot_class = get_class("Slot");
    run_class = get_class("Run");
    reads_class = get_class("Reads");
    no_views = get("NO_VIEWS");
    no_readers = get("NOBODY");
    no_names = get("NO_NAMES");
    find_kind = get("find_kind");
    read_settings = get("read_settings");
    pack_else = get("pack");
    unpack_else = get("unpack");
    PyObject *passing = get("events"), *lasting = get("LASTING"), *none = Py_NewRef(PyTuple_New(0));
    for (int each = 0; each < 3; each++) events[each] = PyTuple_GetItem(passing, each);
    lasting_roles.clear();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(lasting); i++) lasting_roles.push_back(PyTuple_GET_ITEM(lasting, i));
    residence_begins.clear();
    const std::pair<const char*, PyObject*> begins[] = {
        {"views", no_views}, {"readers", no_readers}, {"changed_by", none}, {"storage", Py_None}, {"ghost", Py_None},
        {"copy", Py_None}, {"recording", Py_None}, {"may_move", Py_None}, {"made_by", Py_None}};
    for (const auto& [name, value] : begins) {
      Slot slot;
      slot.find(reinterpret_cast<PyObject*>(residence_class), name);
      residence_begins.emplace_back(slot, value);
    }
    return Py_NewRef(Py_None);
  });
}

// A class that those in Python are derived from, or whole in itself.
PyTypeObject* make_type(
    PyObject* module, const char* name, int size, unsigned long more, std::vector<PyType_Slot> slots) {
  slots.push_back({0, nullptr});
  const auto flags = static_cast<unsigned>(Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | more);
  PyType_Spec spec = {name, size, 0, flags, slots.data()};
  Ref made = need(PyType_FromModuleAndSpec(module, &spec, nullptr));
  if (PyModule_AddType(module, as<PyTypeObject>(made.get())) < 0) throw Failed();
  return as<PyTypeObject>(made.release());
}

template <typename Made>
PyTypeObject* make_base(
    PyObject* module, const char* name, PyMemberDef* members, std::vector<PyType_Slot> slots = {}) {
  slots.insert(
      slots.end(),
      {{Py_tp_dealloc, reinterpret_cast<void*>(free<Made>)},
       {Py_tp_traverse, reinterpret_cast<void*>(traverse<Made>)},
       {Py_tp_clear, reinterpret_cast<void*>(clear<Made>)},
       {Py_tp_members, members}});
  return make_type(module, name, sizeof(Made), Py_TPFLAGS_BASETYPE, std::move(slots));
}

PyMethodDef functions[] = {{"learn", learn, METH_O, nullptr}, {nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_quick", nullptr, -1, functions};

}  // namespace
}  // namespace quick

PyMODINIT_FUNC PyInit__quick() {
  using namespace quick;
  Ref module(PyModule_Create(&definition));
  if (!module) return nullptr;
  return guarded([&] {
    PyObject* in = module.get();
    book_class = make_base<Book>(in, "elbowroom._quick.Book", book_members, {{Py_tp_methods, book_methods}});
    watch_class = make_base<Watch>(in, "elbowroom._quick.Watch", watch_members, {{Py_tp_methods, watch_methods}});
    hooks_class = make_base<Hooks>(in, "elbowroom._quick.Hooks", hooks_members, {{Py_tp_methods, hooks_methods}});
    lull_class = make_base<Lull>(in, "elbowroom._quick.Lull", lull_members);
    track_class = make_base<Track>(in, "elbowroom._quick.Track", track_members);
    log_class = make_base<Log>(
        in, "elbowroom._quick.Log", log_members, {{Py_tp_methods, log_methods}, {Py_tp_getset, log_properties}});
    sighting_class = make_type(in, "elbowroom._quick.Sighting", sizeof(Sighting), 0, {
        {Py_tp_new, reinterpret_cast<void*>(sighting_new)}, {Py_tp_dealloc, reinterpret_cast<void*>(sighting_free)},
        {Py_tp_traverse, reinterpret_cast<void*>(sighting_traverse)},
        {Py_tp_clear, reinterpret_cast<void*>(sighting_clear)}, {Py_tp_members, sighting_members},
        {Py_tp_getset, sighting_properties}, {Py_tp_methods, sighting_methods}});
    order_class = make_type(in, "elbowroom._quick.Order", sizeof(Order), 0, {
        {Py_tp_dealloc, reinterpret_cast<void*>(free<Order>)},
        {Py_tp_traverse, reinterpret_cast<void*>(traverse<Order>)},
        {Py_tp_clear, reinterpret_cast<void*>(clear<Order>)}, {Py_tp_methods, order_methods}});
    return module.release();
  });
}
