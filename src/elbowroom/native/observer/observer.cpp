#include "observer.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pthread.h>

#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace elbowroom {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Kernels at these keys call other ops, or the same one again, which are then looked at in their turn.
constexpr DispatchKeySet TRANSFORM_KEYS(
    {DispatchKey::Functionalize, DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode,
     DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchBatchedDecomposition, DispatchKey::Batched});
constexpr DispatchKeySet BACKENDS(DispatchKeySet::RAW, c10::full_backend_mask);

// Observers by the handle of their callback. PyTorch hands a thread's callbacks on to the threads that run its backward
// passes, so the handle says there whose step an op belongs to. Never destroyed.
struct Started {
  std::mutex mutex;
  std::unordered_map<at::CallbackHandle, std::shared_ptr<Observer>> observers;
  std::atomic<int> forks{0};  // a child observes nothing that its parent has started

  static Started& get() {
    static Started* const started = [] {
      pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, [] {
        get().mutex.unlock();
        get().forks.fetch_add(1);
      });
      return new Started;
    }();
    return *started;
  }
};

enum class Kind : uint8_t {
  RECORDED,  // an op of the step
  OPENED,    // not one itself, but what it calls may be
  HIDDEN,    // neither
};

// An op that has begun and not ended.
struct Frame {
  bool hides_all() const { return hidden > 0 || kind == Kind::HIDDEN || (kind == Kind::RECORDED && !may_call); }

  const at::RecordFunction* event;
  at::CallbackHandle handle;  // of the observer
  uint32_t number;
  Kind kind;
  bool may_call;      // recorded, and its autograd kernel may call others that a mode would see
  int exceptions;     // in flight when it began
  int hidden = 0;     // events inside it that have begun and are nobody's business
};

struct Thread {
  struct Slot {
    at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
    std::shared_ptr<Observer> observer;
    std::vector<Frame> frames;
  };
  Slot slots[Observer::MOST];
  const uint64_t id = at::RecordFunction::currentThreadId();
  int pauses = 0;
};

thread_local Thread* present_thread = nullptr;

Thread* make_thread() {
  static thread_local bool is_over = false;
  struct Owner {
    Thread thread;
    ~Owner() {
      is_over = true;
      present_thread = nullptr;
    }
  };
  if (is_over) return nullptr;
  static thread_local Owner owner;
  return present_thread = &owner.thread;
}

// Null once the thread's locals have been destroyed: ops may still run.
Thread* find_thread() { return present_thread != nullptr ? present_thread : make_thread(); }

Observer* find_observer(Thread::Slot& slot, at::RecordFunctionCallback::StartCallback start) {
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_) {
    if (entry.callback_.start() == start) handle = entry.handle_;
  }
  if (slot.handle != handle) {
    Started& started = Started::get();
    const std::lock_guard lock(started.mutex);
    const auto found = started.observers.find(handle);
    slot.handle = handle;
    slot.observer = found == started.observers.end() ? nullptr : found->second;
    if (slot.observer == nullptr) at::removeCallback(handle);  // it was abandoned
  }
  return slot.observer != nullptr && slot.observer->observes(handle) ? slot.observer.get() : nullptr;
}

DispatchKeySet find_keys(c10::ArrayRef<at::IValue> inputs, const c10::impl::LocalDispatchKeySet& local) {
  DispatchKeySet keys;
  for (const at::IValue& value : inputs) {
    if (value.isTensor()) {
      keys = keys | value.toTensor().key_set();
    } else if (value.isList()) {
      for (const at::IValue& item : value.toListRef()) {
        if (!item.isTensor()) {
          if (item.isNone()) continue;
          break;
        }
        keys = keys | item.toTensor().key_set();
      }
    }
  }
  return (keys | local.included_) - local.excluded_;
}

bool is_traced_by_compiler(const c10::impl::LocalDispatchKeySet& local) {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  if (!local.included_.has(DispatchKey::Python)) return false;
  return TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE).has_value() ||
      TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value();
}

bool is_autocast(const OpInfo& info, DispatchKeySet keys) {
  const DispatchKey key = (keys & c10::autocast_dispatch_keyset).highestPriorityTypeId();
  return info.handle.hasKernelForDispatchKey(key) && !info.handle.isKernelFallthroughKernel(key);
}

// What an op is to a mode. `above`: the op that has called it, if any.
std::pair<Kind, bool> judge(const OpInfo& info, c10::ArrayRef<at::IValue> inputs, const Frame* above) {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  const bool is_below_autograd = local.excluded_.has(DispatchKey::AutogradFunctionality);
  if (above != nullptr && above->kind == Kind::RECORDED && (!above->may_call || is_below_autograd)) {
    return {Kind::HIDDEN, false};
  }
  if (info.is_only_autograds || local.excluded_.has(DispatchKey::Python) || is_traced_by_compiler(local)) return {Kind::HIDDEN, false};
  const DispatchKeySet keys = find_keys(inputs, local);
  if (keys.has_any(TRANSFORM_KEYS)) return {Kind::OPENED, false};
  if (keys.has_any(c10::autocast_dispatch_keyset) && is_autocast(info, keys)) return {Kind::OPENED, false};
  const DispatchKeySet autograd = keys & c10::autograd_dispatch_keyset;
  if (autograd.empty()) return {Kind::RECORDED, false};
  const DispatchKey key = (keys & (c10::autograd_dispatch_keyset | BACKENDS)).highestPriorityTypeId();
  switch (info.find_autograd_kernel(key)) {
    case AutogradKernel::COMPOSITE: return {Kind::OPENED, false};
    case AutogradKernel::OWN: return {Kind::RECORDED, true};
    case AutogradKernel::NONE: return {Kind::RECORDED, false};
  }
  return {Kind::RECORDED, false};
}

// The number of the recorded op from whose autograd kernel another one is called; null if there is none.
uint32_t* find_recorded(Thread::Slot& slot) {
  for (auto frame = slot.frames.rbegin(); frame != slot.frames.rend() && frame->handle == slot.handle; ++frame) {
    if (frame->kind == Kind::RECORDED) return &frame->number;
  }
  return nullptr;
}

template <int SLOT>
std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& event) {
  Thread* thread = find_thread();
  if (thread == nullptr) return nullptr;
  Thread::Slot& slot = thread->slots[SLOT];
  if (!slot.frames.empty() && slot.frames.back().hides_all()) {
    ++slot.frames.back().hidden;
    return nullptr;
  }
  Observer* observer = find_observer(slot, &begin<SLOT>);
  if (observer == nullptr) return nullptr;
  Frame* above = slot.frames.empty() || slot.frames.back().handle != slot.handle ? nullptr : &slot.frames.back();
  Frame frame{&event, slot.handle, NONE, Kind::HIDDEN, false, 0};
  if (thread->pauses == 0) {
    const OpInfo* info = find_op_info(event);
    if (info == nullptr || event.inputs().size() < info->argument_count) return nullptr;
    // What is called boxed by TorchScript has its arguments on top of others.
    const auto inputs = event.inputs().slice(event.inputs().size() - info->argument_count);
    std::tie(frame.kind, frame.may_call) = judge(*info, inputs, above);
    if (frame.kind == Kind::RECORDED) {
      frame.exceptions = std::uncaught_exceptions();
      frame.number = observer->begin_op(*info, inputs, thread->id, find_recorded(slot));
    }
  }
  if (frame.kind == Kind::HIDDEN && !slot.frames.empty()) {
    ++slot.frames.back().hidden;
  } else {
    slot.frames.push_back(frame);
  }
  return nullptr;
}

template <int SLOT>
void end(const at::RecordFunction& event, at::ObserverContext*) {
  Thread* thread = find_thread();
  if (thread == nullptr) return;
  std::vector<Frame>& frames = thread->slots[SLOT].frames;
  if (frames.empty()) return;
  if (frames.back().event != &event) {
    // One that it hides. (Or one that began in another thread, as only those do that programs name themselves.)
    if (frames.back().hidden > 0) --frames.back().hidden;
    return;
  }
  const Frame frame = frames.back();
  frames.pop_back();
  Observer* observer = thread->slots[SLOT].observer.get();
  if (frame.kind == Kind::RECORDED && observer != nullptr && observer->observes(frame.handle)) {
    observer->end_op(frame.number, event.outputs(), std::uncaught_exceptions() > frame.exceptions);
  }
}

struct Callbacks {
  at::RecordFunctionCallback::StartCallback begin;
  at::RecordFunctionCallback::EndCallback end;
};

constexpr Callbacks CALLBACKS[Observer::MOST] = {
    {&begin<0>, &end<0>}, {&begin<1>, &end<1>}, {&begin<2>, &end<2>}, {&begin<3>, &end<3>}};

const Callbacks& find_free_callbacks() {
  for (const Callbacks& callbacks : CALLBACKS) {
    bool is_free = true;
    for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_) {
      is_free = is_free && entry.callback_.start() != callbacks.begin;
    }
    if (is_free) return callbacks;
  }
  throw std::runtime_error("this thread has " + std::to_string(Observer::MOST) + " started observers, which is the most");
}

}  // namespace

void Observer::start() {
  if (is_started()) throw std::runtime_error("this observer is started already");
  const Callbacks& callbacks = find_free_callbacks();
  auto log = std::make_shared<StepLog>();
  log->reserve_as(*log_);
  log->tracks_deaths = tracks_deaths_;
  log->reads_clock = reads_clock_;
  log_ = std::move(log);
  Started& started = Started::get();
  forks_ = started.forks;
  thread_ = at::RecordFunction::currentThreadId();
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(callbacks.begin, callbacks.end)
                                           .needsInputs(true)
                                           .needsOutputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
  is_active_.store(true, std::memory_order_release);
  const std::lock_guard lock(started.mutex);
  started.observers.emplace(handle_, shared_from_this());
}

void Observer::stop() {
  if (!is_started()) throw std::runtime_error("this observer is not started");
  if (thread_ != at::RecordFunction::currentThreadId()) {
    throw std::runtime_error("an observer is stopped by the thread that started it");
  }
  at::removeCallback(handle_);
  abandon();
  const std::lock_guard lock(log_->mutex);
  if (tracks_deaths_) log_->sweep();
}

void Observer::abandon() {
  is_active_.store(false, std::memory_order_release);
  Started& started = Started::get();
  const std::lock_guard lock(started.mutex);
  started.observers.erase(handle_);
}

bool Observer::observes(at::CallbackHandle handle) const {
  return handle == handle_ && is_started() && forks_ == Started::get().forks.load(std::memory_order_relaxed);
}

std::exception_ptr Observer::take_error() {
  const std::lock_guard lock(error_mutex_);
  return std::exchange(error_, nullptr);
}

void Observer::pause() {
  if (Thread* thread = find_thread()) ++thread->pauses;
}

void Observer::resume() {
  if (Thread* thread = find_thread()) --thread->pauses;
}

std::vector<uint32_t> Observer::list_watched(uint32_t number) {
  std::vector<uint32_t> watched;
  log_->visit_written(log_->ops[number], [&](uint32_t storage) {
    if (log_->storages[storage].is_watched) watched.push_back(storage);
  });
  return watched;
}

void Observer::tell(uint32_t op, const std::vector<uint32_t>& storages, bool is_before) {
  pause();
  try {
    on_write_(op, storages, is_before);
  } catch (...) {
    const std::lock_guard lock(error_mutex_);
    if (error_ == nullptr) error_ = std::current_exception();
  }
  resume();
}

uint32_t Observer::begin_op(const OpInfo& info, c10::ArrayRef<at::IValue> inputs, uint64_t thread, uint32_t* above) {
  std::vector<uint32_t> watched;
  uint32_t number;
  {
    const std::lock_guard lock(log_->mutex);
    number = log_->begin_op(info, inputs, thread);
    // An op in place may save a copy of what it is about to overwrite; any other has run by the time it calls some.
    if (above != nullptr && log_->ops[*above].info->written != 0) {
      log_->swap_ops(*above, number);
      std::swap(*above, number);
    }
    if (on_write_) watched = list_watched(number);
  }
  if (!watched.empty()) tell(number, watched, true);
  return number;
}

void Observer::end_op(uint32_t number, c10::ArrayRef<at::IValue> outputs, bool has_raised) {
  std::vector<uint32_t> watched;
  {
    const std::lock_guard lock(log_->mutex);
    const size_t returned = log_->ops[number].info->return_count;
    // What is called boxed by TorchScript leaves its results on top of others.
    log_->end_op(number, outputs.size() > returned ? outputs.slice(outputs.size() - returned) : outputs, has_raised);
    if (on_write_) watched = list_watched(number);
  }
  if (!watched.empty()) tell(number, watched, false);
}

}  // namespace elbowroom
