#include "state_storages.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "op_arguments.h"

namespace elbowroom {

namespace {

constexpr const char* AWAY =
    "Elbowroom has moved these bytes of the model's state out of memory to stay within the budget, and this access "
    "bypasses PyTorch's operators, or comes from a thread that runs no step. Call room.detach() first, which brings all "
    "of it back, or access it by a PyTorch op in the thread that runs the steps.";

using Records = ska::flat_hash_map<const c10::StorageImpl*, StateStoragePtr>;

// Of all tables. Never destroyed: storages may die after static objects.
std::mutex& state_mutex() {
  static auto* made = new std::mutex;
  return *made;
}

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

// With the mutex.
bool is_idle(const StateStorage& storage) {
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

StateStoragePtr StateTable::add(const c10::Storage& storage) {
  const std::lock_guard<std::mutex> guard(state_mutex());
  StateStoragePtr& record = state_records()[storage.unsafeGetStorageImpl()];
  if (record) return record->owner.lock().get() == this ? record : StateStoragePtr();
  record = c10::make_intrusive<StateStorage>(storage, weak_from_this());
  record->birth = state_ops().latest;
  ++managed;
  return record;
}

StateStoragePtr StateTable::find(const c10::StorageImpl* storage) const {
  const std::lock_guard<std::mutex> guard(state_mutex());
  const auto found = state_records().find(storage);
  return found != state_records().end() && found->second->owner.lock().get() == this ? found->second : StateStoragePtr();
}

std::vector<StateStoragePtr> StateTable::list() const {
  std::vector<StateStoragePtr> found;
  const std::lock_guard<std::mutex> guard(state_mutex());
  for (const auto& [key, record] : state_records()) {
    if (record->owner.lock().get() == this) found.push_back(record);
  }
  return found;
}

std::vector<StateStoragePtr> StateTable::sweep() {
  std::vector<StateStoragePtr> gone;
  const std::lock_guard<std::mutex> guard(state_mutex());
  for (auto each = state_records().begin(); each != state_records().end();) {
    if (each->second->storage.expired() && each->second->pins == 0 && each->second->owner.lock().get() == this) {
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
    const auto owner = each->second->owner.lock();
    if (owner == nullptr || owner.get() == this) {
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
    if (record->owner.lock().get() != this) continue;
    record->former_uses.swap(record->uses);
    record->uses.clear();
  }
}

StateUse::Pins::~Pins() {
  if (op < 0) return;
  const std::lock_guard<std::mutex> guard(state_mutex());
  auto& running = state_ops().running;
  running.erase(std::find(running.begin(), running.end(), op));
  for (const StateStoragePtr& each : storages) --each->pins;
}

StateUse::StateUse(const OpKind& op, const c10::IValue* arguments, size_t count, Kind kind) {
  if (!StateTable::is_any_managed()) return;
  const bool is_writing = op.may_write && kind == Kind::STEP;  // a replay writes to nothing that it has not made
  const Written written = is_writing ? list_written(op, arguments, count) : Written();
  {
    const std::lock_guard<std::mutex> guard(state_mutex());
    start();
    for (const at::Tensor& tensor : written) pin(tensor, true);
    for (size_t i = 0; i < count; ++i) {
      visit_tensors(arguments[i], [&](const at::Tensor& tensor) { pin(tensor, false); });
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

// With the mutex.
void StateUse::start() {
  Ops& ops = state_ops();
  pins_.op = ++ops.latest;
  ops.running.push_back(pins_.op);
}

// With the mutex.
void StateUse::pin(const at::Tensor& tensor, bool is_written) {
  const c10::StorageImpl* const storage = find_storage(tensor);
  if (storage == nullptr) return;
  const auto found = state_records().find(storage);
  if (found == state_records().end()) return;
  const StateStoragePtr& record = found->second;
  if (std::find(pins_.storages.begin(), pins_.storages.end(), record) != pins_.storages.end()) return;
  if (is_written) record->is_written = true;
  pins_.storages.push_back(record);
  ++record->pins;
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

}  // namespace elbowroom
