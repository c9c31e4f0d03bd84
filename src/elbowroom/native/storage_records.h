// What a step knows of each storage that its ops have touched.
#pragma once

#include <c10/core/SafePyObject.h>
#include <c10/core/Storage.h>
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
using RecordedOpPtr = c10::intrusive_ptr<RecordedOp>;

// One storage of one step. All but `views` is guarded by the table's mutex.
class StorageRecord final : public c10::intrusive_ptr_target {
 public:
  explicit StorageRecord(const c10::Storage& storage)
      : key(storage.unsafeGetStorageImpl()),
        storage(storage.getWeakStorageImpl()),
        nbytes(static_cast<int64_t>(storage.nbytes())) {}
  // Called in place of the destructor while something refers to the record weakly.
  void release_resources() override;
  ~StorageRecord() override { release_resources(); }

  // Nothing tells any more how its contents came to be. What it held is to be destroyed without the mutex.
  std::vector<RecordedOpPtr> forget_ops();

  // Of the storage in the trace that the step follows, or a number of the step's own; -1 until it is saved. Not guarded.
  std::atomic<int64_t> id{-1};
  const c10::StorageImpl* key;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // the latest one, if it has been brought back
  int64_t nbytes;
  int64_t version = 0;  // grows before and after each op that writes to it
  int64_t views = 0;    // tensors of it that autograd has saved and not given up
  bool is_staying = false;  // it outlives the step: a parameter, say
  bool is_guarded = false;  // Python is told of writes to it
  std::shared_ptr<c10::SafePyObject> residence;  // a weak reference to the object in Python; with its global lock
  RecordedOpPtr made_by;  // null where that is not known, or something unknown has written to it since
  std::vector<RecordedOpPtr> changed_by;  // ops that wrote to it since, in order
};
using StorageRecordPtr = c10::intrusive_ptr<StorageRecord>;

// The records of a step, by storage. A record keeps the `StorageImpl`, not its bytes, so that its address stays its own.
class StorageTable {
 public:
  // `scope`: counts the step's bytes; null where no ledger does.
  explicit StorageTable(Scope* scope);
  ~StorageTable();
  StorageTable(const StorageTable&) = delete;
  StorageTable& operator=(const StorageTable&) = delete;

  Scope* const scope;
  // Held while records are read or changed.
  std::mutex mutex;

  // With the mutex: the record of a storage; null if there is none.
  const StorageRecordPtr& find(const c10::StorageImpl* storage) const;
  // With the mutex: the same, made if there is none.
  StorageRecordPtr see(const c10::Storage& storage);
  // The same, with a guard of the mutex, which is given up meanwhile where there is none: what was there before the step is
  // counted by the ledger from now on.
  StorageRecordPtr see_counted(const c10::Storage& storage, std::unique_lock<std::mutex>& guard);
  // With the mutex: a record has a new storage from now on, with the same contents.
  void put(const c10::Storage& storage, const StorageRecordPtr& record);
  // Forget the storages that are gone, if many have come since the last time. Takes the mutex then.
  void sweep_if_many() {
    if (is_many_.load(std::memory_order_relaxed)) sweep();
  }
  // Forget all. Takes the mutex.
  void clear();
  size_t size() const { return records_.size(); }

 private:
  void sweep();

  ska::flat_hash_map<const c10::StorageImpl*, StorageRecordPtr> records_;
  size_t sweep_at_ = 1024;
  std::atomic<bool> is_many_{false};  // changed with the mutex
};

}  // namespace elbowroom
