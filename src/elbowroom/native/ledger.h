// The CPU's allocator: counts every block, and asks for room before it is short. Large blocks lie in an arena, whose
// pages stay close to what is live; small ones, and all if the program has an allocator of its own, come from the
// allocator that was there.
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
  // The one of this process. It is registered at the first call, and stays: its blocks may outlive every room.
  static Ledger& get();

  c10::DataPtr allocate(size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, size_t count) const override;

  // A new scope. It is never destroyed, since blocks refer to it, but may be closed.
  Scope& make_scope();
  void close_scope(Scope& scope);

  // Give back the arena's pages that neither live blocks nor the steps that are running can need, whatever was live
  // before, and with `everywhere` what the C library keeps free.
  void trim(bool everywhere);

  // What this thread allocates belongs to the scope from now on, to every scope if it is null. Returns the one before.
  static Scope* enter(Scope* scope);

  // Count a storage that was there before: until it dies, or until its scope drops its inputs if it is one. Returns
  // whether it was not counted for this scope already.
  bool adopt(const c10::Storage& storage, Scope& scope, bool is_input);
  // Has room made for a storage that is about to be adopted.
  void make_room_for(const c10::Storage& storage, Scope& scope);

 private:
  Ledger();

  static void release(void* address);
  c10::DataPtr take(size_t nbytes, Scope* scope);
  c10::DataPtr take_below(size_t nbytes);
  // The open scopes that count what was allocated in no scope at this epoch.
  using Scopes = c10::SmallVector<Scope*, 4>;
  Scopes list_scopes(int64_t epoch);
  void remove(int64_t nbytes, Scope* scope, int64_t epoch);
  void unlock_after_fork();

  c10::Allocator* below_;
  const bool has_arena_;
  BlockTable blocks_;
  std::mutex scopes_mutex_;
  std::vector<Scope*> scopes_;  // that are open
  std::atomic<int64_t> epoch_{0};
};

}  // namespace elbowroom
