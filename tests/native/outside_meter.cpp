// A meter that is not ours: stands before whatever CPU allocator is registered, and counts what it hands out.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

c10::Allocator* below = nullptr;
std::mutex mutex;
auto* const sizes = new std::unordered_map<void*, int64_t>();
int64_t live_bytes = 0, peak_bytes = 0;
int64_t requests_left = -1, failures_left = 0;  // until some fail, and how many; negative: none does
bool is_failed = false;

void release(void* address) {
  if (address == nullptr) return;
  {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = sizes->find(address);
    live_bytes -= found->second;
    sizes->erase(found);
  }
  below->raw_deallocate(address);
}

struct Meter final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    {
      const std::lock_guard<std::mutex> guard(mutex);
      const bool fails = requests_left == 0 && failures_left-- > 0;
      is_failed |= fails;
      TORCH_CHECK(!fails, "no memory, by bad luck");
      if (requests_left > 0) --requests_left;
    }
    void* const address = below->allocate(nbytes).release_context();
    if (address == nullptr) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    const std::lock_guard<std::mutex> guard(mutex);
    sizes->emplace(address, static_cast<int64_t>(nbytes));
    live_bytes += static_cast<int64_t>(nbytes);
    peak_bytes = std::max(peak_bytes, live_bytes);
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* destination, const void* source, size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

Meter meter;

}  // namespace

extern "C" {

void register_meter() {
  below = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&meter, 255);
}

// What is there now is where the peak begins.
int64_t reset_peak() {
  const std::lock_guard<std::mutex> guard(mutex);
  return peak_bytes = live_bytes;
}

// So many requests fail after so many that do not. Returns whether one has failed since the last call.
bool fail_after(int64_t requests, int64_t failures) {
  const std::lock_guard<std::mutex> guard(mutex);
  const bool has_failed = is_failed;
  is_failed = false;
  requests_left = requests;
  failures_left = failures;
  return has_failed;
}

int64_t read_peak() {
  const std::lock_guard<std::mutex> guard(mutex);
  return peak_bytes;
}

}
