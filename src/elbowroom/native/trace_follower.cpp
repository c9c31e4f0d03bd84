#include "trace_follower.h"

#include <algorithm>
#include <utility>

namespace elbowroom {

namespace {

// Number of ops by which a save may be later than in the trace, since programs sometimes compute metrics.
constexpr int64_t SLACK_OPS = 64;

std::string compare_need(const Timetable& trace, int64_t index, int64_t save) {
  if (index >= static_cast<int64_t>(trace.needs.size())) return "it asks for saved tensors again";
  const int64_t expected = trace.needs[index].save;
  if (expected == save) return "";
  return "need " + std::to_string(index) + " is of save " + std::to_string(save) + ", where the trace has save " +
      std::to_string(expected);
}

}  // namespace

TraceFollower::TraceFollower(std::vector<TimetablePtr> known, int64_t least_bytes, std::shared_ptr<OpWatch> watch)
    : known_(std::move(known)),
      least_bytes_(least_bytes),
      watch_(std::move(watch)),
      may_doubt_(known_.size() > 1),
      followed_(known_.empty() ? -1 : 0) {
  int64_t storages = 0;
  for (const TimetablePtr& each : known_) storages = std::max(storages, each->storages);
  bound_.resize(static_cast<size_t>(storages), c10::weak_intrusive_ptr<StorageRecord>(StorageRecordPtr()));
  set_due();
}

const Timetable* TraceFollower::find_timetable() const { return followed_ < 0 ? nullptr : known_[followed_].get(); }

bool TraceFollower::is_persistent(int64_t save) const {
  const Timetable* trace = find_timetable();
  return trace != nullptr && save < static_cast<int64_t>(trace->saves.size()) && trace->saves[save].is_persistent;
}

int64_t TraceFollower::find_storage(int64_t save) const {
  const Timetable* trace = find_timetable();
  return trace != nullptr && save < static_cast<int64_t>(trace->saves.size()) ? trace->saves[save].storage : -1;
}

std::optional<int64_t> TraceFollower::expect_save(int64_t index, const StorageRecordPtr& record) const {
  const Timetable* trace = find_timetable();
  if (trace == nullptr) return index;
  if (!compare_save(*trace, index, record).empty()) return std::nullopt;
  const int64_t tick = trace->saves[index].tick;
  if (may_doubt_ && tick != watch_->ops() + index + needs_) return std::nullopt;
  return tick;
}

std::optional<int64_t> TraceFollower::expect_need(int64_t index, int64_t save) const {
  const Timetable* trace = find_timetable();
  if (trace == nullptr) return index;
  if (!compare_need(*trace, index, save).empty()) return std::nullopt;
  return trace->needs[index].tick;
}

std::string TraceFollower::check_save(int64_t index, const StorageRecordPtr& record) {
  const Timetable* trace = find_timetable();
  if (trace == nullptr) return "";
  const auto agrees = [&](const Timetable& other) { return compare_save(other, index, record).empty(); };
  if (std::string why = compare_save(*trace, index, record); !why.empty()) {
    go_on(agrees);
    return why;
  }
  const int64_t expected = trace->saves[index].tick, tick = watch_->ops() + index + needs_;
  if (!may_doubt_ || expected == tick) return "";
  const int64_t other = find_other([&](const Timetable& each) { return agrees(each) && each.saves[index].tick == tick; });
  if (other < 0) {
    may_doubt_ = false;  // the number of ops differs from every trace
    return "";
  }
  followed_ = other;
  return "save " + std::to_string(index) + " comes at tick " + std::to_string(tick) + ", where the trace has it at " +
      std::to_string(expected);
}

std::string TraceFollower::check_need(int64_t index, int64_t save) {
  const Timetable* trace = find_timetable();
  std::string why = trace == nullptr ? "" : compare_need(*trace, index, save);
  if (!why.empty()) go_on([&](const Timetable& other) { return compare_need(other, index, save).empty(); });
  return why;
}

bool TraceFollower::leave() {
  return go_on([](const Timetable&) { return true; });  // later saves and needs tell traces that begin alike apart
}

bool TraceFollower::stop() {
  return go_on([](const Timetable&) { return false; });
}

int64_t TraceFollower::save(int64_t index, const StorageRecordPtr& record) {
  saves_ = index + 1;
  const Timetable* trace = find_timetable();
  if (trace == nullptr) return index;
  const Timetable::Save& expected = trace->saves[index];
  if (record && record->id < 0 && !expected.is_persistent) {
    record->id = expected.storage;
    bound_.at(static_cast<size_t>(expected.storage)) = c10::weak_intrusive_ptr<StorageRecord>(record);
  }
  return reach(expected.tick);
}

int64_t TraceFollower::need(int64_t index) {
  needs_ = index + 1;
  const Timetable* trace = find_timetable();
  return trace == nullptr ? index : reach(trace->needs[index].tick);
}

int64_t TraceFollower::reach(int64_t tick) {
  tick_ = tick;
  set_due();
  return tick;
}

// Sets the number of ops after which the next save is overdue; `NEVER` if a need comes first, or no save follows.
void TraceFollower::set_due() {
  const Timetable* trace = find_timetable();
  const size_t save = static_cast<size_t>(saves_), need = static_cast<size_t>(needs_);
  int64_t due = OpWatch::NEVER;
  if (trace != nullptr && save < trace->saves.size()) {
    const int64_t tick = trace->saves[save].tick;
    const bool needs_first = need < trace->needs.size() && trace->needs[need].tick < tick;
    if (!needs_first) due = tick - saves_ - needs_ + SLACK_OPS;
  }
  watch_->due_ops.store(due, std::memory_order_relaxed);
}

// Returns whether a save may have so many bytes. What never moves may differ: a detector saves a few bytes for each box.
bool TraceFollower::has_size(const Timetable::Save& save, int64_t nbytes) const {
  return save.nbytes == nbytes || std::max(save.nbytes, nbytes) < least_bytes_;
}

std::string TraceFollower::compare_save(const Timetable& trace, int64_t index, const StorageRecordPtr& record) const {
  const auto name = [&] { return "save " + std::to_string(index); };
  if (index >= static_cast<int64_t>(trace.saves.size())) return "it saves more than " + std::to_string(index) + " tensors";
  const Timetable::Save& expected = trace.saves[index];
  if (expected.is_persistent && expected.nbytes == 0) return "";  // of FSDP, which frees it meanwhile
  if (!record) {  // ignored for small tensors: on CUDA, attention's seed is on the host
    if (expected.nbytes < least_bytes_) return "";
    return name() + " is no plain tensor, where the trace has " + std::to_string(expected.nbytes) + " bytes";
  }
  if (!has_size(expected, record->nbytes)) {
    return name() + " has " + std::to_string(record->nbytes) + " bytes, where the trace has " +
        std::to_string(expected.nbytes);
  }
  StorageRecordPtr bound = expected.storage < 0 ? StorageRecordPtr() : bound_.at(static_cast<size_t>(expected.storage)).lock();
  if (bound && bound->id != expected.storage) bound.reset();  // autograd has released it since
  if (bound != record && (bound || (record->id != -1 && record->id != expected.storage))) {
    return name() + " is of another storage than in the trace";
  }
  return "";
}

// Follows another trace that matches so far and `agrees`, or none.
bool TraceFollower::go_on(const std::function<bool(const Timetable&)>& agrees) {
  if (followed_ < 0) return false;
  followed_ = find_other(agrees);
  set_due();
  return true;
}

int64_t TraceFollower::find_other(const std::function<bool(const Timetable&)>& agrees) const {
  for (size_t other = 0; other < known_.size(); ++other) {
    const Timetable& trace = *known_[other];
    if (static_cast<int64_t>(other) != followed_ && agrees(trace) && begins_alike(*known_[followed_], trace)) {
      return static_cast<int64_t>(other);
    }
  }
  return -1;
}

// Returns whether two traces have the same saves and needs as far as the step has run.
bool TraceFollower::begins_alike(const Timetable& one, const Timetable& other) const {
  const size_t saves = static_cast<size_t>(saves_), needs = static_cast<size_t>(needs_);
  if (saves > other.saves.size() || needs > other.needs.size()) return false;
  for (size_t i = 0; i < saves; ++i) {
    const Timetable::Save &mine = one.saves[i], &its = other.saves[i];
    if (mine.tick != its.tick || mine.storage != its.storage || !has_size(mine, its.nbytes)) return false;
  }
  for (size_t i = 0; i < needs; ++i) {
    if (one.needs[i].tick != other.needs[i].tick || one.needs[i].save != other.needs[i].save) return false;
  }
  return true;
}

}  // namespace elbowroom
