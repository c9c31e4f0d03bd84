// CPU allocator that counts every block, and calls `make_room` before a request would exceed a limit. Large blocks come
// from an arena whose mapped bytes stay close to the live bytes; small ones, and all if the program has its own
// allocator, from the previous allocator.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "block_table.h"
#include "scope.h"

namespace elbowroom {

class Ledger final : public c10::Allocator {
 public:
  // The ledger of this process. The first call registers it, permanently: its blocks may outlive every room.
  static Ledger& get();

  c10::DataPtr allocate(size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, size_t count) const override;

  // Makes a scope. It can be closed but is never destroyed, since blocks refer to it.
  Scope& make_scope();
  void close_scope(Scope& scope);

  // Allocates as `allocate` does, at an address that is this many bytes beyond an aligned one.
  c10::DataPtr allocate_at(size_t nbytes, size_t misalignment);

  // Unmaps the arena's pages that neither live blocks nor running steps can need, regardless of earlier peaks. With
  // `everywhere`, without any headroom, and returns the C library's free memory, too.
  void trim(bool everywhere);

  // Makes a scope (null: every scope) count this thread's allocations. Returns the previous scope.
  static Scope* enter(Scope* scope);

  // Count a storage that was there before until it dies. Room is made for an input of a step as for an allocation, and it
  // counts until its scope drops its inputs. Returns whether the storage was not counted for this scope already.
  bool adopt(const c10::Storage& storage, Scope& scope, bool is_input);
  // Lets an adopted storage give up memory that was loaded from a file for it alone. `is_mapped`: whether that lies in a
  // private mapping of a file. Returns false if others may use the memory.
  bool own_loaded(const c10::Storage& storage, Scope& scope, bool is_mapped);
  // Returns the storage that maps the file in which a storage lies: itself, or that which it is a slice of, as `sliced` is
  // one of another storage. Null if there is none, or if the file receives what is written.
  static const c10::StorageImpl* find_mapping(c10::StorageImpl& storage, c10::StorageImpl& sliced);
  // Counts what a closed scope has counted, or would have since, and what is still there.
  void inherit(Scope& scope, Scope& former);
  // Has room made for a storage that is about to be adopted.
  void make_room_for(const c10::Storage& storage, Scope& scope);

 private:
  Ledger();

  static void release(void* address);
  void take_over(c10::StorageImpl& storage, Scope& scope);
  c10::DataPtr take(size_t nbytes, Scope* scope);
  c10::DataPtr take_below(size_t nbytes);
  // The open scopes that count allocations outside any scope at this epoch.
  using Scopes = c10::SmallVector<Scope*, 4>;
  Scopes list_scopes(int64_t epoch);
  void remove(int64_t nbytes, Scope* scope, int64_t epoch);
  void unlock_after_fork();

  c10::Allocator* below_;
  const bool has_arena_;
  BlockTable blocks_;
  std::mutex scopes_mutex_;
  std::vector<Scope*> scopes_;  // open scopes
  std::atomic<int64_t> epoch_{0};
};

}  // namespace elbowroom
