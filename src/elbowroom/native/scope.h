// The live bytes of one room: allocations of its steps, and those of other threads outside any room.
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

// Frees memory. Arguments: requested bytes, and missing bytes within the limit (0 if the system refuses memory). Throws
// on failure; returns false to let the request pass anyway.
using MakeRoom = std::function<bool(int64_t, int64_t)>;

class Scope {
 public:
  // `epoch`: number of scopes including this one. Earlier allocations outside any scope are not counted.
  explicit Scope(int64_t epoch) : epoch_(epoch) {}

  int64_t epoch() const { return epoch_; }
  int64_t live_bytes() const { return bytes_.load(std::memory_order_relaxed); }
  // Bytes of all adopted storages so far.
  int64_t adopted_bytes() const { return adopted_bytes_.load(std::memory_order_relaxed); }
  int64_t peak_bytes() const { return peak_bytes_.load(std::memory_order_relaxed); }
  void reset_peak();
  // Resets the op's peak to the live bytes, and returns these.
  int64_t begin_op();
  int64_t op_peak_bytes() const { return op_peak_bytes_.load(std::memory_order_relaxed); }
  // Returns the peak since the last call.
  int64_t take_recent_peak();

  void set_limit(int64_t nbytes) { limit_bytes_.store(nbytes, std::memory_order_relaxed); }
  int64_t limit_bytes() const { return limit_bytes_.load(std::memory_order_relaxed); }
  void set_make_room(MakeRoom make_room) { make_room_ = std::move(make_room); }
  // Bytes that the running step may still allocate; 0 if no step runs.
  int64_t count_left() const {
    const int64_t limit = limit_bytes();
    return limit >= NO_LIMIT ? 0 : std::max<int64_t>(0, limit - live_bytes());
  }

  // Counts bytes before they are allocated, so that concurrent requests do not get the same room. Propagates exceptions
  // of `make_room`, and then counts nothing.
  void reserve(int64_t nbytes);

  // Frees memory after the system has refused memory for counted bytes. Returns whether to try again. Propagates
  // exceptions of `make_room`.
  bool ask_for_memory(int64_t nbytes);

  void add(int64_t nbytes);
  void add_adopted(int64_t nbytes);
  void remove(int64_t nbytes);

  // Count a storage whose memory is not taken over, until it dies.
  void add_external(const c10::Storage& storage);
  // Leaves the bytes of such a storage counted: its memory is taken over. Returns false if there is none.
  bool forget_external(const c10::Storage& storage);
  // Make room for an input of a step as `reserve` does, and count it until `drop_inputs`. Returns false if another thread
  // has counted it meanwhile. Throws what `make_room` throws, and counts nothing then.
  bool add_input(const c10::Storage& storage);
  void drop_inputs();
  bool has_external(const c10::Storage& storage);

  // Counts this many bytes of storages that are there, but unknown, until they are found. Replaces the last number.
  void expect(int64_t nbytes);
  int64_t expected_bytes() const { return expected_bytes_.load(std::memory_order_relaxed); }
  // Stops counting as many expected bytes, since a storage was found. Returns how many were expected.
  int64_t find_expected(int64_t nbytes);

  // Ends the scope's room. Other rooms may adopt its blocks.
  void close();
  bool is_closed() const { return is_closed_.load(std::memory_order_relaxed); }

  // Around a fork: the child must not inherit a lock that another thread holds.
  void lock();
  void unlock();

  // Starts or stops recording every change of the live bytes.
  void set_recording(bool is_recording);
  std::vector<Change> take_changes();

 private:
  int64_t sweep_external(bool with_inputs = false);
  void note(int64_t live);
  void record(int64_t live);

  const int64_t epoch_;
  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> adopted_bytes_{0};
  std::atomic<int64_t> expected_bytes_{0};
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
