// The live blocks of the ledger, by address.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace elbowroom {

class Scope;

struct Block {
  c10::DataPtr memory;  // from the allocator below
  int64_t nbytes = 0;
  Scope* scope = nullptr;  // null if the allocating thread was in no scope
  int64_t epoch = 0;       // number of scopes made before the allocation
};

// Sharded over several locks, since threads allocate concurrently.
class BlockTable {
 public:
  void put(void* address, Block block) {
    Shard& shard = find_shard(address);
    const std::lock_guard<std::mutex> guard(shard.mutex);
    const bool is_new = shard.blocks.emplace(address, std::move(block)).second;
    TORCH_INTERNAL_ASSERT(is_new, "a block was handed out twice");
  }

  std::optional<Block> take(void* address) {
    Shard& shard = find_shard(address);
    const std::lock_guard<std::mutex> guard(shard.mutex);
    const auto found = shard.blocks.find(address);
    if (found == shard.blocks.end()) return std::nullopt;
    std::optional<Block> block(std::move(found->second));
    shard.blocks.erase(found);
    return block;
  }

  // A block without its memory.
  struct Owner {
    int64_t nbytes;
    Scope* scope;
    int64_t epoch;
  };

  // Returns the owner of a block, if there is such a block.
  std::optional<Owner> find(void* address) {
    Shard& shard = find_shard(address);
    const std::lock_guard<std::mutex> guard(shard.mutex);
    const auto found = shard.blocks.find(address);
    if (found == shard.blocks.end()) return std::nullopt;
    return Owner{found->second.nbytes, found->second.scope, found->second.epoch};
  }

  // Moves an existing block to another scope.
  void move(void* address, Scope* scope) {
    Shard& shard = find_shard(address);
    const std::lock_guard<std::mutex> guard(shard.mutex);
    shard.blocks.at(address).scope = scope;
  }

  // Calls a function with each block.
  template <typename Visit>
  void visit(const Visit& visit) {
    for (Shard& shard : shards_) {
      const std::lock_guard<std::mutex> guard(shard.mutex);
      for (auto& [address, block] : shard.blocks) visit(block);
    }
  }

  // Around a fork: the child must not inherit a lock that another thread holds.
  void lock_all() {
    for (Shard& shard : shards_) shard.mutex.lock();
  }
  void unlock_all() {
    for (Shard& shard : shards_) shard.mutex.unlock();
  }

 private:
  struct Shard {
    std::mutex mutex;
    std::unordered_map<void*, Block> blocks;
  };

  Shard& find_shard(void* address) {
    // Blocks are at least 64 bytes apart.
    const auto bits = reinterpret_cast<uintptr_t>(address) >> 6;
    return shards_[(bits ^ (bits >> 9)) % shards_.size()];
  }

  std::array<Shard, 64> shards_;
};

}  // namespace elbowroom
