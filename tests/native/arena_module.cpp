// A module of the arena alone, and PyTorch's CPU allocator on top of it: for tests and benchmarks.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pybind11/pybind11.h>

#include <atomic>

#include "arena.h"

namespace elbowroom {

void bind_arena(pybind11::module_& module);

namespace {

constexpr size_t LEAST_BLOCK_BYTES = size_t{1} << 14;

// Blocks of 16 KiB and more are the arena's, if it has room; the others come from the allocator that was there before.
class ArenaAllocator final : public c10::Allocator {
 public:
  static ArenaAllocator& get() {
    static auto* const allocator = new ArenaAllocator();
    return *allocator;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    void* const block = nbytes < LEAST_BLOCK_BYTES || !is_used ? nullptr : Arena::get().allocate(nbytes);
    if (block != nullptr) return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
    c10::DataPtr memory = below_->allocate(nbytes);
    void* const address = memory.release_context();
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }

  std::atomic<bool> is_used = true;

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* destination, const void* source, size_t count) const override {
    default_copy_data(destination, source, count);
  }

 private:
  ArenaAllocator() : below_(c10::GetCPUAllocator()) {}

  static void release(void* address) {
    if (address != nullptr && !Arena::get().free(address)) get().below_->raw_deallocate(address);
  }

  c10::Allocator* below_;
};

}  // namespace

}  // namespace elbowroom

PYBIND11_MODULE(_arena_for_tests, module) {
  elbowroom::bind_arena(module);
  module.def(
      "use_arena",
      [](bool is_used) {
        elbowroom::ArenaAllocator::get().is_used = is_used;
        c10::SetCPUAllocator(&elbowroom::ArenaAllocator::get(), 200);
      },
      pybind11::arg("is_used") = true, "Blocks come from the arena from now on, or no longer.");
}
