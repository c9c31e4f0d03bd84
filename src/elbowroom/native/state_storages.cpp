#include "state_storages.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <string>
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

// Numbers of the ops that run now, of all threads, and of the latest one. With the mutex.
struct Ops {
  std::vector<int64_t> running;
  int64_t latest = 0;
};

Ops& state_ops() {
  static auto* made = new Ops;
  return *made;
}

std::mutex& state_mutex() {
  static auto* made = [] {
    auto* mutex = new std::mutex;
    static std::mutex* self = mutex;
    // The child has none of the other threads, and so none of their ops.
    pthread_atfork([] { self->lock(); }, [] { self->unlock(); }, [] {
      state_ops().running.clear();
      self->unlock();
    });
    return mutex;
  }();
  return *made;
}

// Whether an op goes on to use what it was given when it has returned. (The names of its kinds have a dot for "::".)
bool is_asynchronous(const OpKind& op) { return op.name.starts_with("c10d.") || op.name.starts_with("_c10d_functional."); }

// With the mutex.
bool is_idle(const StateStorage& storage) {
  if (storage.is_staying) return false;
  const auto& running = state_ops().running;
  return storage.pins == 0 && std::all_of(running.begin(), running.end(), [&](int64_t op) { return op > storage.birth; });
}

}  // namespace

StateStorage::StateStorage(const c10::Storage& storage, std::weak_ptr<StateTable> owner)
    : key(storage.unsafeGetStorageImpl()),
      storage(storage.getWeakStorageImpl()),
      nbytes(static_cast<int64_t>(storage.nbytes())),
      owner(std::move(owner)) {}

bool StateStorage::empty() {
  c10::DataPtr freed;  // destroyed without the mutex
  const auto held = storage.lock();
  if (!held) return false;
  const std::lock_guard<std::mutex> guard(state_mutex());
  if (!elbowroom::is_idle(*this) || is_written || is_away || static_cast<int64_t>(held->nbytes()) != nbytes) return false;
  c10::DataPtr& memory = held->_mutable_data_ptr_no_checks();
  if (memory.get() == nullptr) return false;
  const c10::Device device = memory.device();
  freed = std::move(memory);
  held->set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  held->release_data_and_set_meta_custom_data_ptr_error_msg_(AWAY);
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
  held->clear_data_ptr_access_error_msg_();
  former = std::move(held->_mutable_data_ptr_no_checks());
  held->set_data_ptr_noswap(std::move(memory));
  source->set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  source->set_nbytes(size_t{0});
  is_away = false;
}

int64_t StateStorage::count_until_use(int64_t now, int64_t step_events, int64_t most) const {
  const std::lock_guard<std::mutex> guard(state_mutex());
  const auto next = std::lower_bound(former_uses.begin(), former_uses.end(), now);
  if (next != former_uses.end()) return *next - now;
  // In the next step. Its first use may be known from this one, if there was none in the last.
  if (!former_uses.empty()) return std::max<int64_t>(0, step_events - now) + former_uses.front();
  if (!uses.empty() && step_events > 0) return std::max<int64_t>(0, step_events - now) + uses.front();
  return most;
}

StateTable::StateTable(Restore restore) : restore_(std::move(restore)) { state_mutex(); }

StateStoragePtr StateTable::add(const c10::Storage& storage) {
  const std::lock_guard<std::mutex> guard(state_mutex());
  StateStoragePtr& record = state_records()[storage.unsafeGetStorageImpl()];
  if (record && !record->belongs_to(*this)) return {};
  if (record) {
    if (!record->is_away) record->nbytes = static_cast<int64_t>(storage.nbytes());
    return record;
  }
  record = c10::make_intrusive<StateStorage>(storage, weak_from_this());
  record->birth = state_ops().latest;
  ++managed;
  return record;
}

StateStoragePtr StateTable::find(const c10::StorageImpl* storage) const {
  const std::lock_guard<std::mutex> guard(state_mutex());
  const auto found = state_records().find(storage);
  return found != state_records().end() && found->second->belongs_to(*this) ? found->second : StateStoragePtr();
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

StateUse::Pins::~Pins() {
  if (op < 0 && storages.empty()) return;
  const std::lock_guard<std::mutex> guard(state_mutex());
  auto& running = state_ops().running;
  const auto own = std::find(running.begin(), running.end(), op);
  if (own != running.end()) running.erase(own);
  for (const StateStoragePtr& each : storages) --each->pins;
}

StateUse::StateUse(const OpKind& op, const c10::IValue* arguments, size_t count, Kind kind) {
  if (!StateTable::is_any_managed()) return;
  const bool is_writing = op.may_write && kind != Kind::REPLAY;
  const bool is_lasting = is_asynchronous(op);
  const Written written = is_writing ? list_written(op, arguments, count) : Written();
  {
    const std::lock_guard<std::mutex> guard(state_mutex());
    start();
    for (const at::Tensor& tensor : written) pin(tensor, true);
    for (size_t i = 0; i < count; ++i) {
      visit_tensors(arguments[i], [&](const at::Tensor& tensor) { pin(tensor, false, is_lasting); });
      if (arguments[i].isStorage()) pin(arguments[i].toStorage().unsafeGetStorageImpl(), false, false);
    }
  }
  begin(kind);
}

StateUse::StateUse(at::TensorList read, at::TensorList written, Kind kind) {
  if (!StateTable::is_any_managed()) return;
  {
    const std::lock_guard<std::mutex> guard(state_mutex());
    start();
    for (const at::Tensor& tensor : written) pin(tensor, true);
    for (const at::Tensor& tensor : read) pin(tensor, false);
  }
  begin(kind);
}

StateUse::StateUse(const StateStoragePtr& storage, bool is_written) {
  {
    const std::lock_guard<std::mutex> guard(state_mutex());
    pin(storage, is_written);
  }
  begin(Kind::OTHER);
}

// With the mutex.
void StateUse::start() {
  Ops& ops = state_ops();
  pins_.op = ++ops.latest;
  ops.running.push_back(pins_.op);
}

// With the mutex.
void StateUse::pin(const at::Tensor& tensor, bool is_written, bool is_staying) {
  if (const c10::StorageImpl* const storage = find_storage(tensor)) pin(storage, is_written, is_staying);
}

// With the mutex.
void StateUse::pin(const c10::StorageImpl* storage, bool is_written, bool is_staying) {
  const auto found = state_records().find(storage);
  if (found == state_records().end()) return;
  pin(found->second, is_written);
  if (is_staying) found->second->is_staying = true;
}

// With the mutex.
void StateUse::pin(const StateStoragePtr& storage, bool is_written) {
  if (is_written) storage->is_written = true;
  if (std::find(pins_.storages.begin(), pins_.storages.end(), storage) != pins_.storages.end()) return;
  pins_.storages.push_back(storage);
  ++storage->pins;
}

void StateUse::begin(Kind kind) {
  if (pins_.storages.empty()) return;
  const auto table = pins_.storages.front()->owner.lock();
  if (table != nullptr && kind == Kind::STEP) {
    const int64_t event = table->events_.fetch_add(1);
    const int64_t now = table->clock_.fetch_add(1);
    const std::lock_guard<std::mutex> guard(state_mutex());
    for (const StateStoragePtr& each : pins_.storages) {
      each->last_use = now;
      each->uses.push_back(event);
    }
  }
  for (const StateStoragePtr& each : pins_.storages) {
    if (!each->is_away) continue;
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

// Errors stay here: what could not be restored raises one where it is accessed.
std::unique_ptr<at::ObserverContext> begin_unwatched(const at::RecordFunction& function) {
  if (!StateTable::is_any_managed() || is_key_active()) return nullptr;
  try {
    const auto name = function.operator_name();
    const auto op = name.has_value() ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
    const OpKind* kind = op.has_value() ? find_kind(*op) : nullptr;
    if (kind == nullptr || !kind->uses_memory) return nullptr;
    return std::make_unique<UnwatchedOp>(*kind, function.inputs());
  } catch (const std::exception& error) {
    TORCH_WARN("Elbowroom cannot bring state back for an op: ", error.what());
    return nullptr;
  }
}

}  // namespace

void watch_all_threads() {
  static auto* mutex = new std::mutex;
  static at::CallbackHandle handle = 0;
  const std::lock_guard<std::mutex> guard(*mutex);
  if (StateTable::is_any_managed() == (handle != 0)) return;
  if (handle != 0) {
    at::removeCallback(std::exchange(handle, 0));
  } else {
    handle = at::addGlobalCallback(
        at::RecordFunctionCallback(&begin_unwatched).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
}

}  // namespace elbowroom
