// Lets objects in Python run the ops of a step without being PyTorch's dispatch modes.
//
// While a dispatch mode is active, PyTorch picks other formulas (`prod`, `masked_fill`, sums of gradients), whose results
// differ in their last bits. A watcher is called at a dispatch key of its own instead: below autograd, subclasses and
// all dispatch modes, with the same arguments and the same duties as a mode's `__torch_dispatch__`.
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>

namespace elbowroom {

namespace py = pybind11;

namespace {

// PyTorch up to 2.13 reserves this key and registers nothing for it.
constexpr c10::DispatchKey KEY = c10::DispatchKey::Fake;
constexpr c10::DispatchKeySet BELOW(c10::DispatchKeySet::FULL_AFTER, KEY);
constexpr c10::DispatchKeySet DOWN_TO_PYTHON =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
     c10::DispatchKeySet(c10::DispatchKey::Python) | c10::DispatchKeySet(KEY));

// Where autograd copies the state of a thread to its workers: a tuple, the innermost watcher last.
const std::string WATCHERS = "elbowroom.watchers";

// Watchers, from the innermost, that run an op in this thread: they do not see the ops that they call.
thread_local size_t busy = 0;

PyObject* find_watchers() {
  const auto& state = at::impl::ThreadLocalPythonObjects::get_state();
  if (!state.contains(WATCHERS)) return nullptr;
  return state.get(WATCHERS)->ptr(getPyInterpreter());
}

using Mode = c10::impl::PyObject_TorchDispatchMode;

// Fake tensors run ops on tensors without bytes: those are no ops of the step.
bool is_without_bytes(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t count = std::min(stack.size(), op.schema().arguments().size());
  return std::any_of(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end(), [](const c10::IValue& value) {
    if (value.isTensor()) return value.toTensor().key_set().has_backend(c10::BackendComponent::MetaBit);
    return value.isDevice() && value.toDevice().is_meta();
  });
}

// PyTorch makes a subclass of what these return, which must not be known to Python as a tensor by then.
bool is_alias(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return name == "aten::alias" || name == "aten::detach";
}

bool is_watched(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return op.hasSchema() && !is_alias(op) && !is_without_bytes(op, stack) &&
      !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);  // nor are modes called then
}

// PyTorch calls the mode on top of its stack, and takes it off the stack meanwhile.
class OnTop {
 public:
  explicit OnTop(PyObject* watcher)
      : mode_(std::make_shared<Mode>(py::reinterpret_borrow<py::object>(watcher).release().ptr(), getPyInterpreter())) {
    c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(mode_);
    ++busy;
  }
  ~OnTop() {
    --busy;
    c10::impl::TorchDispatchModeTLS::pop_stack();
  }
  OnTop(const OnTop&) = delete;
  OnTop& operator=(const OnTop&) = delete;

 private:
  std::shared_ptr<Mode> mode_;
};

void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  PyObject* watchers = find_watchers();
  const size_t count = watchers == nullptr ? 0 : static_cast<size_t>(PyTuple_GET_SIZE(watchers));
  if (busy >= count || !is_watched(op, *stack)) {
    const c10::impl::ExcludeDispatchKeyGuard hidden{c10::DispatchKeySet(KEY)};
    op.redispatchBoxed(keys & BELOW, stack);
    return;
  }
  const py::gil_scoped_acquire gil;
  // What a watcher calls runs from here on down, as for a mode.
  const c10::impl::ExcludeDispatchKeyGuard above(DOWN_TO_PYTHON);
  const OnTop guard(PyTuple_GET_ITEM(watchers, count - 1 - busy));
  (*getPyInterpreter())->dispatch(op, stack);
}

void set_watchers(const py::tuple& watchers) {
  c10::impl::tls_set_dispatch_key_included(KEY, !watchers.empty());
  if (watchers.empty()) {
    at::impl::ThreadLocalPythonObjects::erase(WATCHERS);
    return;
  }
  PyObject* owned = py::object(watchers).release().ptr();
  at::impl::ThreadLocalPythonObjects::set(WATCHERS, std::make_shared<c10::SafePyObject>(owned, getPyInterpreter()));
}

py::tuple get_watchers() {
  PyObject* watchers = find_watchers();
  return watchers == nullptr ? py::tuple() : py::reinterpret_borrow<py::tuple>(watchers);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

void bind_watched_ops(py::module_& module) {
  module.def(
      "set_watchers", &set_watchers, py::arg("watchers"),
      "From now on these run every op of this thread, and of backward passes that it begins. The last sees it first.");
  module.def("get_watchers", &get_watchers, "Those of this thread.");
}

}  // namespace elbowroom
