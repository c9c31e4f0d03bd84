// Storages of model state (parameters, gradients, buffers, optimizer state), whose bytes may leave memory.
//
// A storage that is away keeps its `StorageImpl`, its size and all its tensors. PyTorch raises an error where its memory is
// accessed. An op restores what it reads or writes before its kernel runs, and pins it until the kernel has ended. Ops of
// watched threads do so at the watchers' dispatch key, all others by a callback of PyTorch's `RecordFunction`.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "op_kinds.h"

namespace elbowroom {

class StateTable;

// For what null addresses are shown: a profiler of Python, or other callbacks of `RecordFunction`.
enum class Shown { TO_PROFILER, TO_CALLBACKS };

// One storage. All fields but the atomic ones are guarded by the mutex of all tables.
class StateStorage final : public c10::intrusive_ptr_target {
 public:
  StateStorage(const c10::Storage& storage, std::weak_ptr<StateTable> owner);

  // Called before the contents are copied: from now on, writes are noted. Returns false if an op uses the storage, which
  // may be writing to it.
  bool begin_copy();
  // Frees the memory, whose contents the caller has copied. Returns false, and does nothing, if an op may use the storage,
  // has written to it since `is_written` was cleared, or the storage is gone.
  bool empty();
  // Whether no op uses the storage.
  bool is_idle() const;
  // Takes over the memory of another storage, which has none from then on.
  void refill(const c10::Storage& contents);
  // Whether a table made the record.
  bool belongs_to(const StateTable& table) const;

  const c10::StorageImpl* const key;
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::atomic<int64_t> nbytes;
  const std::weak_ptr<StateTable> owner;
  const size_t misalignment;  // of the memory, which comes back as it was: kernels choose their order of adding by it
  std::atomic<bool> is_away{false};
  std::atomic<bool> is_written{true};  // since it was copied
  std::atomic<int64_t> last_use{-1};   // event of all steps
  int64_t pins = 0;
  bool is_staying = false;  // code that runs beside the program may use it at any time
  int64_t order = -1;       // in which storages became free to leave whenever room is short; -1 if this one is not
  std::vector<int64_t> uses, former_uses;  // events of this step, and of the one before
};
using StateStoragePtr = c10::intrusive_ptr<StateStorage>;

// The storages of one room.
class StateTable : public std::enable_shared_from_this<StateTable> {
 public:
  // Called before an op that uses a storage that is away.
  using Restore = std::function<void(const StateStoragePtr&)>;
  // Called before an op that has to come after those that wait.
  using RunWaiting = std::function<void()>;

  StateTable(Restore restore, RunWaiting run_waiting);
  ~StateTable();

  // A tensor whose bytes are away from the beginning, and its record.
  std::pair<at::Tensor, StateStoragePtr> make_away(
      at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType type, c10::Device device, int64_t nbytes);
  // The record of a storage, made if there is none. Null if the storage belongs to another table. A storage that has been
  // resized has another size from then on. `is_movable`: whether `choose` may choose it from now on.
  StateStoragePtr add(const c10::Storage& storage, bool is_movable = false);
  // Whether a storage has no record, or one that `choose` may not choose.
  bool is_unknown(const c10::StorageImpl* storage) const;
  // Has `choose` not choose a storage any more.
  static void forbid(StateStorage& storage);
  // Movable storages that no op uses, of `missing_bytes` if there are as many. What is used last comes first, and nothing
  // that is used within `least_distance` events.
  std::vector<StateStoragePtr> choose(int64_t missing_bytes, int64_t least_distance) const;
  int64_t count_away() const;  // bytes, of storages that are still in use
  StateStoragePtr find(const c10::StorageImpl* storage) const;
  std::vector<StateStoragePtr> list() const;
  // Forgets the storages that are gone, and returns their records.
  std::vector<StateStoragePtr> sweep();
  void clear();
  // Counts uses from 0.
  void begin_step();
  // Notes what ops read and write that wait, to run in slices together. Whatever writes to what they read, or uses what
  // they write, has them run first, except in the code that runs them.
  void note_waiting(std::vector<const c10::StorageImpl*> read, std::vector<const c10::StorageImpl*> written);
  // Why what waits can never run: its arguments were overwritten. Empty if it can.
  std::string lost_waiting() const;
  // Has ops of all tables that wait never run if they read what is written.
  static void lose_waiting(at::TensorList written, const std::string& why);

  // An event is an op that uses storages of the table. Events count from the beginning of the step.
  int64_t events() const { return events_.load(); }
  int64_t former_events() const { return former_events_; }

  // Of state that an op over lists uses at a time. For all tables.
  static void set_most_bytes(int64_t nbytes) { most_bytes = nbytes; }
  static int64_t get_most_bytes() { return most_bytes; }

  // Sets whether what is away shows a null address to whatever asks for one, where it would raise an error. For all tables.
  static void show_addresses(bool shows, Shown reason);

  // Sets whether ops note what they use although nothing is managed yet, so that it can be from any op on.
  void watch_uses(bool watches);
  // Whether ops note what they use.
  static bool is_any_managed() { return managed.load(std::memory_order_relaxed) > 0; }

 private:
  friend class StateUse;

  static inline std::atomic<int64_t> managed{0};  // storages of all tables, and tables that watch uses
  static inline std::atomic<int64_t> most_bytes{int64_t{1} << 60};

  const Restore restore_;
  const RunWaiting run_waiting_;
  std::atomic<int64_t> events_{0}, clock_{0};
  int64_t orders_ = 0;
  int64_t former_events_ = 0;
  std::atomic<bool> watches_uses_{false};
  std::string lost_waiting_;
};

// Have the ops of all threads restore and pin what they use for as long as there is managed state; to be called where that
// may have changed.
void watch_all_threads();
bool is_watching_all_threads();

// Shows null addresses while this thread has other callbacks of `RecordFunction` than ours: they come before an op's state
// is brought back, and may ask for its address.
void show_to_callbacks();

// While an op runs: what it uses is in memory, and stays there.
class StateUse {
 public:
  enum class Kind {
    STEP,    // an op of the program: an event
    OTHER,   // an op that nobody watches, or an access without an op: no event
    REPLAY,  // an op of ours, which writes to nothing that it has not made: no event
    SLICED,  // an op of the program that runs in slices, and reads and writes what is away where it is: an event
  };

  // Of what is added, from `begin` on.
  StateUse() = default;
  StateUse(const OpKind& op, const c10::IValue* arguments, size_t count, Kind kind = Kind::STEP);
  // Of code that reads and writes these tensors.
  StateUse(at::TensorList read, at::TensorList written, Kind kind = Kind::STEP);
  // Of one storage, without an op.
  StateUse(const StateStoragePtr& storage, bool is_written);
  StateUse(const StateUse&) = delete;
  StateUse& operator=(const StateUse&) = delete;

  void add(const at::Tensor& tensor);
  // Brings back what was added, of which the op writes to `written`.
  void begin(at::TensorList written, Kind kind = Kind::STEP);

  struct Pins {
    Pins() = default;
    Pins(const Pins&) = delete;
    Pins& operator=(const Pins&) = delete;
    ~Pins();
    std::thread::id thread;
    c10::SmallVector<StateStoragePtr, 4> storages;
    c10::SmallVector<const c10::StorageImpl*, 8> used;  // by an op, whether there are records of them or not
  };

 private:
  void start(at::TensorList written, Kind kind);
  // Finds the tables whose ops have to run before one that uses and writes to these. With the mutex.
  void find_waiting(c10::ArrayRef<const c10::StorageImpl*> used, c10::ArrayRef<const c10::StorageImpl*> written);
  void pin(const StateStoragePtr& storage);
  void restore(Kind kind);

  Pins pins_;
  c10::SmallVector<std::shared_ptr<StateTable>, 1> waiting_;  // tables whose ops that wait have to run first
};

// The record of a storage, of whatever table. Null if there is none.
StateStoragePtr find_state(const c10::StorageImpl* storage);

// Brings tensors back, and keeps them in memory from now on: what uses them does not tell.
void keep_in_memory(at::TensorList tensors);

// The bytes of what an op would have brought back.
int64_t count_away_bytes(const c10::IValue* arguments, size_t count);

// Uses by other threads than the calling one: all so far, and those that have not ended.
struct UsesElsewhere {
  int64_t begun, running;
};
UsesElsewhere count_uses_elsewhere();

}  // namespace elbowroom
