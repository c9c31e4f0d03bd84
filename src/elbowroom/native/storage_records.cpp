#include "storage_records.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "ledger.h"
#include "recorded_ops.h"

namespace elbowroom {

namespace {

// Limit on the version counters that a record follows: a tensor's, and those of its `.data`.
constexpr size_t MOST_FOLLOWED = 4;

// Returns what tells counters apart. PyTorch's class holds one pointer, and does not show it.
const void* identify(const c10::VariableVersion& counter) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  const void* found = nullptr;
  std::memcpy(&found, &counter, sizeof(found));
  return found;
}

// A record refers to the op that made it, which refers to the records that it read, and so on through the whole step.
// Recursive destruction would overflow the stack, so the outermost call destroys what the inner ones have put here. A
// pointer, since autograd frees graphs when a thread ends, and its variables with destructors may be gone by then.
thread_local std::vector<RecordedOpPtr>* doomed = nullptr;

void destroy(RecordedOpPtr op) {
  if (!op) return;
  if (doomed != nullptr) {
    doomed->push_back(std::move(op));
    return;
  }
  std::vector<RecordedOpPtr> left;
  doomed = &left;
  op.reset();
  while (!left.empty()) {
    op = std::move(left.back());
    left.pop_back();
    op.reset();
  }
  doomed = nullptr;
}

// Holds the mutexes of all tables during a fork: the child must not inherit one that another thread holds.
class Tables {
 public:
  static Tables& get() {
    static Tables* const tables = [] {
      static Tables* made = nullptr;
      made = new Tables();
      pthread_atfork([] { made->lock(); }, [] { made->unlock(); }, [] { made->unlock(); });
      return made;
    }();
    return *tables;
  }

  void add(StorageTable* table) {
    const std::lock_guard<std::mutex> guard(mutex_);
    tables_.push_back(table);
  }

  void remove(StorageTable* table) {
    const std::lock_guard<std::mutex> guard(mutex_);
    tables_.erase(std::find(tables_.begin(), tables_.end(), table));
  }

 private:
  void lock() {
    mutex_.lock();
    for (StorageTable* each : tables_) each->mutex.lock();
  }
  void unlock() {
    for (StorageTable* each : tables_) each->mutex.unlock();
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<StorageTable*> tables_;
};

}  // namespace

StorageTable::StorageTable(Scope* scope) : scope(scope) {
  records_.reserve(sweep_at_);
  Tables::get().add(this);
}

StorageTable::~StorageTable() { Tables::get().remove(this); }

void StorageRecord::follow_versions(const at::Tensor& tensor, StorageTable& table) {
  find_unwatched_writes();
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (!counter.enabled()) return;  // of an inference tensor
  bool is_followed = false;
  for (Followed& each : followed_) {
    each.explained = each.rises->watched;  // an op uses the storage after the rises, if there were any
    is_followed = is_followed || identify(each.counter) == identify(counter);
  }
  if (is_followed) return;
  if (followed_.size() == MOST_FOLLOWED) {
    const auto gone = std::find_if(followed_.begin(), followed_.end(), [](const Followed& each) { return each.tensor.expired(); });
    if (gone == followed_.end()) return;
    followed_.erase(gone);
  }
  const std::shared_ptr<Rises> rises = table.see_rises(counter);
  const c10::weak_intrusive_ptr<c10::TensorImpl> followed(tensor.getIntrusivePtr());
  followed_.push_back(Followed{followed, counter, rises, counter.current_version(), rises->watched});
}

void StorageRecord::find_unwatched_writes() {
  if (is_being_written_) return;
  for (Followed& each : followed_) {
    const uint32_t now = each.counter.current_version();
    if (now > each.counted) {
      const uint32_t rises = now - each.counted, left = each.rises->watched - each.explained;
      if (rises > left) {
        ++unwatched_writes;
        each.rises->announced = 0;
      }
      each.explained += std::min(rises, left);
    }
    each.counted = now;
  }
}

void StorageRecord::end_write() {
  is_being_written_ = false;
  ++version;
  for (Followed& each : followed_) {
    each.counted = each.counter.current_version();
    each.explained = each.rises->watched;
  }
}

Rises* StorageTable::find_rises(const at::Tensor& tensor) const {
  const auto found = rises_.find(identify(tensor.unsafeGetTensorImpl()->version_counter()));
  return found == rises_.end() ? nullptr : found->second.get();
}

std::shared_ptr<Rises> StorageTable::see_rises(const c10::VariableVersion& counter) {
  std::shared_ptr<Rises>& rises = rises_[identify(counter)];
  if (!rises) rises = std::make_shared<Rises>();
  return rises;
}

void StorageRecord::release_resources() {
  for (RecordedOpPtr& op : forget_ops()) destroy(std::move(op));
}

std::vector<RecordedOpPtr> StorageRecord::forget_ops() {
  std::vector<RecordedOpPtr> ops = std::move(changed_by);
  changed_by.clear();
  if (made_by) ops.push_back(std::move(made_by));
  made_by.reset();
  return ops;
}

const StorageRecordPtr& StorageTable::find(const c10::StorageImpl* storage) const {
  static const StorageRecordPtr none;
  const auto found = records_.find(storage);
  return found == records_.end() ? none : found->second;
}

StorageRecordPtr StorageTable::see(const c10::Storage& storage) {
  StorageRecordPtr& record = records_[storage.unsafeGetStorageImpl()];
  if (!record) {
    record = c10::make_intrusive<StorageRecord>(storage);
    if (records_.size() >= sweep_at_) is_many_.store(true, std::memory_order_relaxed);
  }
  return record;
}

StorageRecordPtr StorageTable::see_counted(const c10::Storage& storage, std::unique_lock<std::mutex>& guard) {
  if (const StorageRecordPtr& record = find(storage.unsafeGetStorageImpl())) return record;
  if (scope != nullptr) {
    guard.unlock();
    Ledger::get().adopt(storage, *scope, true);
    guard.lock();
  }
  return see(storage);
}

void StorageTable::put(const c10::Storage& storage, const StorageRecordPtr& record) {
  records_.erase(record->key);  // the address may be reused from now on
  record->key = storage.unsafeGetStorageImpl();
  record->storage = storage.getWeakStorageImpl();
  records_[record->key] = record;
}

void StorageTable::sweep() {
  std::vector<StorageRecordPtr> gone;  // destroyed without the mutex
  const std::lock_guard<std::mutex> guard(mutex);
  is_many_.store(false, std::memory_order_relaxed);
  if (records_.size() < sweep_at_) return;  // another thread has swept meanwhile
  for (const auto& [key, record] : records_) {
    if (record->storage.expired()) gone.push_back(record);
  }
  for (const StorageRecordPtr& record : gone) records_.erase(record->key);
  std::erase_if(changed_, [](const auto& each) { return each.expired(); });
  sweep_at_ = std::max<size_t>(1024, 2 * records_.size());
}

void StorageTable::clear() {
  ska::flat_hash_map<const c10::StorageImpl*, StorageRecordPtr> gone;
  std::vector<StorageRecordPtr> changed;
  std::vector<RecordedOpPtr> ops;  // destroyed first, and without the mutex
  const std::lock_guard<std::mutex> guard(mutex);
  gone.swap(records_);
  for (const auto& each : changed_) {
    StorageRecordPtr record = each.lock();
    if (!record) continue;
    for (RecordedOpPtr& op : record->forget_ops()) ops.push_back(std::move(op));
    changed.push_back(std::move(record));
  }
  changed_.clear();
}

}  // namespace elbowroom
