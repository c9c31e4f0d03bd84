#include "saved_tensors.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "default_hooks.h"
#include "device_bytes.h"
#include "python_objects.h"
#include "saved_view.h"
#include "watched_ops.h"

namespace elbowroom {

namespace {

template <typename Slot>
PyObject* find_object(const Slot& slot) {
  if constexpr (requires { slot.load_pyobj(); }) {
    return slot.load_pyobj();
  } else {
    return slot._unchecked_untagged_pyobj();  // before PyTorch 2.13
  }
}

// Returns whether the tensor's Python object is of a user-defined subclass, which must be preserved. Parameters of any
// class are leaves, which are kept themselves.
bool is_subclass(const at::Tensor& tensor) {
  PyObject* object = find_object(*tensor.unsafeGetTensorImpl()->pyobj_slot());
  return object != nullptr && !THPVariable_CheckExact(object) &&
      PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(ParameterClass)) == 0;
}

// Returns an alias of a tensor that is not plain, without its graph, which would form a reference cycle.
at::Tensor make_alias(const at::Tensor& tensor) {
  const c10::impl::ExcludeDispatchKeyGuard unwatched{c10::DispatchKeySet(WATCHED_KEY)};
  if (!is_subclass(tensor)) return tensor.detach();
  const PythonCall python;
  return THPVariable_Unpack(python.make([&] { return wrap(tensor).attr("detach")(); }).ptr());
}

}  // namespace

// Saved-tensor hooks of one tensor in autograd's graph.
class SavedTensors::Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Hooks(std::shared_ptr<SavedTensors> step) : step_(std::move(step)) {}
  ~Hooks() override {
    if (save_) step_->give_up(save_);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    std::optional<Opened> opened;
    if (is_subclass(tensor)) opened = step_->callbacks_.open(tensor);
    if (!opened) {
      save_ = step_->save(tensor);
      return;
    }
    close_ = std::move(opened->close);
    counter_ = tensor.unsafeGetTensorImpl()->version_counter();
    version_ = tensor._version();
    save_ = step_->save(opened->inner);
  }
  at::Tensor call_unpack_hook() override {
    const at::Tensor found = step_->need(save_);
    if (!close_) return found;
    check_version(found, counter_.current_version(), version_);
    return close_(found);
  }

 private:
  const std::shared_ptr<SavedTensors> step_;
  SavePtr save_;
  std::function<at::Tensor(const at::Tensor&)> close_;  // makes the wrapping tensor, if only the inner one is saved
  c10::VariableVersion counter_;                        // of the wrapping tensor
  int64_t version_ = 0;
};

SavedTensors::SavedTensors(
    std::shared_ptr<OpWatch> watch, c10::Device device, Callbacks callbacks, std::vector<TimetablePtr> known,
    int64_t least_bytes)
    : watch_(std::move(watch)),
      device_(device),
      callbacks_(std::move(callbacks)),
      mutex_(watch_->table().mutex),
      planned_(std::make_unique<PlannedStorages>(watch_)),
      follower_(known, least_bytes, watch_) {
  for (const TimetablePtr& each : known) next_id_ = std::max(next_id_, each->storages);
  serve_default_hooks();
}

std::unique_ptr<torch::autograd::SavedVariableHooks> SavedTensors::make_hooks(std::shared_ptr<SavedTensors> step) {
  return std::make_unique<Hooks>(std::move(step));
}

SavePtr SavedTensors::save(const at::Tensor& tensor) {
  const bool is_here = is_plain(tensor, device_) && !is_subclass(tensor);
  if (is_here && watch_->side_streams.is_on_new_one()) watch_->side_streams.note();
  auto made = std::make_shared<Save>();
  made->version = tensor._version();
  StorageRecordPtr record;
  std::optional<int64_t> tick;
  bool is_due = false, is_away = false;
  {
    std::unique_lock<std::mutex> guard(mutex_);
    if (is_here) record = watch_->table().see_counted(tensor.storage(), guard);
    made->index = saves_++;
    sizes_.push_back(record ? static_cast<int64_t>(tensor.storage().nbytes()) : 0);
    if (is_logging_) tick = log_save(made->index, record);
    is_due = tick && (*tick >= due_tick_ || (is_deferring_ && has_log_ && log_.back().live_bytes >= high_bytes_));
    if (tick && record) keep(made, tensor, record);
    is_away = made->home && made->home->place == PlannedStorage::Place::AWAY;
  }
  if (is_away) {  // the program alone still holds it
    at::Tensor empty = made->view->make_empty();
    const std::lock_guard<std::mutex> guard(mutex_);
    empty = made->view->release(std::move(empty));
  }
  if (!tick) {
    Answer answer = callbacks_.save(made->index, tensor, record);
    made->handle = std::move(answer.handle);
    if (!answer.stays) return made;
    const std::lock_guard<std::mutex> guard(mutex_);
    if (record) keep(made, tensor, record);
  }
  if (!record) made->tensor = make_alias(tensor);
  if (is_due) {
    try {
      callbacks_.move(*tick);
    } catch (...) {
      give_up(made);
      throw;
    }
  }
  return made;
}

void SavedTensors::keep(const SavePtr& save, const at::Tensor& tensor, const StorageRecordPtr& record) {
  // The program's dispatch modes are not called: plain PyTorch makes no such tensor, and the table is locked.
  const bool is_plain = !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
  const c10::impl::ExcludeDispatchKeyGuard modes(is_plain ? c10::DispatchKeySet(c10::DispatchKey::Python) : c10::DispatchKeySet());
  const bool may_move = !save->handle && record->id >= 0 && !record->is_staying;
  if (may_move && is_logging_ && planned_->contains(record->id)) {
    save->view = std::make_shared<SavedView>(tensor);
    save->home = planned_->add(save->view, record);
    save->record = record;
    loose_.push_back(save);
    return;
  }
  // A leaf that stays is kept itself, as autograd would: a program may replace its contents (`leaf.data = ...`) before
  // they are needed.
  save->tensor = !may_move && tensor.is_leaf() ? tensor : tensor.tensor_data();
  if (!may_move) return;
  save->record = record;
  save->seen = record->version;
  if (!is_logging_) return;
  loose_.push_back(save);
  record->kept.push_back(save);
  record->kept_count = static_cast<int64_t>(record->kept.size());
}

void SavedTensors::forget_kept(const Save& save) {
  if (!save.record) return;
  auto& kept = save.record->kept;
  const auto is_it = [&](const std::weak_ptr<Save>& each) {
    const SavePtr found = each.lock();
    return !found || found.get() == &save;
  };
  const auto gone = std::remove_if(kept.begin(), kept.end(), is_it);
  if (gone == kept.end()) return;
  kept.erase(gone, kept.end());
  save.record->kept_count = static_cast<int64_t>(kept.size());
  if (has_log_ && kept.empty() && save.record->is_known && !save.record->is_handled) released_.push_back(save.record);
}

at::Tensor SavedTensors::need(const SavePtr& save) {
  int64_t index = 0;
  at::Tensor kept;
  PlannedStoragePtr home;
  std::optional<PlannedStorages::Found> found;
  std::optional<int64_t> tick;
  bool is_due = false;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    index = needs_++;
    if ((home = save->home)) {
      save->view->check_version(save->version);
    } else if (save->tensor.defined()) {
      check_version(save->tensor, save->tensor._version(), save->version);
      kept = save->tensor;
    }
    if (is_logging_ && (home || kept.defined())) tick = log_need(index, *save);
    is_due = tick && (*tick >= due_tick_ || (is_deferring_ && has_log_ && log_.back().live_bytes <= low_bytes_));
    if (home && tick) found = PlannedStorages::find(*home, save->view);
  }
  if (!tick) {
    const at::Tensor given = callbacks_.need(index, save);
    return given.defined() ? given : kept;
  }
  if (home) {
    if (!found) {
      at::Tensor given = callbacks_.bring(save, home->id, *tick);
      TORCH_CHECK(given.defined(), "this graph is of a step that was interrupted as it ended: run its forward pass again");
      return given;
    }
    kept = found->make();
  }
  watch_->note_saved(kept);  // a compiled graph holds all that it is given to its end
  if (is_due) callbacks_.move(*tick);
  return kept;
}

void SavedTensors::give_up(const SavePtr& save) {
  at::Tensor tensor;  // destroyed without the mutex
  PlannedStoragePtr home;
  SavedViewPtr view;
  PythonObject handle;
  const std::lock_guard<std::mutex> guard(mutex_);
  save->is_given_up = true;
  tensor = std::move(save->tensor);
  handle = std::move(save->handle);
  home = std::move(save->home);
  view = std::move(save->view);
  forget_kept(*save);
  if (home && planned_->remove(home, view)) put_down(Event::FREED, home->id, 0, 0);
}

std::optional<int64_t> SavedTensors::log_save(int64_t index, const StorageRecordPtr& record) {
  const std::optional<int64_t> tick = follower_.expect_save(index, record);
  if (!tick || due_tick_ < 0 || (record && record->is_handled)) return std::nullopt;
  const int64_t traced = follower_.find_storage(index);
  if (touched_.count(traced) != 0 && !(record && planned_->contains(traced))) return std::nullopt;
  follower_.save(index, record);
  const bool is_traced = follower_.followed() >= 0;
  int64_t storage = NO_STORAGE;
  if (record && !(is_traced ? follower_.is_persistent(index) : record->is_staying)) {
    if (record->id < 0) record->id = next_id_++;
    storage = record->id;
  }
  put_down(Event::SAVED, storage, *tick, storage < 0 ? 0 : sizes_.back());
  return tick;
}

std::optional<int64_t> SavedTensors::log_need(int64_t index, const Save& save) {
  const std::optional<int64_t> tick = follower_.expect_need(index, save.index);
  if (!tick || due_tick_ < 0) return std::nullopt;
  follower_.need(index);
  put_down(Event::NEEDED, save.record ? save.record->id.load() : NO_STORAGE, *tick, 0);
  return tick;
}

void SavedTensors::put_down(Event event, int64_t storage, int64_t tick, int64_t nbytes) {
  if (!has_log_) return;
  const double now = read_clock_seconds();
  log_.push_back({event, storage, tick, nbytes, now, watch_->busy_seconds(now), count_live_bytes()});
}

int64_t SavedTensors::count_live_bytes() const {
  if (const Scope* scope = watch_->table().scope) return scope->live_bytes();
  return count_device_bytes(device_).live;
}

void SavedTensors::log(std::unordered_set<int64_t> touched, std::unordered_set<int64_t> planned, int64_t due_tick) {
  const std::lock_guard<std::mutex> guard(mutex_);
  is_logging_ = has_log_ = true;
  touched_ = std::move(touched);
  planned_->plan(std::move(planned));
  due_tick_ = due_tick;
}

void SavedTensors::set_due_tick(int64_t due_tick) {
  const std::lock_guard<std::mutex> guard(mutex_);
  due_tick_ = due_tick;
}

void SavedTensors::defer() {
  const std::lock_guard<std::mutex> guard(mutex_);
  is_logging_ = has_log_ = is_deferring_ = true;
  touched_.clear();
  planned_->plan({});
  due_tick_ = OpWatch::NEVER;
}

void SavedTensors::set_marks(int64_t low_bytes, int64_t high_bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  low_bytes_ = low_bytes;
  high_bytes_ = high_bytes;
}

std::vector<SavedTensors::Entry> SavedTensors::take_log() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return std::exchange(log_, {});
}

std::vector<std::pair<StorageRecordPtr, bool>> SavedTensors::take_new() {
  std::vector<std::pair<StorageRecordPtr, bool>> found;
  std::vector<SavePtr> saves;  // destroyed without the mutex
  const std::lock_guard<std::mutex> guard(mutex_);
  for (const std::weak_ptr<Save>& each : std::exchange(loose_, {})) {
    SavePtr save = each.lock();
    if (!save) continue;
    const StorageRecordPtr& record = save->record;
    const bool is_kept = record && save->tensor.defined() && !save->handle && record->id >= 0;
    const bool is_written = is_kept && record->version != save->seen;
    if (is_kept && (is_written || !record->is_known)) found.emplace_back(record, is_written);
    if (is_kept) record->is_known = true;
    saves.push_back(std::move(save));
  }
  return found;
}

std::vector<StorageRecordPtr> SavedTensors::take_released() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return std::exchange(released_, {});
}

std::vector<SavedTensors::Entry> SavedTensors::tell() {
  const std::lock_guard<std::mutex> guard(mutex_);
  is_logging_ = has_log_ = false;
  return std::exchange(log_, {});
}

void SavedTensors::end() {
  const std::lock_guard<std::mutex> guard(mutex_);
  has_log_ = false;
  log_.clear();
  loose_.clear();
  released_.clear();
}

void SavedTensors::note(Event event, int64_t storage, int64_t tick, int64_t nbytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!is_deferring_) put_down(event, storage, tick, nbytes);  // else the policy is told at once
}

void SavedTensors::settle(const MakeHandle& make_handle, bool only_planned) {
  std::vector<std::weak_ptr<Save>> loose;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    loose.swap(loose_);
    planned_->plan({});  // no more of them
  }
  for (size_t i = 0; i < loose.size(); ++i) {
    const SavePtr save = loose[i].lock();
    if (!save) continue;
    at::Tensor tensor;  // destroyed without the mutex
    PlannedStoragePtr home;
    std::optional<PlannedStorages::Handover> given;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      tensor = save->tensor;
      if (save->home) {
        home = std::move(save->home);  // from now on a need or a release of it does not find the storage here
        given = PlannedStorages::hand_over(*home, std::exchange(save->view, nullptr));
      } else if (only_planned) {
        loose_.push_back(loose[i]);
      }
    }
    if (!given && (only_planned || !tensor.defined())) continue;  // it stays, or was released
    PythonObject handle;
    try {
      handle = make_handle(save, given ? &*given : nullptr);
    } catch (...) {  // an interrupt: the next call goes on here
      const std::lock_guard<std::mutex> guard(mutex_);
      loose_.insert(loose_.end(), loose.begin() + static_cast<std::ptrdiff_t>(i), loose.end());
      if (given && !save->is_given_up) {
        PlannedStorages::take_back(*home, *given);
        save->home = home;
        save->view = given->view;
      }
      throw;
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    if (save->is_given_up) continue;  // released by another thread meanwhile
    save->handle.swap(handle);
    save->tensor.reset();
    forget_kept(*save);
  }
  std::unordered_map<int64_t, PlannedStoragePtr> gone;  // destroyed without the mutex
  const std::lock_guard<std::mutex> guard(mutex_);
  gone = planned_->clear();
}

void SavedTensors::hand_over(const StorageRecordPtr& record, const MakeHandle& make_handle) {
  std::vector<SavePtr> saves;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (const std::weak_ptr<Save>& each : record->kept) {
      if (SavePtr save = each.lock()) saves.push_back(std::move(save));
    }
  }
  for (const SavePtr& save : saves) {
    at::Tensor tensor;  // destroyed without the mutex
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      tensor = save->tensor;
    }
    if (!tensor.defined()) continue;  // released
    PythonObject handle = make_handle(save, nullptr);
    const std::lock_guard<std::mutex> guard(mutex_);
    if (save->is_given_up) continue;
    save->handle.swap(handle);
    save->tensor.reset();
    forget_kept(*save);
  }
}

at::Tensor SavedTensors::make(const Save& save) {
  std::optional<PlannedStorages::Found> found;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (save.home) found = PlannedStorages::find(*save.home, save.view);
  }
  return found ? found->make() : at::Tensor();
}

int64_t SavedTensors::follow_save(int64_t index, const StorageRecordPtr& record) {
  std::string why;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    why = follower_.check_save(index, record);
  }
  if (!why.empty()) callbacks_.change(why);
  const std::lock_guard<std::mutex> guard(mutex_);
  return follower_.save(index, record);
}

int64_t SavedTensors::follow_need(int64_t index, int64_t save) {
  std::string why;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    why = follower_.check_need(index, save);
  }
  if (!why.empty()) callbacks_.change(why);
  const std::lock_guard<std::mutex> guard(mutex_);
  return follower_.need(index);
}

void SavedTensors::leave(const std::string& why) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!follower_.leave()) return;
  }
  callbacks_.change(why);
}

void SavedTensors::stop(const std::string& why) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!follower_.stop()) return;
  }
  callbacks_.change(why);
}

int64_t SavedTensors::followed() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return follower_.followed();
}

int64_t SavedTensors::tick() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return follower_.tick();
}

bool SavedTensors::is_persistent(int64_t save) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return follower_.is_persistent(save);
}

int64_t SavedTensors::make_id() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return next_id_++;
}

int64_t SavedTensors::saves() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return saves_;
}

int64_t SavedTensors::needs() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return needs_;
}

std::vector<int64_t> SavedTensors::sizes() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return sizes_;
}

}  // namespace elbowroom
