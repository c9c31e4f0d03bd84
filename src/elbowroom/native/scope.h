// The bytes of one room: what its steps have allocated and not yet freed, and what other threads allocate meanwhile.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include <c10/core/Storage.h>

namespace elbowroom {

constexpr int64_t NO_LIMIT = int64_t{1} << 60;  // no step is running

// One change of the live bytes.
struct Change {
  int64_t nanoseconds;  // of the realtime clock
  int64_t live_bytes;
};

// Asked for room: bytes requested, bytes missing within the limit, 0 if it is the system that has no more. Throws if it
// finds none; false if the request may pass all the same.
using MakeRoom = std::function<bool(int64_t, int64_t)>;

class Scope {
 public:
  // `epoch`: how many scopes there are with it. What was allocated before it, in no scope, is not counted.
  explicit Scope(int64_t epoch) : epoch_(epoch) {}

  int64_t epoch() const { return epoch_; }
  int64_t live_bytes() const { return bytes_.load(std::memory_order_relaxed); }
  // Bytes of storages that were there before and have been taken over so far.
  int64_t adopted_bytes() const { return adopted_bytes_.load(std::memory_order_relaxed); }
  int64_t peak_bytes() const { return peak_bytes_.load(std::memory_order_relaxed); }
  void reset_peak();
  // The peak of one op begins anew, at the live bytes, which it returns.
  int64_t begin_op();
  int64_t op_peak_bytes() const { return op_peak_bytes_.load(std::memory_order_relaxed); }
  // Returns the peak since the last call.
  int64_t take_recent_peak();

  void set_limit(int64_t nbytes) { limit_bytes_.store(nbytes, std::memory_order_relaxed); }
  int64_t limit_bytes() const { return limit_bytes_.load(std::memory_order_relaxed); }
  void set_make_room(MakeRoom make_room) { make_room_ = std::move(make_room); }
  // What may still be allocated in the step that is running; 0 if none is.
  int64_t count_left() const {
    const int64_t limit = limit_bytes();
    return limit >= NO_LIMIT ? 0 : std::max<int64_t>(0, limit - live_bytes());
  }

  // Count bytes that are about to be allocated: threads that ask at once do not get the same room. Throws what
  // `make_room` throws, and counts nothing then.
  void reserve(int64_t nbytes);

  // The system has refused memory for bytes that are counted. Whether room was made for them, so that it may be asked
  // again; throws what `make_room` throws.
  bool ask_for_memory(int64_t nbytes);

  void add(int64_t nbytes);
  void add_adopted(int64_t nbytes);
  void remove(int64_t nbytes);

  // Count a storage whose memory is not taken over, until it dies.
  void add_external(const c10::Storage& storage);
  // Make room for an input of a step as `reserve` does, and count it until `drop_inputs`. Returns false if another thread
  // has counted it meanwhile. Throws what `make_room` throws, and counts nothing then.
  bool add_input(const c10::Storage& storage);
  void drop_inputs();
  bool has_external(const c10::Storage& storage);

  // No scope of a room that is there: its blocks may be another room's.
  void close();
  bool is_closed() const { return is_closed_.load(std::memory_order_relaxed); }

  // Around a fork: the child must not inherit a lock that another thread holds.
  void lock();
  void unlock();

  // Every change from now on, or none.
  void set_recording(bool is_recording);
  std::vector<Change> take_changes();

 private:
  int64_t sweep_external(bool with_inputs = false);
  void note(int64_t live);
  void record(int64_t live);

  const int64_t epoch_;
  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> adopted_bytes_{0};
  std::atomic<int64_t> peak_bytes_{0}, op_peak_bytes_{0}, recent_peak_bytes_{0};
  std::atomic<int64_t> limit_bytes_{NO_LIMIT};
  std::atomic<bool> is_closed_{false};
  MakeRoom make_room_;

  struct External {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t nbytes;
    bool is_input;
  };
  // With the mutex.
  bool is_external(const c10::Storage& storage) const;
  std::mutex external_mutex_;
  std::vector<External> external_;

  std::atomic<bool> is_recording_{false};
  std::mutex changes_mutex_;
  std::vector<Change> changes_;
};

}  // namespace elbowroom
