#include "planned_storages.h"

#include <algorithm>
#include <utility>

namespace elbowroom {

c10::Storage PlannedStorage::find_storage() const {
  if (back) return back;
  for (const SavedViewPtr& view : views) {
    if (!view->is_released()) return view->tensor().storage();
  }
  return {};
}

PlannedStoragePtr PlannedStorages::add(const SavedViewPtr& view, const StorageRecordPtr& record) {
  PlannedStoragePtr& storage = storages_[record->id];
  if (!storage) storage = std::make_shared<PlannedStorage>(record->id, record);
  storage->views.push_back(view);
  record->views = static_cast<int64_t>(storage->views.size());
  record->is_guarded = true;
  return storage;
}

bool PlannedStorages::remove(const PlannedStoragePtr& storage, const SavedViewPtr& view) {
  auto& views = storage->views;
  views.erase(std::remove(views.begin(), views.end(), view), views.end());
  storage->record->views = static_cast<int64_t>(views.size());
  if (!views.empty()) return false;
  if (storage->copy) freed_.emplace_back(std::move(storage->copy), is_moving(storage->place));
  storages_.erase(storage->id);
  storage->record->id = -1;  // the program may hold the storage still, and autograd may save it anew
  return true;
}

std::optional<PlannedStorages::Found> PlannedStorages::find(const PlannedStorage& storage, const SavedViewPtr& view) {
  if (storage.place == Place::AWAY || storage.place == Place::ARRIVING) return std::nullopt;
  if (!view->is_released()) return Found{view->tensor(), nullptr, {}};
  return Found{{}, view, storage.back};
}

std::unordered_map<int64_t, PlannedStoragePtr> PlannedStorages::clear() {
  return std::exchange(storages_, {});
}

bool PlannedStorages::holds(int64_t id) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return find(id) != nullptr;
}

PlannedStorages::Handover PlannedStorages::hand_over(PlannedStorage& storage, const SavedViewPtr& view) {
  const bool is_first = !std::exchange(storage.is_handed_over, true);
  Handover given{view, is_first, storage.place, storage.back, std::nullopt, std::exchange(storage.copy, nullptr)};
  if (auto released = storage.released.lock()) given.released = c10::Storage(std::move(released));
  return given;
}

void PlannedStorages::take_back(PlannedStorage& storage, Handover& given) {
  if (!given.is_first) return;
  storage.is_handed_over = false;
  storage.copy = std::move(given.copy);
}

PlannedStoragePtr PlannedStorages::find(int64_t id) const {
  const auto found = storages_.find(id);
  return found == storages_.end() ? nullptr : found->second;
}

std::optional<c10::Storage> PlannedStorages::find_resident(int64_t id) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const PlannedStoragePtr storage = find(id);
  if (!storage || storage->place != Place::RESIDENT || storage->copy) return std::nullopt;
  c10::Storage home = storage->find_storage();
  if (!home) return std::nullopt;
  return home;
}

void PlannedStorages::begin_leaving(int64_t id, PythonObject copy) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (const PlannedStoragePtr storage = find(id)) {
    storage->place = Place::LEAVING;
    storage->copy = std::move(copy);
  } else {
    freed_.emplace_back(std::move(copy), true);  // autograd has given it up meanwhile
  }
}

PythonObject PlannedStorages::release(int64_t id) {
  std::vector<SavedViewPtr> views;
  c10::Storage home;  // destroyed without the mutex
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    const PlannedStoragePtr storage = find(id);
    if (!storage || !storage->copy || storage->place == Place::AWAY) return nullptr;
    if (is_moving(storage->place)) return storage->copy;
    home = storage->find_storage();
    if (home) storage->released = home.getWeakStorageImpl();
    storage->back = {};
    storage->place = Place::AWAY;  // so that no other thread uses the views
    views = storage->views;
  }
  for (const SavedViewPtr& view : views) {
    at::Tensor tensor = view->make_empty();
    const std::lock_guard<std::mutex> guard(mutex_);
    tensor = view->release(std::move(tensor));  // destroyed without the mutex
  }
  return nullptr;
}

PythonObject PlannedStorages::find_away(int64_t id) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const PlannedStoragePtr storage = find(id);
  if (!storage || storage->place != Place::AWAY) return nullptr;
  if (auto released = storage->released.lock()) {
    storage->back = c10::Storage(std::move(released));
    storage->place = Place::RESIDENT;
    freed_.emplace_back(std::move(storage->copy), false);
    storage->copy.reset();
    return nullptr;
  }
  return storage->copy;
}

void PlannedStorages::begin_arriving(int64_t id, const c10::Storage& back) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const PlannedStoragePtr storage = find(id);
  if (!storage) return;
  storage->back = back;
  storage->place = Place::ARRIVING;
  watch_->table().put(back, storage->record);
}

PythonObject PlannedStorages::find_arriving(int64_t id) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const PlannedStoragePtr storage = find(id);
  return storage && storage->place == Place::ARRIVING ? storage->copy : nullptr;
}

void PlannedStorages::finish(int64_t id) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const PlannedStoragePtr storage = find(id);
  if (storage && is_moving(storage->place)) storage->place = Place::RESIDENT;
}

void PlannedStorages::lose(int64_t id) {
  c10::Storage back;  // destroyed without the mutex
  const std::lock_guard<std::mutex> guard(mutex_);
  if (const PlannedStoragePtr storage = find(id)) {
    std::swap(back, storage->back);
    storage->place = Place::AWAY;
  }
}

std::vector<std::pair<PythonObject, bool>> PlannedStorages::take_freed() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return std::exchange(freed_, {});
}

}  // namespace elbowroom
