#include "recorded_ops.h"
#include "state_storages.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <set>
#include <optional>
#include <unordered_set>

namespace elbowroom {

namespace {

// Limit on the ops of a recording, to bound the memory and the time of its replay.
constexpr size_t MOST_OPS = 64;

std::optional<Slot> describe_one(const at::Tensor& tensor, StorageTable& table, c10::Device device) {
  if (!is_plain(tensor, device)) return std::nullopt;
  Slot slot;
  slot.record = table.see(tensor.storage());
  slot.record->follow_versions(tensor, table);
  slot.dtype = tensor.scalar_type();
  slot.sizes = tensor.sizes();
  slot.strides = tensor.strides();
  slot.offset = tensor.storage_offset();
  slot.version = slot.record->version;
  slot.unwatched_writes = slot.record->unwatched_writes;
  return slot;
}

// Returns whether PyTorch has wrapped a Python number in this tensor, which is then shared with nothing else.
bool is_number(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

at::Tensor view(const Slot& slot, c10::Storage storage) {
  const auto key = c10::computeDispatchKey(slot.dtype, c10::kStrided, storage.device());
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(slot.dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(slot.sizes, slot.strides, slot.offset);
  return made;
}

// Returns whether what an op read is unchanged.
bool is_unchanged(const Slot& slot) {
  slot.record->find_unwatched_writes();
  return slot.record->version == slot.version && slot.record->unwatched_writes == slot.unwatched_writes;
}

bool is_leaf(const Slot& slot) { return slot.record->is_saved() && is_unchanged(slot); }

bool makes(const RecordedOp& op, const StorageRecord* record) {
  const auto is_it = [&](const RecordedOp::Made& made) { return made.record._unsafe_get_target() == record; };
  return std::any_of(op.results.begin(), op.results.end(), is_it);
}

bool changes(const RecordedOp& op, const StorageRecord* record) {
  const auto is_it = [&](const RecordedOp::Made& made) { return made.record._unsafe_get_target() == record; };
  return std::any_of(op.written.begin(), op.written.end(), is_it);
}

// Peak bytes of a replay, which keeps each result until its last use, and the targets to the end.
int64_t count_bytes(const std::vector<RecordedOpPtr>& ops, const std::set<const StorageRecord*>& targets) {
  std::map<const StorageRecord*, size_t> last;
  for (size_t i = 0; i < ops.size(); ++i) {
    for (const Slot& slot : ops[i]->slots) last[slot.record.get()] = i;
    for (const auto& made : ops[i]->results) last[made.record._unsafe_get_target()] = i;
  }
  std::map<const StorageRecord*, int64_t> live;
  int64_t most = 0, sum = 0;
  for (size_t i = 0; i < ops.size(); ++i) {
    for (const auto& made : ops[i]->results) {
      if (live.emplace(made.record._unsafe_get_target(), made.nbytes).second) sum += made.nbytes;
    }
    most = std::max(most, sum + ops[i]->inner_bytes);
    for (auto each = live.begin(); each != live.end();) {
      if (last[each->first] == i && targets.count(each->first) == 0) {
        sum -= each->second;
        each = live.erase(each);
      } else {
        ++each;
      }
    }
  }
  return most;
}

std::vector<RecordedOpPtr> merge(const std::vector<RecordingPtr>& recordings) {
  std::map<int64_t, RecordedOpPtr> ops;
  for (const RecordingPtr& recording : recordings) {
    for (const RecordedOpPtr& op : recording->ops) ops.emplace(op->place, op);
  }
  std::vector<RecordedOpPtr> merged;
  for (auto& [place, op] : ops) merged.push_back(op);
  return merged;
}

std::set<const StorageRecord*> list_targets(const std::vector<RecordingPtr>& recordings) {
  std::set<const StorageRecord*> targets;
  for (const RecordingPtr& recording : recordings) targets.insert(recording->target.get());
  return targets;
}

}  // namespace

bool is_plain(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.key_set().has(c10::DispatchKey::Python)) return false;
  return is_on(tensor, device) && tensor.layout() == c10::kStrided && tensor.has_storage() &&
      !tensor.is_quantized() && !tensor.is_nested() && !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

RecordedOpPtr describe(
    const c10::OperatorHandle& op, const OpKind& kind, const c10::IValue* arguments, size_t count, StorageTable& table,
    c10::Device device, const std::vector<Source>* kept) {
  auto made = c10::make_intrusive<RecordedOp>(op, kind);
  made->arguments.resize(count);
  made->lengths.resize(count);
  size_t next = 0;  // index among the tensors that it reads
  const bool updates = kind.updates_statistics(arguments, count);
  const auto add = [&](const at::Tensor& tensor, size_t argument, int32_t item) {
    std::optional<Slot> slot = describe_one(tensor, table, device);
    if (!slot.has_value()) return false;
    slot->argument = static_cast<uint32_t>(argument);
    slot->item = item;
    slot->is_read = !updates || (static_cast<int64_t>(argument) != kind.mean && static_cast<int64_t>(argument) != kind.variance);
    Source source = Source::KEPT;
    if (kept == nullptr || !slot->is_read) {
      source = slot->record->is_staying ? Source::KEPT : Source::STEP;
    } else if (next < kept->size()) {
      source = (*kept)[next];
    }
    if (source != Source::STEP) slot->kept = tensor.storage();
    if (source == Source::COMES_BACK) {
      slot->contents = Digest(tensor.storage());
      if (!slot->contents.is_known()) return false;
    }
    next += slot->is_read;
    made->slots.push_back(*std::move(slot));
    return true;
  };
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = arguments[i];
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined() || is_number(tensor)) {
        made->arguments[i] = value;
      } else if (!add(tensor, i, -1)) {
        return {};
      }
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      const auto items = value.toListRef();
      made->lengths[i] = static_cast<uint32_t>(items.size());
      made->arguments[i] = value.isTensorList() ? c10::IValue(c10::List<at::Tensor>())
                                                : c10::IValue(c10::List<std::optional<at::Tensor>>());
      for (size_t item = 0; item < items.size(); ++item) {
        if (items[item].isNone() || !items[item].toTensor().defined()) continue;
        if (!add(items[item].toTensor(), i, static_cast<int32_t>(item))) return {};
      }
    } else if (value.isList()) {
      const auto items = value.toListRef();
      const auto is_simple = [](const c10::IValue& item) { return item.isScalar() || item.isNone() || item.isString(); };
      if (!std::all_of(items.begin(), items.end(), is_simple)) return {};
      made->arguments[i] = value.deepcopy();
    } else if (value.isTuple() || value.isGenericDict() || value.isObject() || value.isPyObject() || value.isStorage()) {
      return {};
    } else {
      made->arguments[i] = value;
    }
  }
  made->settings = read_settings();
  return made;
}

Recording::Recording(std::vector<RecordedOpPtr> candidates, StorageRecordPtr made) : target(std::move(made)) {
  std::unordered_set<StorageRecord*> needed{target.get()};
  std::vector<StorageRecordPtr> order{target};
  for (auto each = candidates.rbegin(); each != candidates.rend(); ++each) {
    const RecordedOp& op = **each;
    const bool is_needed =
        std::any_of(needed.begin(), needed.end(), [&](StorageRecord* record) { return makes(op, record) || changes(op, record); });
    if (!is_needed) continue;
    for (const Slot& slot : op.slots) {
      if (!slot.kept && needed.insert(slot.record.get()).second) order.push_back(slot.record);
    }
    ops.push_back(*each);
  }
  std::reverse(ops.begin(), ops.end());
  for (const StorageRecordPtr& record : order) {
    const auto makes_it = [&](const RecordedOpPtr& op) { return makes(*op, record.get()); };
    if (std::none_of(ops.begin(), ops.end(), makes_it)) leaves.push_back(record);
  }
  for (const RecordedOpPtr& op : ops) {
    seconds += op->seconds;
    for (const Slot& slot : op->slots) {
      if (!slot.kept || !slot.is_read || slot.contents.is_known()) continue;
      if (std::find(sources.begin(), sources.end(), slot.record) != sources.end()) continue;
      sources.push_back(slot.record);
      kept.push_back(slot.kept);
    }
  }
  nbytes = count_bytes(ops, {target.get()});
  for (const auto* records : {&leaves, &sources}) {
    for (const StorageRecordPtr& record : *records) read_bytes += record->nbytes;
  }
}

bool Recording::is_open() const {
  return is_current() && std::all_of(leaves.begin(), leaves.end(), [](const auto& leaf) { return leaf->is_saved(); });
}

bool Recording::starts_from(const Slot& slot) const {
  return slot.kept || std::find(leaves.begin(), leaves.end(), slot.record) != leaves.end();
}

bool Recording::is_current() const {
  target->find_unwatched_writes();
  if (target->unwatched_writes > 0) return false;
  for (const RecordedOpPtr& op : ops) {
    for (const Slot& slot : op->slots) {
      if (!slot.is_read || slot.contents.is_known()) continue;
      if (starts_from(slot) ? !is_unchanged(slot) : slot.unwatched_writes > 0) return false;
    }
  }
  return true;
}

bool Recording::is_intact(const std::vector<StorageRecord*>& copied) const {
  for (const RecordedOpPtr& op : ops) {
    for (const Slot& slot : op->slots) {
      if (!slot.is_read || slot.contents.is_known() || !starts_from(slot)) continue;
      if (std::find(copied.begin(), copied.end(), slot.record.get()) != copied.end()) continue;
      slot.record->find_unwatched_writes();
      if (slot.record->unwatched_writes != slot.unwatched_writes) return false;
    }
  }
  return true;
}

bool Recording::is_back() const {
  const auto is_back = [](const Slot& slot) { return !slot.contents.is_known() || slot.contents.matches(slot.kept); };
  return std::all_of(ops.begin(), ops.end(), [&](const auto& op) {
    return std::all_of(op->slots.begin(), op->slots.end(), is_back);
  });
}

RecordingPtr find_recording(const StorageRecordPtr& target) {
  std::map<int64_t, RecordedOpPtr> ops;
  std::vector<StorageRecordPtr> stack{target};
  std::unordered_set<StorageRecord*> seen{target.get()};
  while (!stack.empty()) {
    const StorageRecordPtr record = std::move(stack.back());
    stack.pop_back();
    record->find_unwatched_writes();
    if (!record->made_by || record->unwatched_writes > 0) return {};
    std::vector<RecordedOpPtr> by{record->made_by};
    by.insert(by.end(), record->changed_by.begin(), record->changed_by.end());
    for (const RecordedOpPtr& op : by) {
      if (ops.count(op->place) > 0) continue;
      if (ops.size() == MOST_OPS) return {};
      ops.emplace(op->place, op);
      for (const Slot& slot : op->slots) {
        if (slot.kept) {
          // The program has written to it since, or its contents may be away when they are needed.
          if (slot.is_read && (!is_unchanged(slot) || slot.contents.is_known())) return {};
          continue;
        }
        if (seen.count(slot.record.get()) > 0 || is_leaf(slot)) continue;
        seen.insert(slot.record.get());
        stack.push_back(slot.record);
      }
    }
  }
  std::vector<RecordedOpPtr> found;
  for (auto& [place, op] : ops) found.push_back(op);
  return c10::make_intrusive<Recording>(std::move(found), target);
}

int64_t count_replay(const std::vector<RecordingPtr>& recordings) {
  return count_bytes(merge(recordings), list_targets(recordings));
}

bool RecordedOp::writes(int64_t argument) const {
  return argument == kind.mean || argument == kind.variance ||
      std::find(kind.written.begin(), kind.written.end(), argument) != kind.written.end();
}

template <typename Find>
std::vector<at::Tensor> RecordedOp::replay(const Find& find) const {
  torch::jit::Stack stack(arguments);
  std::vector<std::vector<std::optional<at::Tensor>>> lists(lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) lists[i].resize(lengths[i]);
  for (const Slot& slot : slots) {
    at::Tensor tensor = find(slot);
    if (slot.item < 0) {
      stack[slot.argument] = std::move(tensor);
    } else {
      lists[slot.argument][static_cast<size_t>(slot.item)] = std::move(tensor);
    }
  }
  for (size_t i = 0; i < lists.size(); ++i) {
    if (lists[i].empty()) continue;
    if (arguments[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (auto& item : lists[i]) list.push_back(item.value_or(at::Tensor()));
      stack[i] = std::move(list);
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (auto& item : lists[i]) list.push_back(std::move(item));
      stack[i] = std::move(list);
    }
  }
  lists.clear();
  {
    const StateUse use(kind, stack.data(), stack.size(), StateUse::Kind::REPLAY);
    op.callBoxed(stack);
  }
  std::vector<at::Tensor> made;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) made.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (tensor.defined()) made.push_back(tensor);
      }
    }
  }
  return made;
}

std::vector<c10::Storage> replay(
    const std::vector<RecordingPtr>& recordings, const std::unordered_map<StorageRecord*, c10::Storage>& leaves) {
  const std::vector<RecordedOpPtr> ops = merge(recordings);
  const std::set<const StorageRecord*> targets = list_targets(recordings);
  std::map<const StorageRecord*, size_t> last_use;
  for (size_t i = 0; i < ops.size(); ++i) {
    for (const Slot& slot : ops[i]->slots) last_use[slot.record.get()] = i;
    for (const auto& made : ops[i]->results) last_use[made.record._unsafe_get_target()] = i;
  }
  std::map<const StorageRecord*, c10::Storage> made;
  const c10::impl::ExcludeDispatchKeyGuard hidden(HIDDEN);
  SettingsGuard settings;
  for (size_t i = 0; i < ops.size(); ++i) {
    const RecordedOp& op = *ops[i];
    settings.change(op.settings);
    const std::vector<at::Tensor> results = op.replay([&](const Slot& slot) {
      const auto own = made.find(slot.record.get());
      const bool is_own = own != made.end();
      const auto leaf = leaves.find(slot.record.get());
      c10::Storage storage = is_own && !slot.kept ? own->second : leaf != leaves.end() ? leaf->second : slot.kept;
      TORCH_CHECK(storage, "a replay reads a storage that is not on the device");
      at::Tensor tensor = view(slot, std::move(storage));
      // A side effect that must not happen twice.
      if (is_own || !op.writes(slot.argument)) return tensor;
      const StateUse use({tensor}, {}, StateUse::Kind::REPLAY);
      return tensor.clone();
    });
    TORCH_CHECK(results.size() == op.results.size(), "a replay of ", op.kind.name, " returned another number of tensors");
    for (size_t each = 0; each < results.size(); ++each) {
      made.emplace(op.results[each].record._unsafe_get_target(), results[each].storage());
    }
    for (auto each = made.begin(); each != made.end();) {
      each = last_use[each->first] == i && targets.count(each->first) == 0 ? made.erase(each) : std::next(each);
    }
  }
  std::vector<c10::Storage> found;
  for (const RecordingPtr& recording : recordings) {
    const auto each = made.find(recording->target.get());
    TORCH_CHECK(each != made.end(), "a replay did not make its target");
    found.push_back(each->second);
  }
  return found;
}

}  // namespace elbowroom
