#include "scope.h"

#include <time.h>

#include <algorithm>
#include <utility>

namespace elbowroom {

namespace {

int64_t read_clock() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

// A request inside `make_room` is not refused, since freeing memory needs some memory itself.
thread_local bool is_making_room = false;

struct MakingRoom {
  MakingRoom() { is_making_room = true; }
  ~MakingRoom() { is_making_room = false; }
};

}  // namespace

void Scope::reset_peak() {
  sweep_external();
  peak_bytes_.store(live_bytes(), std::memory_order_relaxed);
}

void Scope::reserve(int64_t nbytes) {
  int64_t live = bytes_.load(std::memory_order_relaxed);
  bool may_exceed = is_making_room || make_room_ == nullptr;
  while (true) {
    if (!may_exceed && live + nbytes > limit_bytes()) {
      const int64_t missing = live + nbytes - limit_bytes() - sweep_external();
      if (missing > 0) {
        const MakingRoom guard;
        may_exceed = !make_room_(nbytes, missing);
      }
      live = bytes_.load(std::memory_order_relaxed);
    } else if (bytes_.compare_exchange_weak(live, live + nbytes, std::memory_order_relaxed)) {
      note(live + nbytes);
      return;
    }
  }
}

bool Scope::ask_for_memory(int64_t nbytes) {
  if (is_making_room || make_room_ == nullptr) return false;
  const MakingRoom guard;
  return make_room_(nbytes, 0);
}

void Scope::add(int64_t nbytes) { note(bytes_.fetch_add(nbytes, std::memory_order_relaxed) + nbytes); }

int64_t Scope::begin_op() {
  const int64_t live = live_bytes();
  op_peak_bytes_.store(live, std::memory_order_relaxed);
  return live;
}

int64_t Scope::take_recent_peak() {
  const int64_t live = live_bytes();
  return std::max(live, recent_peak_bytes_.exchange(live, std::memory_order_relaxed));
}

void Scope::note(int64_t live) {
  for (std::atomic<int64_t>* each : {&peak_bytes_, &op_peak_bytes_, &recent_peak_bytes_}) {
    int64_t peak = each->load(std::memory_order_relaxed);
    while (live > peak && !each->compare_exchange_weak(peak, live, std::memory_order_relaxed)) {
    }
  }
  if (is_recording_.load(std::memory_order_relaxed)) record(live);
}

void Scope::add_adopted(int64_t nbytes) {
  adopted_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
  add(nbytes);
}

void Scope::remove(int64_t nbytes) {
  const int64_t live = bytes_.fetch_sub(nbytes, std::memory_order_relaxed) - nbytes;
  if (is_recording_.load(std::memory_order_relaxed)) record(live);
}

void Scope::record(int64_t live) {
  const std::lock_guard<std::mutex> guard(changes_mutex_);
  changes_.push_back({read_clock(), live});
}

bool Scope::has_external(const c10::Storage& storage) {
  const std::lock_guard<std::mutex> guard(external_mutex_);
  return is_external(storage);
}

bool Scope::is_external(const c10::Storage& storage) const {
  const auto* impl = storage.unsafeGetStorageImpl();
  return std::any_of(external_.begin(), external_.end(), [impl](const External& each) {
    return each.storage._unsafe_get_target() == impl;  // the weak reference keeps the address from being reused
  });
}

void Scope::add_external(const c10::Storage& storage) {
  const std::lock_guard<std::mutex> guard(external_mutex_);
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  external_.push_back({storage.getWeakStorageImpl(), nbytes, false});
  add_adopted(nbytes);
}

bool Scope::forget_external(const c10::Storage& storage) {
  const std::lock_guard<std::mutex> guard(external_mutex_);
  const auto* impl = storage.unsafeGetStorageImpl();
  return std::erase_if(external_, [impl](const External& each) { return each.storage._unsafe_get_target() == impl; }) > 0;
}

bool Scope::add_input(const c10::Storage& storage) {
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  reserve(nbytes);  // without the mutex: Python may make the room
  const std::lock_guard<std::mutex> guard(external_mutex_);
  if (is_external(storage)) {
    remove(nbytes);
    return false;
  }
  external_.push_back({storage.getWeakStorageImpl(), nbytes, true});
  adopted_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
  return true;
}

void Scope::expect(int64_t nbytes) { add_adopted(nbytes - expected_bytes_.exchange(nbytes, std::memory_order_relaxed)); }

int64_t Scope::find_expected(int64_t nbytes) {
  int64_t expected = expected_bytes();
  int64_t found = 0;
  do {
    found = std::min(expected, nbytes);
  } while (!expected_bytes_.compare_exchange_weak(expected, expected - found, std::memory_order_relaxed));
  add_adopted(-found);
  return found;
}

void Scope::drop_inputs() { sweep_external(true); }

int64_t Scope::sweep_external(bool with_inputs) {
  const std::lock_guard<std::mutex> guard(external_mutex_);
  int64_t gone = 0;
  std::erase_if(external_, [&gone, with_inputs](const External& each) {
    if (!each.storage.expired() && !(with_inputs && each.is_input)) return false;
    gone += each.nbytes;
    return true;
  });
  if (gone > 0) remove(gone);
  return gone;
}

void Scope::close() {
  set_limit(NO_LIMIT);
  is_closed_.store(true, std::memory_order_relaxed);
}

void Scope::lock() {
  external_mutex_.lock();
  changes_mutex_.lock();
}

void Scope::unlock() {
  changes_mutex_.unlock();
  external_mutex_.unlock();
}

void Scope::set_recording(bool is_recording) {
  const std::lock_guard<std::mutex> guard(changes_mutex_);
  changes_.clear();
  if (is_recording) changes_.push_back({read_clock(), live_bytes()});
  is_recording_.store(is_recording, std::memory_order_relaxed);
}

std::vector<Change> Scope::take_changes() {
  const std::lock_guard<std::mutex> guard(changes_mutex_);
  return std::exchange(changes_, {});
}

}  // namespace elbowroom
