#include "ledger.h"

#include <ATen/MapAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "arena.h"
#include "file_memory.h"
#include "pages.h"
#include "watched_ops.h"

namespace elbowroom {

namespace {

// The highest priority: later allocators of lower priority are refused, and those of equal priority wrap this one.
constexpr uint8_t PRIORITY = 255;

// Smaller blocks are frequent and leave only small holes.
constexpr size_t LEAST_IN_ARENA = 16 << 10;

thread_local Scope* current = nullptr;

// Memory in a mapped file. The file stays mapped until its last part is freed, and what was written to the pages of a part
// would stay in memory as long.
struct MappedPart {
  c10::DataPtr memory;
  size_t nbytes;

  static void discard(void* context) {
    const std::unique_ptr<MappedPart> part(static_cast<MappedPart*>(context));
    discard_pages(reinterpret_cast<uintptr_t>(part->memory.get()), part->nbytes);
  }
};

void free_in_arena(void* address) {
  c10::profiledCPUMemoryReporter().Delete(address);
  Arena::get().free(address);
}

}  // namespace

Ledger& Ledger::get() {
  static auto* ledger = [] {
    auto* made = new Ledger();
    c10::SetCPUAllocator(made, PRIORITY);
    return made;
  }();
  return *ledger;
}

Ledger::Ledger() : below_(c10::GetCPUAllocator()), has_arena_(below_ == c10::GetDefaultCPUAllocator()) {
  static Ledger* self = this;
  pthread_atfork(
      [] {
        self->scopes_mutex_.lock();
        self->blocks_.lock_all();
        for (Scope* each : self->scopes_) each->lock();
      },
      [] { self->unlock_after_fork(); },
      [] {
        // A worker forked inside a step does not belong to it. A step that begins in the child sets its own limit.
        for (Scope* each : self->scopes_) each->set_limit(NO_LIMIT);
        self->unlock_after_fork();
      });
}

void Ledger::unlock_after_fork() {
  for (Scope* each : scopes_) each->unlock();
  blocks_.unlock_all();
  scopes_mutex_.unlock();
}

c10::DataPtr Ledger::allocate(size_t nbytes) { return allocate_at(nbytes, 0); }

c10::DataPtr Ledger::allocate_at(size_t nbytes, size_t misalignment) {
  if (nbytes == 0) return below_->allocate(0);
  const auto size = static_cast<int64_t>(nbytes);
  Scope* const scope = current;
  const int64_t epoch = epoch_.load();
  if (is_in_file(nbytes)) {
    c10::DataPtr memory = allocate_in_file(nbytes + misalignment);
    void* address = static_cast<char*>(memory.get()) + misalignment;
    blocks_.put(address, {std::move(memory), 0, scope, epoch});
    return {address, address, &Ledger::release, c10::Device(c10::DeviceType::CPU)};
  }
  const Scopes scopes = scope == nullptr ? list_scopes(epoch) : Scopes{scope};
  size_t reserved = 0;
  try {
    for (; reserved < scopes.size(); ++reserved) scopes[reserved]->reserve(size);
    c10::DataPtr memory = take(nbytes + misalignment, scope);
    void* address = static_cast<char*>(memory.get()) + misalignment;
    const c10::Device device = memory.device();
    blocks_.put(address, {std::move(memory), size, scope, epoch});
    return {address, address, &Ledger::release, device};
  } catch (...) {
    while (reserved > 0) scopes[--reserved]->remove(size);
    throw;
  }
}

// Allocates a block. If the system refuses memory, the running step frees memory until it succeeds, or throws.
c10::DataPtr Ledger::take(size_t nbytes, Scope* scope) {
  while (true) {
    if (has_arena_ && nbytes >= LEAST_IN_ARENA) {
      if (void* address = Arena::get().allocate(nbytes)) {
        c10::profiledCPUMemoryReporter().New(address, nbytes);  // as PyTorch's own allocator does
        return {address, address, &free_in_arena, c10::Device(c10::DeviceType::CPU)};
      }
    }
    try {
      return take_below(nbytes);
    } catch (const c10::Error&) {
      if (scope == nullptr || !scope->ask_for_memory(static_cast<int64_t>(nbytes))) throw;
    }
  }
}

c10::DataPtr Ledger::take_below(size_t nbytes) {
  try {
    return below_->allocate(nbytes);
  } catch (const c10::Error&) {
    const bool is_trimmed = trim_heap();
    const size_t given_bytes = has_arena_ ? Arena::get().trim(0) : 0;
    if (!is_trimmed && given_bytes == 0) throw;
    return below_->allocate(nbytes);
  }
}

void Ledger::trim(bool everywhere) {
  if (everywhere) trim_heap();
  if (!has_arena_) return;
  uint64_t may_take = 0;
  {
    const std::lock_guard<std::mutex> guard(scopes_mutex_);
    for (const Scope* each : scopes_) may_take += static_cast<uint64_t>(each->count_left());
  }
  Arena& arena = Arena::get();
  arena.forget_peak(arena.get_statistics().live_bytes + may_take);
  if (everywhere) arena.trim(may_take);
}

Ledger::Scopes Ledger::list_scopes(int64_t epoch) {
  Scopes found;
  const std::lock_guard<std::mutex> guard(scopes_mutex_);
  for (Scope* each : scopes_) {
    if (each->epoch() <= epoch) found.push_back(each);
  }
  return found;
}

void Ledger::release(void* address) {
  std::optional<Block> block = get().blocks_.take(address);
  if (!block.has_value()) return;
  block->memory.clear();  // before its bytes are subtracted
  get().remove(block->nbytes, block->scope, block->epoch);
}

void Ledger::remove(int64_t nbytes, Scope* scope, int64_t epoch) {
  if (scope != nullptr) {
    scope->remove(nbytes);
    return;
  }
  for (Scope* each : list_scopes(epoch)) each->remove(nbytes);
}

c10::DeleterFnPtr Ledger::raw_deleter() const { return &Ledger::release; }

void Ledger::copy_data(void* destination, const void* source, size_t count) const {
  default_copy_data(destination, source, count);
}

Scope& Ledger::make_scope() {
  const std::lock_guard<std::mutex> guard(scopes_mutex_);
  auto* scope = new Scope(epoch_.load() + 1);
  scopes_.push_back(scope);
  epoch_.fetch_add(1);
  return *scope;
}

void Ledger::close_scope(Scope& scope) {
  scope.close();
  const std::lock_guard<std::mutex> guard(scopes_mutex_);
  scopes_.erase(std::remove(scopes_.begin(), scopes_.end(), &scope), scopes_.end());
}

Scope* Ledger::enter(Scope* scope) { return std::exchange(current, scope); }

void Ledger::make_room_for(const c10::Storage& storage, Scope& scope) {
  void* address = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  if (address == nullptr || scope.has_external(storage)) return;
  const auto owner = blocks_.find(address);
  const bool is_counted =
      owner.has_value() && (owner->scope == &scope || (owner->scope == nullptr && owner->epoch >= scope.epoch()));
  if (is_counted) return;
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  scope.reserve(nbytes);
  scope.remove(nbytes);
}

bool Ledger::adopt(const c10::Storage& storage, Scope& scope, bool is_input) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  void* address = impl->_mutable_data_ptr_no_checks().get();
  if (address == nullptr || impl->device_type() != c10::DeviceType::CPU) return false;
  const auto owner = blocks_.find(address);
  if (owner.has_value() && owner->scope == &scope) return false;
  if (scope.has_external(storage)) return false;
  // This scope may already count a block that was allocated outside any scope.
  const bool is_counted = owner.has_value() && owner->scope == nullptr && owner->epoch >= scope.epoch();
  // A backward pass reads no new inputs, but gradient buckets that are there.
  const bool is_expected = is_input && !is_counted && is_in_backward_pass() &&
                           scope.find_expected(static_cast<int64_t>(impl->nbytes())) > 0;
  if (is_input && !is_expected) {
    if (is_counted) return false;
    const std::string reader = "an op that reads an input of " + std::to_string(impl->nbytes()) + " bytes";
    const Running running(reader);  // for the message, if there is no room
    return scope.add_input(storage);
  }
  if (owner.has_value()) {
    // A block of another room counts for both rooms until the storage is freed.
    if (owner->scope != nullptr && !owner->scope->is_closed()) {
      scope.add_external(storage);
      return true;
    }
    blocks_.move(address, &scope);
    remove(owner->nbytes, owner->scope, owner->epoch);
    is_counted ? scope.add(owner->nbytes) : scope.add_adopted(owner->nbytes);
    return !is_counted;
  }
  c10::DataPtr& memory = impl->_mutable_data_ptr_no_checks();
  // Mapped, shared, lazily cloned or foreign memory is identified by its context, so it cannot be taken over.
  if (memory.get_context() != address) {
    scope.add_external(storage);
    return true;
  }
  take_over(*impl, scope);
  if (impl->allocator() != nullptr) impl->set_allocator(this);
  scope.add_adopted(static_cast<int64_t>(impl->nbytes()));
  return true;
}

void Ledger::inherit(Scope& scope, Scope& former) {
  int64_t moved_bytes = 0, found_bytes = 0;
  blocks_.visit([&](Block& block) {
    if (block.scope == &former) {
      block.scope = &scope;
      moved_bytes += block.nbytes;
    } else if (block.scope == nullptr && former.epoch() <= block.epoch && block.epoch < scope.epoch()) {
      block.epoch = scope.epoch();
      found_bytes += block.nbytes;
    }
  });
  former.remove(moved_bytes);
  scope.add_adopted(moved_bytes + found_bytes);
}

// Frees a storage's memory by `release`, which subtracts its bytes from the scope.
void Ledger::take_over(c10::StorageImpl& storage, Scope& scope) {
  c10::DataPtr& memory = storage._mutable_data_ptr_no_checks();
  void* address = memory.get();
  c10::DataPtr counted(address, address, &Ledger::release, memory.device());
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  blocks_.put(address, {storage.set_data_ptr(std::move(counted)), nbytes, &scope, epoch_.load()});
}

const c10::StorageImpl* Ledger::find_mapping(c10::StorageImpl& storage, c10::StorageImpl& sliced) {
  const auto maps = [](c10::StorageImpl& each) {
    const at::MapAllocator* const found = at::MapAllocator::fromDataPtr(each._mutable_data_ptr_no_checks());
    return found != nullptr && (found->flags() & (at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM)) == 0;
  };
  if (maps(storage)) return &storage;
  const c10::DataPtr& memory = storage._mutable_data_ptr_no_checks();
  if (memory.get_deleter() != sliced._mutable_data_ptr_no_checks().get_deleter()) return nullptr;
  auto* whole = static_cast<c10::StorageImpl*>(memory.get_context());
  return maps(*whole) ? whole : nullptr;
}

bool Ledger::own_loaded(const c10::Storage& storage, Scope& scope, bool is_mapped) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const c10::DataPtr& memory = impl->_mutable_data_ptr_no_checks();
  const c10::DeleterFnPtr deleter = memory.get_deleter();
  // A NumPy view makes a storage not resizable, but leaves it its allocator.
  if (memory.get() == nullptr || impl->resizable() || impl->allocator() != nullptr) return false;
  if (deleter != &Ledger::release) {
    if (!is_mapped) return false;
    if (blocks_.find(memory.get()).has_value() || !scope.forget_external(storage)) return false;
    auto* part = new MappedPart{c10::DataPtr(), impl->nbytes()};
    c10::DataPtr discarded(memory.get(), part, &MappedPart::discard, memory.device());
    part->memory = impl->set_data_ptr(std::move(discarded));
    take_over(*impl, scope);
  }
  impl->set_allocator(this);
  impl->set_resizable(true);
  return true;
}

}  // namespace elbowroom
