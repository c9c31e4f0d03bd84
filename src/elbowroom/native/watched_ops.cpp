// Calls watchers for the ops of a step, without entering dispatch modes.
//
// While a dispatch mode is active, PyTorch picks other formulas (`prod`, `masked_fill`, sums of gradients), whose
// results differ in their last bits. Watchers have a dispatch key of their own instead: below autograd, subclasses and
// all dispatch modes, with the same arguments and the same contract as a mode's `__torch_dispatch__`.
#include <ATen/ATen.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <ATen/record_function.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "list_ops.h"
#include "op_arguments.h"
#include "op_watch.h"
#include "python_call.h"
#include "python_objects.h"
#include "state_storages.h"
#include "watched_ops.h"

namespace elbowroom {

namespace py = pybind11;

// The tuple of watchers; `natives` has each item that is an `OpWatch`, else null.
struct Watchers final : c10::SafePyObject {
  Watchers(const py::tuple& objects, std::vector<OpWatch*> natives)
      : c10::SafePyObject(py::object(objects).release().ptr(), getPyInterpreter()), natives(std::move(natives)) {}

  // Returns the innermost `OpWatch`; null if there is none.
  OpWatch* find_native() const {
    const auto found = std::find_if(natives.rbegin(), natives.rend(), [](const OpWatch* each) { return each != nullptr; });
    return found == natives.rend() ? nullptr : *found;
  }

  OpWatch* find_only() const { return natives.size() == 1 ? natives.front() : nullptr; }

  const std::vector<OpWatch*> natives;
  mutable std::atomic<bool> skip_callbacks{false};  // in all threads that have them
};

namespace {

constexpr c10::DispatchKey KEY = WATCHED_KEY;
constexpr c10::DispatchKeySet DOWN_TO_PYTHON =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
     c10::DispatchKeySet(c10::DispatchKey::Python) | c10::DispatchKeySet(KEY));

// Key of the thread state that autograd copies to its workers: a tuple, the innermost watcher last. It copies the state
// for each node, so the name is short enough for a string without heap memory.
const std::string WATCHERS = "elbowroom";

// Keeps the watchers that this thread has entered alive.
thread_local std::shared_ptr<Watchers> entered;

// The watchers of this thread, which its ops keep alive: code that they call may enter others.
std::shared_ptr<const Watchers> hold_watchers(const Thread& thread) {
  if (thread.watchers != nullptr) return entered;
  const auto& state = at::impl::ThreadLocalPythonObjects::get_state();
  return state.contains(WATCHERS) ? std::static_pointer_cast<const Watchers>(state.get(WATCHERS)) : nullptr;
}

const Watchers* find_watchers(const Thread& thread) {
  if (thread.watchers != nullptr) return thread.watchers;
  const auto& state = at::impl::ThreadLocalPythonObjects::get_state();
  return state.contains(WATCHERS) ? static_cast<const Watchers*>(state.get(WATCHERS).get()) : nullptr;
}

// PyTorch 2.11 cannot erase an object of the thread.
template <typename Objects>
void forget_watchers() {
  if constexpr (requires { Objects::erase(WATCHERS); }) {
    Objects::erase(WATCHERS);
  } else {
    Objects::set(WATCHERS, nullptr);
  }
}

using Mode = c10::impl::PyObject_TorchDispatchMode;

// Returns whether an op runs on meta tensors, as for fake tensors: it does not belong to the step.
bool is_without_bytes(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  // Included while kernels of fake tensors run.
  if (c10::impl::tls_local_dispatch_key_set().included_.has_backend(c10::BackendComponent::MetaBit)) return true;
  const size_t count = std::min(stack.size(), op.schema().arguments().size());
  return std::any_of(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end(), [](const c10::IValue& value) {
    bool is_meta = value.isDevice() && value.toDevice().is_meta();
    visit_tensors(value, [&](const at::Tensor& tensor) {
      is_meta = is_meta || tensor.key_set().has_backend(c10::BackendComponent::MetaBit);
    });
    return is_meta;
  });
}

// Returns whether an op is given several tensors in one list.
bool has_list(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t count = op.schema().arguments().size();
  return std::any_of(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end(), is_list_of_tensors);
}

// PyTorch turns the results of these into subclass instances, so they must not have Python objects yet.
bool is_alias(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return name == "aten::alias" || name == "aten::detach";
}

bool is_seen_in_python(const c10::OperatorHandle& op) {
  return !is_alias(op) && !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);  // as for a mode
}

// Pushes a watcher onto PyTorch's mode stack: PyTorch calls the mode on top, and pops it meanwhile.
class OnTop {
 public:
  explicit OnTop(PyObject* watcher)
      : mode_(std::make_shared<Mode>(py::reinterpret_borrow<py::object>(watcher).release().ptr(), getPyInterpreter())) {
    c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(mode_);
  }
  ~OnTop() { c10::impl::TorchDispatchModeTLS::pop_stack(); }
  OnTop(const OnTop&) = delete;
  OnTop& operator=(const OnTop&) = delete;

 private:
  const Busy busy_;
  const std::shared_ptr<Mode> mode_;
};

// Runs an op by the dispatch mode on top, or by the tensor subclass among its arguments, as PyTorch's kernel for the key
// `Python` does. Ops that it calls start below that key, and come to the watchers.
void run_by_modes(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const py::gil_scoped_acquire gil;
  const at::impl::MaybeSetTLSOnEntryGuard entry;  // PyTorch 2.11 requires it of ops under a mode that is entered there
  const c10::impl::ExcludeDispatchKeyGuard above(DOWN_TO_PYTHON);
  const CalledBack called_back;
  try {
    (*getPyInterpreter())->dispatch(op, stack);
  } catch (python_error& error) {
    error.persist();  // makes its message, which is all that TorchScript passes on
    throw;
  }
}

// Runs an op by a watcher in Python.
void run_in_python(PyObject* watcher, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const py::gil_scoped_acquire gil;
  const OnTop guard(watcher);
  run_by_modes(op, stack);
}

// Notes the current stream if an op there uses what may move.
void note_side_stream(OpWatch& watch, const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const size_t count = std::min(stack.size(), op.schema().arguments().size());
  bool may_move = false;
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    visit_tensors(stack[i], [&](const at::Tensor& tensor) { may_move = may_move || watch.may_move(tensor); });
  }
  if (may_move) watch.side_streams.note();
}

// Runs an op by the first `count` watchers, the last of them first, and then by the kernel. `has_begun`: set where it may
// have written, which the kernel does by itself.
void run_by(
    const Watchers* watchers, size_t count, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
    torch::jit::Stack* stack, bool& has_begun, c10::function_ref<void()> kernel) {
  if (count == 0) {
    kernel();
  } else if (OpWatch* native = watchers->natives[count - 1]) {
    const Busy guard;
    const auto next = [&] { run_by(watchers, count - 1, op, keys, stack, has_begun, kernel); };
    const OpKind* kind = native->find_open_kind(op);
    if (kind == nullptr) return next();
    if (native->side_streams.is_on_new_one()) note_side_stream(*native, op, *stack);
    const OpWatch::Count counted = native->count(*kind);
    native->move_state(counted.position, true);
    native->run(op, *kind, counted, stack, next);
    get_thread().moves = native;
    get_thread().position = counted.position;
  } else if (is_seen_in_python(op) && !get_thread().is_aside) {
    PyObject* const objects = watchers->ptr(getPyInterpreter());
    has_begun = true;
    run_in_python(PyTuple_GET_ITEM(objects, static_cast<Py_ssize_t>(count - 1)), op, stack);
  } else {
    run_by(watchers, count - 1, op, keys, stack, has_begun, kernel);
  }
}

// Of this thread: the callback that hides the key, and how many contexts ask for it. They need not end in the order in
// which they began, as the steps of two rooms do not.
struct Hiding {
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
  int64_t contexts = 0;

  // PyTorch may have restored the thread's callbacks of another time meanwhile.
  bool is_registered() const {
    const auto& callbacks = at::get_record_function_tls_().sorted_tls_callbacks_;
    return std::any_of(callbacks.begin(), callbacks.end(), [&](const auto& each) { return each.handle_ == handle; });
  }
};
thread_local Hiding hiding;

// Returns whether the callback for ops of unwatched threads is the only one that PyTorch calls for this thread's ops.
bool is_only_callback_ours() {
  if (!is_watching_all_threads() || !at::isRecordFunctionEnabled()) return false;
  for (uint8_t i = 0; i < static_cast<uint8_t>(at::RecordScope::NUM_SCOPES); ++i) {
    const auto scope = static_cast<at::RecordScope>(i);
    const auto called = at::getStepCallbacksUnlessEmpty(scope);
    if (called && called->callbacks_.size() > (scope == at::RecordScope::FUNCTION ? 1 : 0)) return false;
  }
  return true;
}

// Sets whether PyTorch skips callbacks for this thread's ops, where ours would be the only one. See `CalledBack`.
void skip_callbacks(Thread& thread, bool skips) {
  if (thread.has_skipped) at::enableRecordFunction(true);
  thread.skips_callbacks = skips && is_only_callback_ours();
  if (thread.watchers != nullptr) thread.watchers->skip_callbacks = thread.skips_callbacks;
  if (!thread.skips_callbacks) return;
  thread.has_skipped = true;
  if (thread.called_back == 0) at::enableRecordFunction(false);  // else when the op ends that needs them
}

// Hides the key while Dynamo looks up compiled code for this thread's state.
struct Lookup final : at::ObserverContext {
  Lookup() { c10::impl::tls_set_dispatch_key_included(KEY, false); }
  ~Lookup() override { c10::impl::tls_set_dispatch_key_included(KEY, true); }
};

}  // namespace

std::unique_ptr<at::ObserverContext> hide_from_lookup(const at::RecordFunction& function) {
  if (std::strcmp(function.name(), "TorchDynamo Cache Lookup") != 0) return nullptr;
  return c10::impl::tls_is_dispatch_key_included(KEY) ? std::make_unique<Lookup>() : nullptr;
}

namespace {

void run_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard hidden{c10::DispatchKeySet(KEY)};
  std::optional<CalledBack> called_back;  // the program's own ops may use state that they are not given
  if (!op.operator_name().name.starts_with("aten::")) called_back.emplace();
  op.redispatchBoxed(keys & BELOW_WATCH, stack);
}

void run_by_watchers(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack, bool& has_begun,
    c10::function_ref<void()> kernel) {
  const Thread& thread = get_thread();
  const std::shared_ptr<const Watchers> watchers = hold_watchers(thread);
  const size_t count = watchers == nullptr ? 0 : watchers->natives.size();
  const bool is_watched = thread.busy < count && op.hasSchema() && !is_without_bytes(op, *stack);
  run_by(watchers.get(), is_watched ? count - thread.busy : 0, op, keys, stack, has_begun, kernel);
}

// Runs an op as a whole. `has_begun`: set where it may have written.
void run_whole(
    const c10::OperatorHandle& op, const OpKind* kind, c10::DispatchKeySet keys, torch::jit::Stack* stack, bool& has_begun) {
  Thread& thread = get_thread();
  const auto kernel = [&] {
    has_begun = true;
    run_kernel(op, keys, stack);
  };
  const size_t count = op.hasSchema() ? op.schema().arguments().size() : 0;
  const c10::IValue* const arguments = stack->data() + (stack->size() - count);
  if (kind == nullptr || !kind->uses_memory) {
    run_by_watchers(op, keys, stack, has_begun, kernel);
  } else if (const std::vector<size_t> ends = find_parts(*kind, arguments, count, StateTable::get_most_bytes()); !ends.empty()) {
    const auto run_part = [&](torch::jit::Stack& part) {
      has_begun = true;
      const StateUse use(*kind, part.data(), count);
      run_kernel(op, keys, &part);
    };
    run_by_watchers(op, keys, stack, has_begun, [&] { run_parts(*stack, count, ends, run_part); });
  } else {
    std::optional<Running> restoring(std::in_place, kind->name, thread);  // for the message, if there is no room
    const StateUse use(*kind, arguments, count);
    restoring.reset();
    run_by_watchers(op, keys, stack, has_begun, kernel);
  }
  // What the op has used is free to leave by now.
  if (OpWatch* const watch = std::exchange(thread.moves, nullptr)) watch->move_state(thread.position, false);
}

thread_local bool is_running = false;

}  // namespace

void announce_rises(at::TensorList tensors) {
  const Watchers* watchers = find_watchers(get_thread());
  if (watchers == nullptr) return;
  for (OpWatch* const watch : watchers->natives) {
    if (watch == nullptr) continue;
    const std::lock_guard<std::mutex> guard(watch->table().mutex);
    for (const at::Tensor& tensor : tensors) {
      if (Rises* const rises = watch->table().find_rises(tensor)) ++rises->announced;
    }
  }
}

void run_waiting(c10::function_ref<void()> run) {
  const Watchers* watchers = find_watchers(get_thread());
  OpWatch* const watch = watchers == nullptr ? nullptr : watchers->find_native();
  if (watch != nullptr) watch->restore_limit();  // slices that are refused memory become smaller
  const Busy busy;
  const at::impl::MaybeSetTLSOnEntryGuard entry;  // as in `run_by_modes`
  const c10::impl::ExcludeDispatchKeyGuard above(DOWN_TO_PYTHON);
  const c10::impl::IncludeDispatchKeyGuard key{c10::DispatchKeySet(KEY)};  // brings back what they use, or raises an error
  const CalledBack called_back;
  const bool before = std::exchange(is_running, true);
  try {
    run();
  } catch (...) {
    is_running = before;
    throw;
  }
  is_running = before;
}

bool is_running_waiting() { return is_running; }

namespace {

// The watch that has ops of this thread run in slices; null if there is none.
OpWatch* find_slicing_watch(const Thread& thread) {
  const Watchers* watchers = thread.busy > 0 ? nullptr : find_watchers(thread);
  OpWatch* const watch = watchers == nullptr ? nullptr : watchers->find_native();
  return watch != nullptr && watch->has_slicer() && !watch->is_closed() ? watch : nullptr;
}

// Asks Python whether an op is to run in slices. `refusal`: the error with which it failed as a whole; null before it ran.
// Numbers that PyTorch has wrapped in tensors are left out, as Python is given them as numbers.
bool wants_slices(const OpWatch& watch, const OpKind& kind, const c10::IValue* arguments, size_t count, PyObject* refusal) {
  const PythonCall python;
  py::list tensors;
  for (size_t i = 0; i < count; ++i) {
    visit_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) tensors.append(wrap(tensor));
    });
  }
  const py::object slicer = watch.find_slicer();
  if (slicer.is_none()) return false;
  const py::object error = refusal == nullptr ? py::none() : py::reinterpret_borrow<py::object>(refusal);
  return python.make([&]() -> py::object { return slicer.attr("wants")(kind.name, tensors, error); }).cast<bool>();
}

// Runs the ops that wait, if there are any, before one that uses memory.
void run_ops_that_wait(OpWatch& watch) {
  if (!watch.has_waiting) return;
  const PythonCall python;
  const py::object slicer = watch.find_slicer();
  if (!slicer.is_none()) python.make([&]() -> py::object { return slicer.attr("run_waiting")(); });
  watch.has_waiting = false;
}

void run_in_slices(OpWatch& watch, const c10::OperatorHandle& op, const OpKind& kind, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const c10::IValue* const arguments = stack->data() + (stack->size() - count);
  const OpWatch::Count counted = watch.count(kind);
  watch.move_state(counted.position, true);
  { const StateUse use(kind, arguments, count, StateUse::Kind::SLICED); }  // each slice's op pins what it uses
  {
    const Written written = kind.may_write ? list_written(kind, arguments, count) : Written();
    const Busy busy;
    watch.run_sliced(kind, written, [&] {
      const py::gil_scoped_acquire gil;
      const py::object slicer = watch.find_slicer();
      TORCH_CHECK(!slicer.is_none(), "the room was closed before ", kind.name, " could run in slices");
      run_in_python(slicer.ptr(), op, stack);
    });
  }
  {
    const PythonCall python;
    const py::object slicer = watch.find_slicer();
    watch.has_waiting =
        !slicer.is_none() && python.make([&]() -> py::object { return slicer.attr("has_waiting"); }).cast<bool>();
  }
  watch.move_state(counted.position, false);
}

}  // namespace

bool run_refused(
    OpWatch& watch, const c10::OperatorHandle& op, const OpKind& kind, torch::jit::Stack* stack, python_error& refusal) {
  const size_t count = op.schema().arguments().size();
  const c10::IValue* const arguments = stack->data() + (stack->size() - count);
  refusal.persist();  // it may still be the thread's error
  if (!wants_slices(watch, kind, arguments, count, refusal.value)) return false;
  watch.sliced_bytes = std::min(watch.sliced_bytes.load(), count_boxed_bytes(arguments, count));
  run_in_slices(watch, op, kind, stack);
  return true;
}

namespace {

// Running statistics as they are before an op that updates them, if it writes to nothing else.
class Statistics {
 public:
  Statistics(const OpKind& kind, const std::vector<c10::IValue>& arguments) : is_all_(kind.written.empty()) {
    if (!is_all_) return;
    const HiddenOps hidden;
    for (const at::Tensor& each : list_written(kind, arguments.data(), arguments.size())) {
      pairs_.emplace_back(each, each.clone());
    }
  }
  // Returns false if the op may have written to something else.
  bool restore() const {
    const HiddenOps hidden;
    for (const auto& [tensor, former] : pairs_) tensor.copy_(former);
    return is_all_;
  }

 private:
  const bool is_all_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

// Runs an op as a whole, or in slices if it is known or found to have no room as a whole.
void run_sliceable(
    OpWatch& watch, const c10::OperatorHandle& op, const OpKind& kind, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size(), below = stack->size() - count;
  const c10::IValue* const arguments = stack->data() + below;
  if (count_boxed_bytes(arguments, count) >= watch.sliced_bytes && wants_slices(watch, kind, arguments, count, nullptr)) {
    return run_in_slices(watch, op, kind, stack);
  }
  run_ops_that_wait(watch);
  const std::vector<c10::IValue> given(arguments, arguments + count);
  std::optional<Statistics> statistics;
  if (kind.may_write && !watch.is_known_to_fit(kind, arguments, count)) {  // else it is refused nothing once it runs
    watch.run_unrefused([&] { statistics.emplace(kind, given); });
  }
  bool has_begun = false;
  try {
    run_whole(op, &kind, keys, stack, has_begun);
  } catch (python_error& refusal) {
    if (kind.may_write && has_begun && !(statistics && statistics->restore())) throw;  // its argument may be partly written
    stack->resize(below);
    stack->insert(stack->end(), given.begin(), given.end());
    if (!run_refused(watch, op, kind, stack, refusal)) throw;
  }
}

}  // namespace

namespace {

void note_results(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const Thread& thread = get_thread();
  const Watchers* watchers = thread.busy > 0 || !op.hasSchema() ? nullptr : find_watchers(thread);
  OpWatch* const watch = watchers == nullptr ? nullptr : watchers->find_native();
  if (watch == nullptr || !watch->notes_results()) return;
  const OpKind* const kind = find_kind(op);
  if (kind == nullptr || !kind->uses_memory) return;  // a view of what may be older than the step
  const auto origin = kind->is_source ? OpWatch::Origin::FACTORY : OpWatch::Origin::OP;
  for (size_t i = stack.size() - op.schema().returns().size(); i < stack.size(); ++i) {
    visit_tensors(stack[i], [&](const at::Tensor& each) { watch->note_result(each, origin); });
  }
}

void run_once(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Thread& thread = get_thread();
  thread.moves = nullptr;
  if (thread.has_left) leave_again(thread);
  if (StateTable::is_any_managed()) heed_profilers(thread);
  if (is_for_python(keys) && !op.hasKernelForDispatchKey(c10::DispatchKey::Python)) return run_by_modes(op, stack);
  OpWatch* const slicing = find_slicing_watch(thread);
  const OpKind* kind = nullptr;
  const bool is_known = slicing != nullptr || StateTable::is_any_managed();
  if (is_known && op.hasSchema() && !is_without_bytes(op, *stack)) kind = find_kind(op);
  if (slicing != nullptr && kind != nullptr && kind->is_sliceable && !(kind->is_by_item && has_list(op, *stack))) {
    return run_sliceable(*slicing, op, *kind, keys, stack);
  }
  if (slicing != nullptr && kind != nullptr && kind->uses_memory) run_ops_that_wait(*slicing);
  bool has_begun = false;
  run_whole(op, StateTable::is_any_managed() ? kind : nullptr, keys, stack, has_begun);
}

}  // namespace

void run_watched(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  run_once(op, keys, stack);
  if (StateTable::is_any_managed()) note_results(op, *stack);
}

bool is_key_active() {
  return c10::impl::tls_is_dispatch_key_included(KEY) && !c10::impl::tls_is_dispatch_key_excluded(KEY);
}

void lose_seconds(double seconds) {
  Thread& thread = get_thread();
  thread.lost_seconds += seconds;
  const Watchers* watchers = find_watchers(thread);
  if (OpWatch* const watch = watchers == nullptr ? nullptr : watchers->find_native()) watch->lose(seconds);
}

bool are_callbacks_skipped(const Thread& thread) {
  if (at::isRecordFunctionEnabled()) return false;
  if (thread.watchers != nullptr) return thread.skips_callbacks;
  const Watchers* inherited = find_watchers(thread);
  return inherited != nullptr && inherited->skip_callbacks;
}

void heed_profilers(Thread& thread) {
  constexpr unsigned OPS = 32;  // after so many, callbacks of all threads are noticed as well
  if (at::isRecordFunctionEnabled()) return;
  if (thread.watchers != nullptr && !thread.has_skipped) return;  // the program has switched them off
  const Watchers* watchers = find_watchers(thread);
  if (watchers == nullptr) return;
  bool heeds = !watchers->skip_callbacks || at::hasThreadLocalCallbacks();
  if (!heeds && ++thread.ops_without_callbacks % OPS == 0) {
    at::enableRecordFunction(true);
    heeds = !is_only_callback_ours();
    if (!heeds) at::enableRecordFunction(false);
  }
  if (!heeds) return;
  watchers->skip_callbacks = false;
  thread.skips_callbacks = false;
  at::enableRecordFunction(true);
}

bool has_watchers(const Thread& thread) { return find_watchers(thread) != nullptr; }

OpWatch* find_handed_watch() {
  const Watchers* watchers = find_watchers(get_thread());
  return watchers == nullptr ? nullptr : watchers->find_only();
}

void hide_from_guards() {
  ++hiding.contexts;
  if (hiding.is_registered()) return;
  skip_callbacks(get_thread(), false);
  hiding.handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(&hide_from_lookup).scopes({at::RecordScope::FUNCTION}));
}

void stop_hiding() {
  if (hiding.contexts == 0 || --hiding.contexts > 0) return;
  if (hiding.is_registered()) at::removeCallback(hiding.handle);
}

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_watched>());
}

void update_key() {
  Thread& thread = get_thread();
  const bool is_watched = has_watchers(thread);
  c10::impl::tls_set_dispatch_key_included(KEY, is_watched || StateTable::is_any_managed());
  skip_callbacks(thread, thread.watchers != nullptr);
}

bool is_in_backward_pass() { return torch::autograd::get_current_graph_task_id() != -1; }

bool may_make_gradients() {
  return is_in_backward_pass() && (!c10::GradMode::is_enabled() || torch::autograd::get_current_graph_task_keep_graph());
}

void leave_again(Thread& thread) {
  if (is_in_backward_pass()) return;
  thread.has_left = false;
  forget_watchers<at::impl::ThreadLocalPythonObjects>();
  c10::impl::tls_set_dispatch_key_included(KEY, StateTable::is_any_managed());
  at::enableRecordFunction(true);
}

void set_watchers(const py::tuple& watchers) {
  Thread& thread = get_thread();
  if (thread.has_left) leave_again(thread);
  c10::impl::tls_set_dispatch_key_included(KEY, !watchers.empty() || StateTable::is_any_managed());
  if (watchers.empty()) {
    skip_callbacks(thread, false);
    thread.has_left = thread.watchers != nullptr && is_in_backward_pass();
    thread.has_skipped = false;
    forget_watchers<at::impl::ThreadLocalPythonObjects>();
    thread.watchers = nullptr;
    thread.only = nullptr;
    entered.reset();
    return;
  }
  thread.has_left = false;
  std::vector<OpWatch*> natives;
  for (const py::handle each : watchers) {
    natives.push_back(py::isinstance<OpWatch>(each) ? each.cast<OpWatch*>() : nullptr);
  }
  const auto made = std::make_shared<Watchers>(watchers, std::move(natives));
  at::impl::ThreadLocalPythonObjects::set(WATCHERS, made);
  thread.watchers = made.get();
  thread.only = made->find_only();
  skip_callbacks(thread, true);
  entered = made;  // destroys the previous watchers last
}

py::tuple get_watchers() {
  const Watchers* watchers = find_watchers(get_thread());
  return watchers == nullptr ? py::tuple() : py::reinterpret_borrow<py::tuple>(watchers->ptr(getPyInterpreter()));
}

OpWatch* find_watch() {
  const Watchers* watchers = is_key_active() ? find_watchers(get_thread()) : nullptr;
  return watchers == nullptr ? nullptr : watchers->find_native();
}

py::tuple get_active_watchers() {
  const py::tuple watchers = is_key_active() ? get_watchers() : py::tuple();
  const size_t busy = get_thread().busy;
  return busy < watchers.size() ? watchers[py::slice(0, static_cast<ssize_t>(watchers.size() - busy), 1)] : py::tuple();
}

}  // namespace elbowroom
