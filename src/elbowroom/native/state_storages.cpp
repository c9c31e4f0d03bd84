#include "state_storages.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/alignment.h>
#include <c10/core/Allocator.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/COW.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "op_arguments.h"
#include "watched_ops.h"

namespace elbowroom {

namespace {

constexpr const char* AWAY =
    "Elbowroom has moved these bytes of the model's state out of memory to stay within the budget, and this access "
    "bypasses PyTorch's operators, or bringing them back has failed. Call room.detach() first, which brings all of it "
    "back, or access it by a PyTorch op.";

using Records = ska::flat_hash_map<const c10::StorageImpl*, StateStoragePtr>;

// Of all tables. Never destroyed: storages may die after static objects. Nothing that may run Python happens with the mutex.
std::mutex& state_mutex();

Records& state_records() {
  static auto* made = new Records;
  return *made;
}

// What ops of one table use that wait.
struct WaitingOps {
  std::weak_ptr<StateTable> table;
  std::vector<const c10::StorageImpl*> read, written;
};

// What ops use, of all threads. With the mutex.
struct Ops {
  std::vector<StateUse::Pins*> running;
  int64_t begun = 0;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> lasting;  // used by code that runs beside the program
  std::vector<WaitingOps> waiting;  // at most one of each table
};

Ops& state_ops() {
  static auto* made = new Ops;
  return *made;
}

std::mutex& state_mutex() {
  static auto* made = [] {
    auto* mutex = new std::mutex;
    static std::mutex* self = mutex;
    // The child has none of the other threads. What their ops use stays pinned there.
    pthread_atfork([] { self->lock(); }, [] { self->unlock(); }, [] { self->unlock(); });
    return mutex;
  }();
  return *made;
}

thread_local int64_t begun_here = 0;  // uses that this thread has begun

// With the mutex.
void note_begun(StateUse::Pins& pins) {
  pins.thread = std::this_thread::get_id();
  state_ops().running.push_back(&pins);
  ++state_ops().begun;
  ++begun_here;
}

// Whether an op goes on to use what it was given after it has returned. (The names of its kinds have a dot for "::".)
bool is_asynchronous(const OpKind& op) { return op.name.starts_with("c10d.") || op.name.starts_with("_c10d_functional."); }

// Flags that PyTorch sets and does not take back in all versions. They are private; an explicit instantiation may name them.
bool& get_refusal(c10::StorageImpl& storage);
bool& get_mutable_refusal(c10::StorageImpl& storage);
template <bool c10::StorageImpl::*Refusal, bool c10::StorageImpl::*MutableRefusal>
struct Refusals {
  friend bool& get_refusal(c10::StorageImpl& storage) { return storage.*Refusal; }
  friend bool& get_mutable_refusal(c10::StorageImpl& storage) { return storage.*MutableRefusal; }
};
template struct Refusals<&c10::StorageImpl::throw_on_immutable_data_ptr_, &c10::StorageImpl::throw_on_mutable_data_ptr_>;

// Has accesses to the memory raise an error, with our message.
void refuse_access(c10::StorageImpl& storage) { storage.release_data_and_set_meta_custom_data_ptr_error_msg_(AWAY); }

// Has only accesses that may write raise an error, with PyTorch's message. The address is null.
void show_address(c10::StorageImpl& storage) {
  get_refusal(storage) = false;
  get_mutable_refusal(storage) = true;
}

// To be called before other memory is set, which makes it effective.
void allow_access(c10::StorageImpl& storage) {
  get_refusal(storage) = get_mutable_refusal(storage) = false;
  storage.get_extra_meta().custom_data_ptr_error_msg_ = std::nullopt;
}

std::array<std::atomic<bool>, 2> shown{};  // by `Shown`; changes with the mutex

// Has accesses to the memory of a storage that is away raise an error. With the mutex.
void guard_away(c10::StorageImpl& storage) {
  refuse_access(storage);
  if (shown[0] || shown[1]) show_address(storage);
}

// Whether a storage shares its memory until someone writes to it.
template <typename Impl>
bool is_lazy_clone(Impl& storage) {
  if constexpr (requires { storage.has_materializer(); }) {
    return storage.has_materializer();
  } else {
    return c10::impl::cow::is_cow_data_ptr(storage._mutable_data_ptr_no_checks());
  }
}

// With the mutex.
bool is_idle(const StateStorage& storage) { return storage.pins == 0 && !storage.is_staying; }

// Number of events between `now` and the next use, as far as the last step tells. Without a former step, what was used
// longest ago is used last. With the mutex.
int64_t count_until_use(const StateStorage& storage, int64_t now, int64_t step_events) {
  constexpr int64_t MOST = int64_t{1} << 40;
  const auto& former = storage.former_uses;
  const auto next = std::lower_bound(former.begin(), former.end(), now);
  if (next != former.end()) return *next - now;
  // In the next step. Its first use may be known from this one, if there was none in the last.
  if (!former.empty()) return std::max<int64_t>(0, step_events - now) + former.front();
  if (!storage.uses.empty() && step_events > 0) return std::max<int64_t>(0, step_events - now) + storage.uses.front();
  return MOST - storage.last_use;
}

// With the mutex.
void keep(const at::Tensor& tensor) {
  if (find_storage(tensor) == nullptr) return;
  auto& lasting = state_ops().lasting;
  std::erase_if(lasting, [](const auto& each) { return each.expired(); });
  lasting.push_back(tensor.storage().getWeakStorageImpl());
}

}  // namespace

StateStorage::StateStorage(const c10::Storage& storage, std::weak_ptr<StateTable> owner)
    : key(storage.unsafeGetStorageImpl()),
      storage(storage.getWeakStorageImpl()),
      nbytes(static_cast<int64_t>(storage.nbytes())),
      owner(std::move(owner)),
      misalignment(reinterpret_cast<uintptr_t>(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get()) % c10::gAlignment) {}

bool StateStorage::begin_copy() {
  const std::lock_guard<std::mutex> guard(state_mutex());
  if (!elbowroom::is_idle(*this)) return false;
  is_written = false;
  return true;
}

bool StateStorage::empty() {
  c10::DataPtr freed;  // destroyed without the mutex
  const auto held = storage.lock();
  if (!held || is_lazy_clone(*held)) return false;
  const std::lock_guard<std::mutex> guard(state_mutex());
  if (!elbowroom::is_idle(*this) || is_written || is_away || static_cast<int64_t>(held->nbytes()) != nbytes) return false;
  c10::DataPtr& memory = held->_mutable_data_ptr_no_checks();
  if (memory.get() == nullptr) return false;
  guard_away(*held);
  const c10::Device device = memory.device();
  freed = std::move(memory);
  held->set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  is_away = true;
  return true;
}

bool StateStorage::belongs_to(const StateTable& table) const {
  const std::weak_ptr<const StateTable> other = table.weak_from_this();
  return !owner.owner_before(other) && !other.owner_before(owner);
}

bool StateStorage::is_idle() const {
  const std::lock_guard<std::mutex> guard(state_mutex());
  return elbowroom::is_idle(*this);
}

void StateStorage::refill(const c10::Storage& contents) {
  c10::StorageImpl* const source = contents.unsafeGetStorageImpl();
  c10::DataPtr former;
  const auto held = storage.lock();
  if (!held) return;
  const std::lock_guard<std::mutex> guard(state_mutex());
  if (!is_away) return;
  c10::DataPtr& memory = source->_mutable_data_ptr_no_checks();
  const c10::Device device = memory.device();
  allow_access(*held);
  former = std::move(held->_mutable_data_ptr_no_checks());
  held->set_data_ptr_noswap(std::move(memory));
  source->set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  source->set_nbytes(size_t{0});
  is_away = false;
}

StateTable::StateTable(Restore restore, RunWaiting run_waiting)
    : restore_(std::move(restore)), run_waiting_(std::move(run_waiting)) {
  state_mutex();
  watch_all_threads();  // registers the callback
}

StateTable::~StateTable() {
  watch_uses(false);
  clear();
}

void StateTable::watch_uses(bool watches) {
  if (watches_uses_.exchange(watches) != watches) managed += watches ? 1 : -1;
}

void StateTable::note_waiting(std::vector<const c10::StorageImpl*> read, std::vector<const c10::StorageImpl*> written) {
  const std::lock_guard<std::mutex> guard(state_mutex());
  if (written.empty()) lost_waiting_.clear();
  auto& waiting = state_ops().waiting;
  std::erase_if(waiting, [&](const WaitingOps& each) {
    const auto table = each.table.lock();
    return table == nullptr || table.get() == this;
  });
  if (!written.empty()) waiting.push_back({weak_from_this(), std::move(read), std::move(written)});
}

std::string StateTable::lost_waiting() const {
  const std::lock_guard<std::mutex> guard(state_mutex());
  return lost_waiting_;
}

void StateTable::lose_waiting(at::TensorList written, const std::string& why) {
  const std::lock_guard<std::mutex> guard(state_mutex());
  for (const WaitingOps& each : state_ops().waiting) {
    const auto table = each.table.lock();
    const auto is_read = [&](const at::Tensor& tensor) {
      return std::find(each.read.begin(), each.read.end(), find_storage(tensor)) != each.read.end();
    };
    if (table != nullptr && std::any_of(written.begin(), written.end(), is_read)) table->lost_waiting_ = why;
  }
}

StateStoragePtr StateTable::add(const c10::Storage& storage, bool is_movable) {
  const std::lock_guard<std::mutex> guard(state_mutex());
  StateStoragePtr& record = state_records()[storage.unsafeGetStorageImpl()];
  if (record && !record->belongs_to(*this)) return {};
  if (record) {
    if (!record->is_away) record->nbytes = static_cast<int64_t>(storage.nbytes());
    if (is_movable && record->order < 0) record->order = orders_++;
    return record;
  }
  record = c10::make_intrusive<StateStorage>(storage, weak_from_this());
  if (is_movable) record->order = orders_++;
  const auto is_it = [&](const auto& each) { return each._unsafe_get_target() == record->key; };
  const Ops& ops = state_ops();
  record->is_staying = std::any_of(ops.lasting.begin(), ops.lasting.end(), is_it);
  for (StateUse::Pins* each : ops.running) {
    if (std::find(each->used.begin(), each->used.end(), record->key) == each->used.end()) continue;
    each->storages.push_back(record);
    ++record->pins;
  }
  ++managed;
  return record;
}

std::pair<at::Tensor, StateStoragePtr> StateTable::make_away(
    at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType type, c10::Device device, int64_t nbytes) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(nbytes), c10::DataPtr(nullptr, device),
      c10::GetAllocator(device.type()), true));
  {
    const std::lock_guard<std::mutex> guard(state_mutex());
    guard_away(*storage.unsafeGetStorageImpl());
  }
  const c10::DispatchKeySet keys(c10::computeDispatchKey(type, c10::kStrided, device));
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  StateStoragePtr record = add(storage, true);
  record->is_written = false;
  record->is_away = true;
  return {std::move(tensor), std::move(record)};
}

StateStoragePtr find_state(const c10::StorageImpl* storage) {
  const std::lock_guard<std::mutex> guard(state_mutex());
  const auto found = state_records().find(storage);
  return found != state_records().end() ? found->second : StateStoragePtr();
}

StateStoragePtr StateTable::find(const c10::StorageImpl* storage) const {
  StateStoragePtr found = find_state(storage);
  return found && found->belongs_to(*this) ? found : StateStoragePtr();
}

bool StateTable::is_unknown(const c10::StorageImpl* storage) const {
  const std::lock_guard<std::mutex> guard(state_mutex());
  const auto found = state_records().find(storage);
  return found == state_records().end() || (found->second->order < 0 && found->second->belongs_to(*this));
}

void StateTable::forbid(StateStorage& storage) {
  const std::lock_guard<std::mutex> guard(state_mutex());
  storage.order = -1;
}

std::vector<StateStoragePtr> StateTable::choose(int64_t missing_bytes, int64_t least_distance) const {
  struct Choice {
    int64_t distance, order;
    const StateStoragePtr* record;
  };
  std::vector<Choice> found;
  std::vector<StateStoragePtr> chosen;
  const std::lock_guard<std::mutex> guard(state_mutex());
  const int64_t now = events_, step_events = former_events_ > 0 ? former_events_ : now;
  for (const auto& [key, record] : state_records()) {
    if (record->order < 0 || record->is_away || !elbowroom::is_idle(*record) || record->storage.expired()) continue;
    if (!record->belongs_to(*this)) continue;
    const int64_t distance = count_until_use(*record, now, step_events);
    if (distance >= least_distance) found.push_back({distance, record->order, &record});
  }
  std::sort(found.begin(), found.end(), [](const Choice& one, const Choice& other) {
    return std::make_pair(-one.distance, one.order) < std::make_pair(-other.distance, other.order);
  });
  int64_t freed_bytes = 0;
  for (const Choice& each : found) {
    if (freed_bytes >= missing_bytes) break;
    freed_bytes += (*each.record)->nbytes;
    chosen.push_back(*each.record);
  }
  return chosen;
}

int64_t StateTable::count_away() const {
  int64_t nbytes = 0;
  const std::lock_guard<std::mutex> guard(state_mutex());
  for (const auto& [key, record] : state_records()) {
    if (record->is_away && !record->storage.expired() && record->belongs_to(*this)) nbytes += record->nbytes;
  }
  return nbytes;
}

std::vector<StateStoragePtr> StateTable::list() const {
  std::vector<StateStoragePtr> found;
  const std::lock_guard<std::mutex> guard(state_mutex());
  for (const auto& [key, record] : state_records()) {
    if (record->belongs_to(*this)) found.push_back(record);
  }
  return found;
}

std::vector<StateStoragePtr> StateTable::sweep() {
  std::vector<StateStoragePtr> gone;
  const std::lock_guard<std::mutex> guard(state_mutex());
  for (auto each = state_records().begin(); each != state_records().end();) {
    if (each->second->storage.expired() && each->second->pins == 0 && each->second->belongs_to(*this)) {
      gone.push_back(each->second);
      each = state_records().erase(each);
      --managed;
    } else {
      ++each;
    }
  }
  return gone;
}

void StateTable::clear() {
  std::vector<StateStoragePtr> gone;  // destroyed without the mutex
  const std::lock_guard<std::mutex> guard(state_mutex());
  for (auto each = state_records().begin(); each != state_records().end();) {
    if (each->second->belongs_to(*this)) {
      gone.push_back(each->second);
      each = state_records().erase(each);
      --managed;
    } else {
      ++each;
    }
  }
}

void StateTable::begin_step() {
  const std::lock_guard<std::mutex> guard(state_mutex());
  former_events_ = events_.exchange(0);
  for (auto& [key, record] : state_records()) {
    if (!record->belongs_to(*this)) continue;
    record->former_uses.swap(record->uses);
    record->uses.clear();
  }
}

void StateTable::show_addresses(bool shows, Shown reason) {
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;  // destroyed without the mutex
  const std::lock_guard<std::mutex> guard(state_mutex());
  if (shown[static_cast<size_t>(reason)].exchange(shows) == shows) return;
  for (const auto& [key, record] : state_records()) {
    if (!record->is_away) continue;
    if (auto held = record->storage.lock()) guard_away(*storages.emplace_back(std::move(held)));
  }
}

StateUse::Pins::~Pins() {
  if (used.empty() && storages.empty()) return;
  const std::lock_guard<std::mutex> guard(state_mutex());
  std::erase(state_ops().running, this);
  for (const StateStoragePtr& each : storages) --each->pins;
}

StateUse::StateUse(const OpKind& op, const c10::IValue* arguments, size_t count, Kind kind) {
  if (!StateTable::is_any_managed()) return;
  const bool is_writing = op.may_write && kind != Kind::REPLAY;
  const Written written = is_writing ? list_written(op, arguments, count) : Written();
  for (size_t i = 0; i < count; ++i) {
    visit_tensors(arguments[i], [&](const at::Tensor& tensor) { add(tensor); });
    if (arguments[i].isStorage()) pins_.used.push_back(arguments[i].toStorage().unsafeGetStorageImpl());
  }
  start(written, kind);
  if (is_asynchronous(op)) {
    const std::lock_guard<std::mutex> guard(state_mutex());
    for (const StateStoragePtr& each : pins_.storages) each->is_staying = true;
    for (size_t i = 0; i < count; ++i) visit_tensors(arguments[i], keep);
  }
  restore(kind);
}

StateUse::StateUse(at::TensorList read, at::TensorList written, Kind kind) {
  if (!StateTable::is_any_managed()) return;
  for (const at::Tensor& tensor : read) add(tensor);
  for (const at::Tensor& tensor : written) add(tensor);
  begin(written, kind);
}

StateUse::StateUse(const StateStoragePtr& storage, bool is_written) {
  {
    const std::lock_guard<std::mutex> guard(state_mutex());
    if (is_written) storage->is_written = true;
    note_begun(pins_);
    pin(storage);
    find_waiting(storage->key, is_written ? c10::ArrayRef(storage->key) : c10::ArrayRef<const c10::StorageImpl*>());
  }
  restore(Kind::OTHER);
}

void keep_in_memory(at::TensorList tensors) {
  const StateUse use(tensors, {}, StateUse::Kind::OTHER);
  const std::lock_guard<std::mutex> guard(state_mutex());
  for (const at::Tensor& each : tensors) {
    keep(each);
    const auto found = state_records().find(find_storage(each));
    if (found != state_records().end()) found->second->is_staying = true;
  }
}

int64_t count_away_bytes(const c10::IValue* arguments, size_t count) {
  if (!StateTable::is_any_managed()) return 0;
  c10::SmallVector<const c10::StorageImpl*, 8> used;
  for (size_t i = 0; i < count; ++i) {
    visit_tensors(arguments[i], [&](const at::Tensor& tensor) { used.push_back(find_storage(tensor)); });
  }
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  int64_t nbytes = 0;
  const std::lock_guard<std::mutex> guard(state_mutex());
  for (const c10::StorageImpl* each : used) {
    const auto found = state_records().find(each);
    if (found != state_records().end() && found->second->is_away) nbytes += found->second->nbytes;
  }
  return nbytes;
}

UsesElsewhere count_uses_elsewhere() {
  const std::lock_guard<std::mutex> guard(state_mutex());
  const Ops& ops = state_ops();
  const auto is_elsewhere = [](const StateUse::Pins* pins) { return pins->thread != std::this_thread::get_id(); };
  return {ops.begun - begun_here, std::count_if(ops.running.begin(), ops.running.end(), is_elsewhere)};
}

void StateUse::add(const at::Tensor& tensor) {
  const c10::StorageImpl* const storage = find_storage(tensor);
  auto& used = pins_.used;
  if (storage != nullptr && std::find(used.begin(), used.end(), storage) == used.end()) used.push_back(storage);
}

void StateUse::begin(at::TensorList written, Kind kind) {
  start(written, kind);
  restore(kind);
}

// Pins what the op uses, from now on also what a record is made of later.
void StateUse::start(at::TensorList written, Kind kind) {
  if (pins_.used.empty()) return;
  const std::lock_guard<std::mutex> guard(state_mutex());
  note_begun(pins_);
  const Records& records = state_records();
  for (const c10::StorageImpl* each : pins_.used) {
    const auto found = records.find(each);
    if (found != records.end()) pin(found->second);
  }
  c10::SmallVector<const c10::StorageImpl*, 2> written_storages;
  for (const at::Tensor& tensor : written) {
    const auto found = records.find(written_storages.emplace_back(find_storage(tensor)));
    if (found == records.end() || (kind == Kind::SLICED && found->second->is_away)) continue;
    found->second->is_written = true;
  }
  if (kind != Kind::SLICED) find_waiting(pins_.used, written_storages);
}

void StateUse::find_waiting(
    c10::ArrayRef<const c10::StorageImpl*> used, c10::ArrayRef<const c10::StorageImpl*> written) {
  if (state_ops().waiting.empty() || is_running_waiting()) return;
  const auto any = [](c10::ArrayRef<const c10::StorageImpl*> some, const std::vector<const c10::StorageImpl*>& others) {
    return std::find_first_of(some.begin(), some.end(), others.begin(), others.end()) != some.end();
  };
  for (const WaitingOps& each : state_ops().waiting) {
    if (!any(used, each.written) && !any(written, each.read)) continue;
    if (auto table = each.table.lock()) waiting_.push_back(std::move(table));
  }
}

// With the mutex.
void StateUse::pin(const StateStoragePtr& storage) {
  pins_.storages.push_back(storage);
  ++storage->pins;
}

void StateUse::restore(Kind kind) {
  for (const auto& table : waiting_) table->run_waiting_();
  c10::SmallVector<StateStoragePtr, 4> away;
  {
    const std::lock_guard<std::mutex> guard(state_mutex());
    if (pins_.storages.empty()) return;
    const auto table = pins_.storages.front()->owner.lock();
    if (table == nullptr) return;
    const bool is_event = kind == Kind::STEP || kind == Kind::SLICED;
    const int64_t event = is_event ? table->events_.fetch_add(1) : -1;
    const int64_t now = is_event ? table->clock_.fetch_add(1) : 0;
    for (const StateStoragePtr& each : pins_.storages) {
      if (each->is_away && kind != Kind::SLICED) away.push_back(each);
      if (!is_event) continue;
      each->last_use = now;
      each->uses.push_back(event);
    }
  }
  for (const StateStoragePtr& each : away) {
    if (const auto owner = each->owner.lock()) owner->restore_(each);
  }
}

namespace {

// While an op runs that nobody watches: of a thread that runs no step, or inside of an op that is watched.
struct UnwatchedOp final : at::ObserverContext {
  UnwatchedOp(const OpKind& op, c10::ArrayRef<const c10::IValue> arguments)
      : use(op, arguments.data(), arguments.size(), StateUse::Kind::OTHER) {}
  StateUse use;
};

// While an op runs whose arguments could not be brought back: accesses to them raise an error, for profilers as well.
struct RefusedOp final : at::ObserverContext {
  explicit RefusedOp(c10::ArrayRef<const c10::IValue> arguments) {
    const std::lock_guard<std::mutex> guard(state_mutex());
    for (const c10::IValue& argument : arguments) {
      visit_tensors(argument, [&](const at::Tensor& tensor) {
        const auto found = state_records().find(find_storage(tensor));
        if (found != state_records().end() && found->second->is_away) refused.push_back(found->second);
      });
    }
    for (const StateStoragePtr& each : refused) {
      if (const auto held = each->storage.lock()) refuse_access(*held);
    }
  }
  ~RefusedOp() override {
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;  // destroyed without the mutex
    const std::lock_guard<std::mutex> guard(state_mutex());
    for (const StateStoragePtr& each : refused) {
      auto held = each->storage.lock();
      if (held && each->is_away) guard_away(*held);
      storages.push_back(std::move(held));
    }
  }
  std::vector<StateStoragePtr> refused;
};

// Whether PyTorch calls other callbacks than ours for this thread's ops.
bool has_other_callbacks() {
  const auto called = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  return called && called->callbacks_.size() > 1;
}

}  // namespace

void show_to_callbacks() {
  const bool shows = has_other_callbacks();
  if (shows != shown[static_cast<size_t>(Shown::TO_CALLBACKS)]) StateTable::show_addresses(shows, Shown::TO_CALLBACKS);
}

namespace {

// Errors stay here: what could not be restored raises one where it is accessed, and so do results that an op was to compute
// first from what this one overwrites.
std::unique_ptr<at::ObserverContext> begin_unwatched(const at::RecordFunction& function) {
  if (!StateTable::is_any_managed()) return nullptr;
  if (is_key_active()) {  // it brings back what the op uses
    show_to_callbacks();
    return hide_from_lookup(function);
  }
  const auto name = function.operator_name();
  const auto op = name.has_value() ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  const OpKind* kind = op.has_value() ? find_kind(*op) : nullptr;
  if (kind == nullptr || !kind->uses_memory) return nullptr;
  const auto arguments = function.inputs();
  try {
    return std::make_unique<UnwatchedOp>(*kind, arguments);
  } catch (const std::exception& error) {
    if (kind->may_write) StateTable::lose_waiting(list_written(*kind, arguments.data(), arguments.size()), error.what());
    TORCH_WARN("Elbowroom cannot bring state back for an op: ", error.what());
    return std::make_unique<RefusedOp>(arguments);
  }
}

std::atomic<bool> is_watching_all{false};

}  // namespace

bool is_watching_all_threads() { return is_watching_all; }

void watch_all_threads() {
  static auto* mutex = new std::mutex;
  // Registered once, before those of most profilers, which are to find in memory what an op is given.
  static const at::CallbackHandle handle = [] {
    const auto made = at::addGlobalCallback(
        at::RecordFunctionCallback(&begin_unwatched).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    at::disableCallback(made);
    return made;
  }();
  const std::lock_guard<std::mutex> guard(*mutex);
  if (StateTable::is_any_managed() == is_watching_all) return;
  is_watching_all = !is_watching_all;
  if (is_watching_all) {
    at::reenableCallback(handle);
  } else {
    at::disableCallback(handle);
  }
}

}  // namespace elbowroom
