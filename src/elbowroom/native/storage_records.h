// Records of the storages that a step's ops have used.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace elbowroom {

class RecordedOp;
class Scope;
class StorageTable;
struct Save;
using RecordedOpPtr = c10::intrusive_ptr<RecordedOp>;

// Rises of a version counter by writes that are watched. A tensor keeps its counter when it gets another storage.
struct Rises {
  uint32_t watched = 0;    // writes that raise it, some after their end
  uint32_t announced = 0;  // calls of `increment_version` in watched threads, whose writes follow
};

// One storage of one step. Guarded by the table's mutex, except `views`.
class StorageRecord final : public c10::intrusive_ptr_target {
 public:
  explicit StorageRecord(const c10::Storage& storage)
      : key(storage.unsafeGetStorageImpl()),
        storage(storage.getWeakStorageImpl()),
        nbytes(static_cast<int64_t>(storage.nbytes())) {}
  // Called in place of the destructor while weak references exist.
  void release_resources() override;
  ~StorageRecord() override { release_resources(); }

  // Returns whether autograd has saved a tensor of it, and not released it.
  bool is_saved() const { return views > 0 || !kept.empty(); }
  // Forgets what a step knew of it: autograd has released all of its tensors.
  void forget_saves() {
    id = -1;
    is_known = is_handled = false;
  }
  // With the table's mutex held: follows the version counter of a tensor of it, which an op has used. Finds writes that
  // were not watched.
  void follow_versions(const at::Tensor& tensor, StorageTable& table);
  // Counts a write if a version counter has risen more often than watched writes explain. A lower value is of code that
  // has set it back.
  void find_unwatched_writes();
  // Notes that a watched op is about to write to it.
  void begin_write() {
    find_unwatched_writes();
    is_being_written_ = true;
    ++version;
  }
  // Notes that a watched op has written to it, or failed.
  void end_write();
  // Forgets the ops that computed its contents, and returns them, to be destroyed without the mutex.
  std::vector<RecordedOpPtr> forget_ops();

  // Id of the storage in the trace that the step follows, else a number of this step; -1 until it is saved. Not
  // guarded.
  std::atomic<int64_t> id{-1};
  const c10::StorageImpl* key;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // the latest one, if it was reloaded or recomputed
  int64_t nbytes;
  int64_t version = 0;  // incremented before and after each watched op that writes to it
  int64_t unwatched_writes = 0;  // by other threads, as far as they were found
  int64_t views = 0;    // number of its saved tensors that Python or a plan moves, and autograd has not released
  std::vector<std::weak_ptr<Save>> kept;  // its other saved tensors, which the extension keeps
  std::atomic<int64_t> kept_count{0};     // size of `kept`; not guarded
  std::atomic<bool> is_known{false};      // Python has been told of it
  std::atomic<bool> is_handled{false};    // Python has some of its views; not guarded
  bool is_staying = false;  // it outlives the step, like a parameter
  bool is_guarded = false;  // writes to it are reported to Python
  std::shared_ptr<c10::SafePyObject> residence;  // weak reference to the Python object; accessed with the GIL
  RecordedOpPtr made_by;  // null if unknown, or if an unrecorded op has written to it since
  std::vector<RecordedOpPtr> changed_by;  // ops that wrote to it since, in order

 private:
  // A version counter of a tensor, and of the views that share it. `.data` has one of its own.
  struct Followed {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    c10::VariableVersion counter;
    std::shared_ptr<Rises> rises;
    uint32_t counted;    // its value up to which its rises are explained
    uint32_t explained;  // number of the watched writes that explain them
  };

  c10::SmallVector<Followed, 1> followed_;
  bool is_being_written_ = false;  // by a watched op
};
using StorageRecordPtr = c10::intrusive_ptr<StorageRecord>;

// The records of a step, by storage. A record's weak reference keeps the `StorageImpl`, not its bytes, so that its
// address is not reused.
class StorageTable {
 public:
  // `scope`: counts the step's bytes; null without a ledger.
  explicit StorageTable(Scope* scope);
  ~StorageTable();
  StorageTable(const StorageTable&) = delete;
  StorageTable& operator=(const StorageTable&) = delete;

  Scope* const scope;
  // Held while records are read or changed.
  std::mutex mutex;

  // Returns the record of a storage, with the mutex held; null if there is none.
  const StorageRecordPtr& find(const c10::StorageImpl* storage) const;
  // Returns the record of a storage, with the mutex held; creates it if there is none.
  StorageRecordPtr see(const c10::Storage& storage);
  // Like `see`, but also makes the ledger count a storage without a record, which may be older than the step. Unlocks
  // `guard`, which holds the mutex, meanwhile.
  StorageRecordPtr see_counted(const c10::Storage& storage, std::unique_lock<std::mutex>& guard);
  // Gives a record a new storage with the same contents, with the mutex held.
  void put(const c10::Storage& storage, const StorageRecordPtr& record);
  // Removes the records of freed storages if many were added since the last time. Takes the mutex in that case.
  void sweep_if_many() {
    if (is_many_.load(std::memory_order_relaxed)) sweep();
  }
  // Notes, with the mutex held, that a record knows of an op that wrote to it. Such an op refers to the record as well.
  void note_changed(const StorageRecordPtr& record) { changed_.emplace_back(record); }
  // Returns the rises of the version counter of a tensor, with the mutex held; null if no record follows it.
  Rises* find_rises(const at::Tensor& tensor) const;
  // Returns the rises of a version counter, with the mutex held; creates them if there are none.
  std::shared_ptr<Rises> see_rises(const c10::VariableVersion& counter);
  // Removes all records, and has those that were noted forget their ops, which would keep each other. Takes the mutex.
  void clear();
  size_t size() const { return records_.size(); }

 private:
  void sweep();

  ska::flat_hash_map<const c10::StorageImpl*, StorageRecordPtr> records_;
  ska::flat_hash_map<const void*, std::shared_ptr<Rises>> rises_;  // by counter, also of counters that are gone
  std::vector<c10::weak_intrusive_ptr<StorageRecord>> changed_;
  size_t sweep_at_ = 1024;
  std::atomic<bool> is_many_{false};  // changed with the mutex
};

}  // namespace elbowroom
