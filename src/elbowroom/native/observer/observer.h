// Records the ops of a step as they run, in the thread that started it and in autograd's threads that work for it.
// Nothing in PyTorch behaves otherwise for it: it is a callback of at::RecordFunction, no dispatch mode.
//
// Recorded is what a TorchDispatchMode would be called with: composite ops by what they are made of, and nothing that
// a kernel calls. Of an op under autocast, a function transform or functionalization, what comes out of those.
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "op_record.h"

namespace elbowroom {

// Told of an op that is about to write (true), or has written (false), to watched storages.
using OnWrite = std::function<void(uint32_t op, const std::vector<uint32_t>& storages, bool is_before)>;

class Observer : public std::enable_shared_from_this<Observer> {
 public:
  // How many may observe one thread at the same time.
  static constexpr int MOST = 4;

  Observer(bool tracks_deaths, bool reads_clock) : tracks_deaths_(tracks_deaths), reads_clock_(reads_clock) {}

  // Begin a new log. Throws if it is started already, or if too many observe this thread.
  void start();

  // Throws if it is not started, or was started in another thread.
  void stop();

  // Nobody will ask for the log any more, from whatever thread.
  void abandon();

  bool is_started() const { return is_active_.load(std::memory_order_acquire); }

  std::shared_ptr<StepLog> log() const { return log_; }

  void set_on_write(OnWrite on_write) { on_write_ = std::move(on_write); }

  // A callback cannot raise: the first exception of `on_write` is kept until it is asked for.
  std::exception_ptr take_error();

  // While paused, no op of this thread is recorded by anybody. Calls nest.
  static void pause();
  static void resume();

  // For the callbacks. `above`: the number of the op whose kernel calls this one, which may be another one afterwards.
  bool observes(at::CallbackHandle handle) const;
  uint32_t begin_op(const OpInfo& info, c10::ArrayRef<at::IValue> inputs, uint64_t thread, uint32_t* above);
  void end_op(uint32_t number, c10::ArrayRef<at::IValue> outputs, bool has_raised);

 private:
  void tell(uint32_t op, const std::vector<uint32_t>& storages, bool is_before);
  std::vector<uint32_t> list_watched(uint32_t number);

  const bool tracks_deaths_, reads_clock_;
  std::shared_ptr<StepLog> log_ = std::make_shared<StepLog>();
  OnWrite on_write_;
  std::atomic<bool> is_active_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
  uint64_t thread_ = 0;
  int forks_ = 0;
};

}  // namespace elbowroom
