#include "op_watch.h"

#include <ATen/ATen.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "ledger.h"
#include "op_arguments.h"
#include "python_call.h"
#include "state_storages.h"
#include "watched_ops.h"

namespace elbowroom {

namespace {

// The name of an op without what says that it writes in place: autograd adds gradients in place where nobody else holds
// them, which may be one step and not the other.
std::string out_of_place(std::string name) {
  const size_t end = name.rfind('.');
  if (end != std::string::npos && end > 0 && name[end - 1] == '_') name.erase(end - 1, 1);
  return name;
}

bool is_out_of_memory(python_error& error) {
  error.persist();
  const pybind11::gil_scoped_acquire gil;
  const pybind11::object kind = pybind11::module_::import("torch").attr("OutOfMemoryError");
  return PyErr_GivenExceptionMatches(error.type, kind.ptr()) != 0;
}

}  // namespace

void OpWatch::call(
    const OpKind& kind, at::TensorList written, const Sizes& sizes, c10::function_ref<void()> next,
    const std::function<void()>* restore) {
  if (!limits_device()) return retry(kind, written, sizes, next, restore);
  const bool is_repeated = restore != nullptr && !kind.has_other_ways;
  DeviceBytes before;
  const std::function<void()> begin_again = [&] {
    (*restore)();
    reset_device_peaks(device_);
    before = count_device_bytes(device_);
  };
  try {
    const bool is_sliceable = kind.is_sliceable && slicer_ != nullptr && !(kind.is_by_item && sizes.has_list);
    // An op that is seen for the first time takes about as much as its arguments. If it is repeated after a refusal, it
    // need not be guessed.
    const int64_t guess = is_repeated || kind.takes_nothing ? 0 : sizes.nbytes;
    run_within_limit(kind.name, sizes, guess, is_repeated, is_sliceable, before, [&] {
      retry(kind, written, sizes, next, is_repeated ? &begin_again : nullptr, &before);
    });
  } catch (...) {
    forget_ops(written);  // it may be refused after it has run
    throw;
  }
}

// While an op runs that is not repeated, the allocator refuses nothing that it has. Lifting the limit and restoring it
// takes longer than most ops, so it stays lifted until an op is repeated whose size is not known.
class OpWatch::Unrefused {
 public:
  Unrefused(OpWatch& watch, bool is_repeated, bool is_known) : watch_(watch), is_counted_(!is_repeated) {
    if (!is_counted_) {
      if (!is_known) watch_.restore_limit();
      return;
    }
    ++watch_.unrefused_ops_;  // before the flag is read: `restore_limit` looks at both in the other order
    if (watch_.is_lifted_) return;
    try {
      watch_.lift_limit();
    } catch (...) {
      --watch_.unrefused_ops_;
      throw;
    }
  }
  Unrefused(const Unrefused&) = delete;
  Unrefused& operator=(const Unrefused&) = delete;
  ~Unrefused() {
    if (is_counted_) --watch_.unrefused_ops_;
  }

 private:
  OpWatch& watch_;
  const bool is_counted_;
};

void OpWatch::run_unrefused(c10::function_ref<void()> next) {
  if (!limits_device()) return next();
  const Unrefused unrefused(*this, false, false);
  next();
}

void OpWatch::lift_limit() {
  std::optional<pybind11::gil_scoped_release> released;  // a thread with the mutex waits for the GIL
  if (PyGILState_Check() == 1) released.emplace();
  const std::lock_guard<std::mutex> guard(lift_mutex_);
  if (!is_lifted_) callbacks_.lift_limit();
  is_lifted_ = true;
}

void OpWatch::restore_limit() {
  if (!is_lifted_) return;
  std::optional<pybind11::gil_scoped_release> released;
  if (PyGILState_Check() == 1) released.emplace();
  const std::lock_guard<std::mutex> guard(lift_mutex_);
  if (!is_lifted_.exchange(false)) return;
  if (unrefused_ops_ == 0) {
    callbacks_.restore_limit();
  } else {
    is_lifted_ = true;
  }
}

bool OpWatch::is_known_to_fit(const OpKind& kind, const c10::IValue* arguments, size_t count) const {
  if (!limits_device()) return false;
  const std::optional<Growth> growth = find_growth(kind.name, measure_boxed(arguments, count));
  if (!growth || !growth->is_whole) return false;
  return count_device_bytes(device_).live + count_away_bytes(arguments, count) + growth->nbytes <= limit_bytes;
}

void OpWatch::run_within_limit(
    const std::string& name, const Sizes& sizes, int64_t guess, bool is_repeated, bool is_sliceable, DeviceBytes& before,
    c10::function_ref<void()> next) {
  const Growth growth = find_growth(name, sizes).value_or(Growth{guess});
  before = count_device_bytes(device_);
  if (before.live + growth.nbytes > limit_bytes) {
    callbacks_.prepare_room(name, growth.nbytes, growth.is_whole, is_sliceable);
    before = count_device_bytes(device_);
  }
  if (!growth.is_whole && sizes.nbytes > 0) {  // it is measured
    reset_device_peaks(device_);
    before = count_device_bytes(device_);
  }
  const Unrefused unrefused(*this, is_repeated, growth.is_whole);
  next();
  const DeviceBytes after = count_device_bytes(device_);
  if (!growth.is_whole || count_taken(before, after) > growth.nbytes) note_growth(name, sizes, before, after);
  if (after.live > limit_bytes) callbacks_.keep_budget(name);
}

void OpWatch::retry(
    const OpKind& kind, at::TensorList written, const Sizes& sizes, c10::function_ref<void()> next,
    const std::function<void()>* restore, const DeviceBytes* before) {
  const Running running(kind.name);
  const auto makes_room = [&](const std::string& refusal) {
    if (restore == nullptr) return false;
    const int64_t requested = read_requested_bytes(refusal);
    if (before != nullptr && requested > 0) note_growth(kind.name, sizes, *before, count_device_bytes(device_), requested);
    const int64_t guess = requested > 0 ? 0 : sizes.nbytes;
    return callbacks_.make_room(kind.name, std::max(find_growth(kind.name, sizes).value_or(Growth{guess}).nbytes, requested));
  };
  for (;;) {
    try {
      return next();
    } catch (const c10::OutOfMemoryError& error) {
      if (!makes_room(error.msg())) {
        forget_ops(written);
        throw;
      }
      (*restore)();
    } catch (python_error& error) {  // of the device, too, if another watcher runs the op in Python
      if (!is_out_of_memory(error) || !makes_room(error.what())) {
        forget_ops(written);
        throw;
      }
      (*restore)();
    } catch (...) {
      forget_ops(written);  // they may be partly written
      throw;
    }
  }
}

void OpWatch::run_unrecorded(
    const OpKind& kind, at::TensorList written, const Sizes& sizes, c10::function_ref<void()> next) {
  if (kind.is_idle) return next();
  if (!written.empty()) tell(Write::BEGINS, written);
  static const std::function<void()> nothing = [] {};
  call(kind, written, sizes, next, may_retry(kind, written) ? &nothing : nullptr);
  if (!written.empty()) tell(Write::ENDS_UNRECORDED, written);
  table_->sweep_if_many();
}

void OpWatch::run_sliced(const OpKind& kind, at::TensorList written, c10::function_ref<void()> next) {
  if (!written.empty()) tell(Write::BEGINS, written);
  restore_limit();  // slices that are refused memory become smaller
  retry(kind, written, Sizes(), next, nullptr);
  if (!written.empty()) tell(Write::ENDS_UNRECORDED, written);
}

void OpWatch::run(
    const c10::OperatorHandle& op, const OpKind& kind, const Count& counted, torch::jit::Stack* stack,
    c10::function_ref<void()> next) {
  if (kind.is_idle) return next();
  const size_t count = op.schema().arguments().size(), returned = op.schema().returns().size();
  const size_t below = stack->size() - count;
  const c10::IValue* arguments = stack->data() + below;
  const Written written = kind.may_write ? list_written(kind, arguments, count) : Written();
  const bool is_recorded = may_record(counted) && kind.may_be_replayed(arguments, count);
  std::vector<c10::IValue> given;
  // Whether the op is recorded may depend on the bytes of its results.
  if (may_retry(kind, written) || (is_recorded && written.empty())) given.assign(arguments, arguments + count);
  const Sizes sizes = limits_device() ? measure_boxed(arguments, count) : Sizes();
  if (!is_recorded && given.empty()) return run_unrecorded(kind, written, sizes, next);
  if (is_recorded) count_inputs(arguments, count);  // first: if there is no room, nothing has happened yet
  if (!written.empty()) tell(Write::BEGINS, written);
  RecordedOpPtr recorded;
  if (is_recorded && !written.empty()) recorded = describe(op, kind, arguments, count, counted.tick);
  std::function<void()> restore;
  if (may_retry(kind, written)) {
    restore = [&] {
      stack->resize(below);
      stack->insert(stack->end(), given.begin(), given.end());
    };
  }
  const int64_t live_before = scope_ == nullptr ? 0 : scope_->begin_op();
  const double begin = read_clock_seconds() - get_thread().lost_seconds;
  call(kind, written, sizes, next, restore ? &restore : nullptr);
  const double seconds = read_clock_seconds() - get_thread().lost_seconds - begin;
  if (is_recorded && !recorded) {
    int64_t made_bytes = 0;
    for (size_t i = stack->size() - returned; i < stack->size(); ++i) {
      visit_tensors((*stack)[i], [&](const at::Tensor& tensor) {
        if (const c10::StorageImpl* storage = find_storage(tensor)) made_bytes += static_cast<int64_t>(storage->nbytes());
      });
    }
    if (written.empty() && (counted.tick >= 0 || kind.is_source || made_bytes >= least_bytes_)) {
      recorded = describe(op, kind, given.data(), count, counted.tick);
    }
  }
  given.clear();
  if (recorded) {
    ++recorded_ops_;
    recorded->seconds = seconds;
    recorded->place = counted.place;
    const int64_t inner_bytes = scope_ == nullptr ? find_growth(kind.name, sizes).value_or(Growth()).nbytes : scope_->op_peak_bytes() - live_before;
    recorded->inner_bytes = std::max<int64_t>(0, inner_bytes);
  }
  if (recorded || !written.empty()) put_down(std::move(recorded), *stack, returned, written, counted.tick);
  if (!written.empty()) tell(Write::ENDS, written);
  table_->sweep_if_many();
}

void OpWatch::run_region(
    const std::string& name, int64_t nbytes, const std::vector<at::Tensor>& written, c10::function_ref<void()> next) {
  if (is_closed_) return next();
  const Count counted = count(name);
  move_state(counted.position, true);
  tell(Write::BEGINS, written);
  try {
    const Running running(name);
    if (limits_device()) {
      DeviceBytes before;
      run_within_limit(name, {.nbytes = nbytes}, nbytes, false, false, before, next);
    } else {
      next();
    }
  } catch (...) {
    forget_ops(written);
    throw;
  }
  tell(Write::ENDS_IN_REGION, written);
  move_state(counted.position, false);
}

OpWatch::Count OpWatch::count(const OpKind& kind) {
  return kind.is_traced && !get_thread().is_aside ? count(kind.name) : Count();
}

OpWatch::Count OpWatch::count(const std::string& name) {
  Count counted;
  counted.place = ++ops_;  // unique among threads
  if (counted.place > due_ops) {
    callbacks_.leave(std::to_string(counted.place) + " ops without a save that should have come before");
  }
  if (mode_ == Mode::FOLLOW && !is_expected(name, counted)) counted.tick = -1;
  return counted;
}

bool OpWatch::may_move(const at::Tensor& tensor) const {
  const c10::StorageImpl* const storage = find_storage(tensor);
  if (storage == nullptr) return false;
  {
    const std::lock_guard<std::mutex> guard(table_->mutex);
    const StorageRecordPtr& record = table_->find(storage);
    if (record && record->id >= 0) return true;
  }
  return find_state(storage).defined();
}

void OpWatch::count_inputs(const c10::IValue* arguments, size_t count) {
  if (scope_ == nullptr) return;
  c10::SmallVector<c10::Storage, 2> unknown;
  {
    const std::lock_guard<std::mutex> guard(table_->mutex);
    for (size_t i = 0; i < count; ++i) {
      visit_tensors(arguments[i], [&](const at::Tensor& tensor) {
        if (!is_plain(tensor, device_) || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
        if (!table_->find(find_storage(tensor))) unknown.push_back(tensor.storage());
      });
    }
  }
  for (const c10::Storage& storage : unknown) Ledger::get().adopt(storage, *scope_, true);
}

RecordedOpPtr OpWatch::describe(
    const c10::OperatorHandle& op, const OpKind& kind, const c10::IValue* arguments, size_t count, int64_t tick) {
  const auto kept = kept_.find(tick);
  const std::lock_guard<std::mutex> guard(table_->mutex);
  return elbowroom::describe(op, kind, arguments, count, *table_, device_, kept == kept_.end() ? nullptr : &kept->second);
}

bool OpWatch::is_expected(const std::string& name, Count& count) {
  const size_t position = position_.fetch_add(1);
  if (position >= names_.size()) {
    if (position == names_.size()) mode_ = Mode::PASS;
    return false;
  }
  if (names_[position] != name && out_of_place(names_[position]) != out_of_place(name)) {
    if (position >= required_) {
      mode_ = Mode::PASS;
      callbacks_.move_state(-1, false);
      return false;
    }
    callbacks_.leave("op " + std::to_string(position) + " is " + name + ", where the trace has " + names_[position]);
    return false;
  }
  count.position = static_cast<int64_t>(position);
  count.tick = ticks_[position];
  return count.tick >= 0;
}

bool OpWatch::may_record(const Count& count) const {
  if (count.tick >= 0) return true;
  if (mode_ != Mode::RECORD || get_thread().is_aside) return false;
  return at::GradMode::is_enabled() && (scope_ == nullptr || scope_->live_bytes() > resting_bytes_);
}

void OpWatch::tell(Write moment, at::TensorList written) {
  const bool begins = moment == Write::BEGINS;
  // Ops are watched below the kernel that raises the version counter, which excludes its own key meanwhile. Compiled code
  // has announced its rises.
  const bool rises_later = (moment == Write::ENDS || moment == Write::ENDS_UNRECORDED) &&
      c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
  const auto& callback = begins ? callbacks_.before_write : callbacks_.after_write;
  for (const at::Tensor& tensor : written) {
    const c10::StorageImpl* storage = find_storage(tensor);
    if (storage == nullptr) continue;
    std::vector<RecordedOpPtr> forgotten;  // destroyed without the mutex
    bool is_guarded = false;
    {
      const std::lock_guard<std::mutex> guard(table_->mutex);
      Rises* const rises = table_->find_rises(tensor);
      if (begins && rises != nullptr) rises->watched += std::exchange(rises->announced, 0);
      if (const StorageRecordPtr& record = table_->find(storage)) {
        begins ? record->begin_write() : record->end_write();
        record->nbytes = static_cast<int64_t>(storage->nbytes());  // it may have grown
        is_guarded = record->is_guarded;
        if (moment == Write::ENDS_UNRECORDED || moment == Write::ENDS_IN_REGION) forgotten = record->forget_ops();
      }
      if (rises_later && rises != nullptr) ++rises->watched;
    }
    if (is_guarded && callback) callback(tensor);
  }
}

void OpWatch::put_down(
    RecordedOpPtr op, const torch::jit::Stack& results, size_t count, at::TensorList written, int64_t tick) {
  std::vector<RecordedOpPtr> forgotten;  // destroyed without the mutex
  const auto forget = [&](StorageRecord& record) {
    for (RecordedOpPtr& each : record.forget_ops()) forgotten.push_back(std::move(each));
  };
  std::vector<at::Tensor> made;
  bool is_whole = true;
  for (size_t i = results.size() - count; i < results.size(); ++i) {
    visit_tensors(results[i], [&](const at::Tensor& tensor) { made.push_back(tensor); });
  }
  const std::lock_guard<std::mutex> guard(table_->mutex);
  for (const at::Tensor& tensor : made) is_whole = is_whole && is_plain(tensor, device_);
  std::vector<StorageRecordPtr> changed;
  for (const at::Tensor& tensor : written) {
    const c10::StorageImpl* storage = find_storage(tensor);
    const StorageRecordPtr record = storage == nullptr ? StorageRecordPtr() : table_->find(storage);
    if (!record || std::find(changed.begin(), changed.end(), record) != changed.end()) continue;
    if (!op || !is_whole || !is_plain(tensor, device_)) {
      forget(*record);
    } else {
      changed.push_back(record);
    }
  }
  if (!op || !is_whole) return;
  int64_t new_bytes = 0;
  for (const at::Tensor& tensor : made) {
    const StorageRecordPtr record = table_->see(tensor.storage());
    record->nbytes = static_cast<int64_t>(tensor.storage().nbytes());
    const bool is_read = std::any_of(op->slots.begin(), op->slots.end(), [&](const Slot& slot) { return slot.record == record; });
    op->results.push_back({c10::weak_intrusive_ptr<StorageRecord>(record), record->nbytes});
    // An argument that is returned was not made by the op, even if its schema hides that it returns a view.
    if (is_read || record->made_by || record->version != 0 || record->is_staying) continue;
    record->made_by = op;
    record->follow_versions(tensor, *table_);
    new_bytes += record->nbytes;
  }
  op->inner_bytes = std::max<int64_t>(0, op->inner_bytes - new_bytes);
  for (const StorageRecordPtr& record : changed) {
    op->written.push_back({c10::weak_intrusive_ptr<StorageRecord>(record), record->nbytes});
    if (!record->made_by) continue;
    if (record->changed_by.empty()) table_->note_changed(record);
    record->changed_by.push_back(op);
    if (record->changed_by.size() == 64) forget(*record);  // more ops than a recording may have
  }
  if (tick >= 0) by_tick_[tick] = op;
}

void OpWatch::forget_ops(at::TensorList written) {
  std::vector<RecordedOpPtr> forgotten;  // destroyed without the mutex
  const std::lock_guard<std::mutex> guard(table_->mutex);
  for (const at::Tensor& tensor : written) {
    const c10::StorageImpl* storage = find_storage(tensor);
    const StorageRecordPtr record = storage == nullptr ? StorageRecordPtr() : table_->find(storage);
    if (!record) continue;
    record->end_write();
    for (RecordedOpPtr& each : record->forget_ops()) forgotten.push_back(std::move(each));
  }
}

namespace {

// Keeps what a sparse tensor holds in memory: ops that use it do not tell.
void keep_parts(const at::Tensor& tensor) {
  std::vector<at::Tensor> parts;
  {
    const HiddenOps hidden;
    const c10::Layout layout = tensor.layout();
    if (layout == c10::kSparse) {
      parts = {tensor._indices(), tensor._values()};
    } else if (layout == c10::kSparseCsr || layout == c10::kSparseBsr) {
      parts = {tensor.crow_indices(), tensor.col_indices(), tensor.values()};
    } else {
      parts = {tensor.ccol_indices(), tensor.row_indices(), tensor.values()};
    }
  }
  keep_in_memory(parts);
}

}  // namespace

void OpWatch::note_result(const at::Tensor& tensor, Origin origin) {
  if (tensor.is_sparse() || at::sparse_csr::is_sparse_compressed(tensor)) return keep_parts(tensor);
  if (!is_plain(tensor, device_)) return;
  if (!tensor.is_floating_point() && !tensor.is_complex()) return;  // composite ops may read lengths without an op
  const c10::Storage& storage = tensor.storage();
  if (static_cast<int64_t>(storage.nbytes()) < noted_bytes_) return;
  const std::lock_guard<std::mutex> guard(table_->mutex);
  const bool may_be_gradient = origin == Origin::FACTORY || (origin == Origin::OP && may_make_gradients());
  const auto is_last = [&](const Result& last) { return last.storage._unsafe_get_target() == storage.unsafeGetStorageImpl(); };
  if (!results_.empty() && is_last(results_.back()) && results_.back().may_be_gradient <= may_be_gradient) return;
  if (results_.size() >= sweep_results_at_) {
    std::erase_if(results_, [](const Result& each) { return each.storage.expired(); });
    sweep_results_at_ = std::max(sweep_results_at_, 2 * results_.size());
  }
  results_.push_back({storage.getWeakStorageImpl(), may_be_gradient});
}

std::vector<std::pair<c10::Storage, bool>> OpWatch::list_results() const {
  std::vector<std::pair<c10::Storage, bool>> found;
  std::unordered_map<const c10::StorageImpl*, size_t> places;
  const std::lock_guard<std::mutex> guard(table_->mutex);
  for (const Result& each : results_) {
    const auto [place, is_new] = places.emplace(each.storage._unsafe_get_target(), found.size());
    if (!is_new) {
      if (place->second < found.size()) found[place->second].second &= each.may_be_gradient;
    } else if (auto storage = each.storage.lock()) {
      found.emplace_back(std::move(storage), each.may_be_gradient);
    } else {
      places.erase(place);
    }
  }
  return found;
}

void OpWatch::record(int64_t resting_bytes, int64_t least_bytes) {
  resting_bytes_ = resting_bytes;
  least_bytes_ = least_bytes;
  mode_ = Mode::RECORD;
}

void OpWatch::follow(
    std::vector<std::string> names, std::vector<int64_t> ticks, std::unordered_map<int64_t, std::vector<Source>> kept,
    size_t required) {
  required_ = required;
  names_ = std::move(names);
  ticks_ = std::move(ticks);
  kept_ = std::move(kept);
  mode_ = Mode::FOLLOW;
}

void OpWatch::close() {
  is_closed_ = true;
  std::unordered_map<int64_t, RecordedOpPtr> gone;
  {
    const std::lock_guard<std::mutex> guard(table_->mutex);
    gone.swap(by_tick_);
  }
  gone.clear();
  table_->clear();
}

RecordingPtr OpWatch::make_recording(const std::vector<int64_t>& ticks, StorageRecordPtr target) {
  std::vector<RecordedOpPtr> found;
  const std::lock_guard<std::mutex> guard(table_->mutex);
  for (const int64_t tick : ticks) {
    const auto each = by_tick_.find(tick);
    if (each != by_tick_.end()) found.push_back(each->second);
  }
  return c10::make_intrusive<Recording>(std::move(found), std::move(target));
}

}  // namespace elbowroom
