// Matches the saves and needs of a running step against the traces of candidates.
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

// The saves and needs of a trace.
struct Timetable {
  struct Save {
    int64_t tick;
    int64_t storage;
    int64_t nbytes;
    bool is_persistent;  // its storage outlives the step, so that it never moves
  };
  struct Need {
    int64_t tick;
    int64_t save;
  };
  std::vector<Save> saves;
  std::vector<Need> needs;
  int64_t storages = 0;  // number of storages
};
using TimetablePtr = std::shared_ptr<const Timetable>;

// Assigns to saves and needs their ticks in a trace while the step matches one.
//
// Several traces may begin alike. A step that differs from the trace it followed goes on with another trace that has
// matched so far. Saves of equal sizes may come from different ops: if the number of ops before a save differs from the
// trace and equals that of another one, the step follows the other one.
//
// Not synchronized: the owner holds a mutex.
class TraceFollower {
 public:
  // `known`: candidates, the likeliest first; without any, ticks only count. Saves below `least_bytes` match even if
  // their sizes differ, or the tensor is not plain. `watch` counts ops; its `due_ops` is set to the number after which the next save is
  // overdue.
  TraceFollower(std::vector<TimetablePtr> known, int64_t least_bytes, std::shared_ptr<OpWatch> watch);

  // Index of the trace that the step has matched so far; -1 if there is none.
  int64_t followed() const { return followed_; }
  // Tick of the last save or need.
  int64_t tick() const { return tick_; }
  // Returns whether the storage of a save in the followed trace outlives the step.
  bool is_persistent(int64_t save) const;
  // Returns the storage of a save in the followed trace; -1 if there is none.
  int64_t find_storage(int64_t save) const;

  // Returns the tick of the next save if it matches without consulting other traces. `record`: null for tensors that
  // are not plain.
  std::optional<int64_t> expect_save(int64_t index, const StorageRecordPtr& record) const;
  std::optional<int64_t> expect_need(int64_t index, int64_t save) const;

  // Follow another trace if the next save (need) does not match the current one. Return the reason, or "".
  std::string check_save(int64_t index, const StorageRecordPtr& record);
  std::string check_need(int64_t index, int64_t save);
  // Follow another trace that matches so far (`leave`), or none (`stop`). Return whether the step followed one until
  // now.
  bool leave();
  bool stop();

  // Advance over the next save (need), which was checked before. Return its tick.
  int64_t save(int64_t index, const StorageRecordPtr& record);
  int64_t need(int64_t index);

 private:
  const Timetable* find_timetable() const;
  bool has_size(const Timetable::Save& save, int64_t nbytes) const;
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
  // Records by their storages in the trace, bound when saves match.
  std::vector<c10::weak_intrusive_ptr<StorageRecord>> bound_;
};

}  // namespace elbowroom
