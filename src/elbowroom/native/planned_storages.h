// The storages that a plan moves by copies alone, while the step follows it.
//
// Saves, needs and releases of their tensors do not call Python, which makes the moves when they are due. When the step
// leaves its plan, or a move fails, the storages are handed over to Python (`SavedTensors::settle`).
#pragma once

#include <c10/core/SafePyObject.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "op_watch.h"
#include "saved_view.h"
#include "storage_records.h"

namespace elbowroom {

using PythonObject = std::shared_ptr<c10::SafePyObject>;
using SavedViewPtr = std::shared_ptr<SavedView>;

// Guarded by the mutex of the step's table.
struct PlannedStorage {
  // As `State` of `residency/machine.py`.
  enum class Place : uint8_t { RESIDENT, LEAVING, AWAY, ARRIVING };

  PlannedStorage(int64_t id, StorageRecordPtr record) : id(id), record(std::move(record)) {}

  // Returns the storage on the device; null if it is away. With the mutex held.
  c10::Storage find_storage() const;

  const int64_t id;  // in the trace
  const StorageRecordPtr record;
  Place place = Place::RESIDENT;
  c10::Storage back;  // what came back; null while the views share the storage
  c10::weak_intrusive_ptr<c10::StorageImpl> released{c10::intrusive_ptr<c10::StorageImpl>()};  // last
  PythonObject copy;  // in the tier below; null if there is none. Destroyed with the GIL
  std::vector<SavedViewPtr> views;  // those that autograd has not released
  bool is_handed_over = false;  // Python has some of the views
};
using PlannedStoragePtr = std::shared_ptr<PlannedStorage>;

class PlannedStorages {
 public:
  using Place = PlannedStorage::Place;
  // What a saved tensor is made of, without the mutex.
  struct Found {
    at::Tensor tensor;  // undefined if it has to be made
    SavedViewPtr view;
    c10::Storage back;
    at::Tensor make() const { return tensor.defined() ? tensor : view->make(back); }
  };

  explicit PlannedStorages(std::shared_ptr<OpWatch> watch) : watch_(std::move(watch)), mutex_(watch_->table().mutex) {}

  // -- with the mutex held ------------------------------------------------------------------------------------------

  // Sets which storages of the trace these are.
  void plan(std::unordered_set<int64_t> ids) { ids_ = std::move(ids); }
  bool contains(int64_t id) const { return ids_.count(id) != 0; }
  // Adds a view of a storage whose id is set; creates the storage if there is none.
  PlannedStoragePtr add(const SavedViewPtr& view, const StorageRecordPtr& record);
  // Removes a view, and its storage if it was the last. Returns whether it was.
  bool remove(const PlannedStoragePtr& storage, const SavedViewPtr& view);
  // Returns what the saved tensor is made of; nothing if the storage is away or has not arrived.
  static std::optional<Found> find(const PlannedStorage& storage, const SavedViewPtr& view);
  // Forgets all storages, and returns them to be destroyed without the mutex: Python has them.
  std::unordered_map<int64_t, PlannedStoragePtr> clear();
  // Hands a view over to Python, and for the first view of a storage where that is, and its copy.
  struct Handover {
    SavedViewPtr view;
    bool is_first;
    Place place;
    c10::Storage back;  // null if there is none
    std::optional<c10::Storage> released;
    PythonObject copy;
  };
  static Handover hand_over(PlannedStorage& storage, const SavedViewPtr& view);
  // Undoes that.
  static void take_back(PlannedStorage& storage, Handover& given);

  // -- called from Python, without the mutex ------------------------------------------------------------------------

  // Returns the storage if it can be offloaded: it is on the device and has no copy.
  std::optional<c10::Storage> find_resident(int64_t id);
  void begin_leaving(int64_t id, PythonObject copy);
  // Releases a storage that has a copy. If the transfer is not known to be over, nothing happens but that the copy is
  // returned.
  PythonObject release(int64_t id);
  // Returns the copy of a storage that is away; null if there is none. If the program still holds the storage that was
  // released, that one is used, and the copy freed.
  PythonObject find_away(int64_t id);
  void begin_arriving(int64_t id, const c10::Storage& back);
  // Returns the copy of a storage that is coming back; null if the transfer is known to be over.
  PythonObject find_arriving(int64_t id);
  // Notes that compute waits for the transfer.
  void finish(int64_t id);
  // Notes that a reload failed.
  void lose(int64_t id);
  // Tells whether autograd holds a storage of this id.
  bool holds(int64_t id) const;
  // Returns the copies of storages that autograd has given up, and whether their transfers may still run.
  std::vector<std::pair<PythonObject, bool>> take_freed();

 private:
  PlannedStoragePtr find(int64_t id) const;
  static bool is_moving(Place place) { return place == Place::LEAVING || place == Place::ARRIVING; }

  const std::shared_ptr<OpWatch> watch_;
  std::mutex& mutex_;
  std::unordered_set<int64_t> ids_;
  std::unordered_map<int64_t, PlannedStoragePtr> storages_;
  std::vector<std::pair<PythonObject, bool>> freed_;
};

}  // namespace elbowroom
