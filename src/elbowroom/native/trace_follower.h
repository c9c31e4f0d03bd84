// Holds what autograd saves and needs in a running step against the traces of the steps that are known.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "op_watch.h"
#include "storage_records.h"

namespace elbowroom {

// What a trace says of the tensors that autograd saves, and of those it needs.
struct Timetable {
  struct Save {
    int64_t tick;
    int64_t storage;
    int64_t nbytes;
    bool is_persistent;  // of a storage that outlives the step: nothing moves it
  };
  struct Need {
    int64_t tick;
    int64_t save;
  };
  std::vector<Save> saves;
  std::vector<Need> needs;
  int64_t storages = 0;  // how many there are
};
using TimetablePtr = std::shared_ptr<const Timetable>;

// Gives saves and needs the ticks they have in a trace, for as long as the step is one that is known.
//
// Several may be known that begin alike. A step that leaves the trace it followed goes on with another one that it has
// been the same as so far. Saves of equal sizes may still come from other ops: where their number is not the trace's, and
// is that of another one, it is the other one.
//
// Not synchronized: who owns it holds a mutex.
class TraceFollower {
 public:
  // `known`: the likeliest first; where there is none, ticks only count. Of storages smaller than `least_bytes` it does not
  // matter whether they are plain. `watch` counts ops, and is told after how many the next save should have come.
  TraceFollower(std::vector<TimetablePtr> known, int64_t least_bytes, std::shared_ptr<OpWatch> watch);

  // Which of the traces the step has been the same as so far; -1 if it is none of them.
  int64_t followed() const { return followed_; }
  // The tick of the last save or need.
  int64_t tick() const { return tick_; }
  // Whether the trace that the step follows has the save of a storage that outlives the step.
  bool is_persistent(int64_t save) const;
  // The storage of a save in the trace that the step follows; -1 if there is none.
  int64_t find_storage(int64_t save) const;

  // The tick of the next save, if it is as expected and no other trace has to be asked. `record`: null of what is no plain
  // tensor.
  std::optional<int64_t> expect_save(int64_t index, const StorageRecordPtr& record) const;
  std::optional<int64_t> expect_need(int64_t index, int64_t save) const;

  // Follow another trace if the step's next save (need) is not the one of the present trace. Returns why, or "".
  std::string check_save(int64_t index, const StorageRecordPtr& record);
  std::string check_need(int64_t index, int64_t save);
  // The step is not the one that it was taken for, or none that is known. Returns whether it was one until now.
  bool leave();
  bool stop();

  // The next save (need), which has been checked, has come. Returns its tick.
  int64_t save(int64_t index, const StorageRecordPtr& record);
  int64_t need(int64_t index);

 private:
  const Timetable* find_timetable() const;
  std::string compare_save(const Timetable& trace, int64_t index, const StorageRecordPtr& record) const;
  bool go_on(const std::function<bool(const Timetable&)>& agrees);
  int64_t find_other(const std::function<bool(const Timetable&)>& agrees) const;
  bool begins_alike(const Timetable& one, const Timetable& other) const;
  int64_t reach(int64_t tick);
  void set_due();

  const std::vector<TimetablePtr> known_;
  const int64_t least_bytes_;
  const std::shared_ptr<OpWatch> watch_;
  bool may_doubt_;
  int64_t followed_;
  int64_t saves_ = 0, needs_ = 0, tick_ = 0;
  // By the storages of the trace, as saves are recognised.
  std::vector<c10::weak_intrusive_ptr<StorageRecord>> bound_;
};

}  // namespace elbowroom
