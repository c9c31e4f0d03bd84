#include "op_info.h"

#include <ATen/record_function.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace elbowroom {

namespace {

// Of every operator seen so far, by the address of its name, which lies in its schema. Never destroyed: ops may run
// while the interpreter exits.
struct Registry {
  std::mutex mutex;
  std::unordered_map<const char*, OpInfo*> infos;
  std::map<std::string, Statistics> statistics;
  std::atomic<uint64_t> generation{1};  // changes when an operator goes: its addresses may be used again

  static Registry& get() {
    static Registry* const registry = new Registry;
    return *registry;
  }
};

class Listener final : public c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}

  void onOperatorDeregistered(const c10::OperatorHandle& handle) override {
    Registry& registry = Registry::get();
    const std::lock_guard lock(registry.mutex);
    for (auto entry = registry.infos.begin(); entry != registry.infos.end();) {
      if (entry->second->is_registered && entry->second->handle == handle) {
        entry->second->is_registered = false;
        entry = registry.infos.erase(entry);
        registry.generation.fetch_add(1);
      } else {
        ++entry;
      }
    }
  }
};

std::string write_name(const c10::OperatorName& name) {
  std::string text = name.name;
  if (const size_t colons = text.find("::"); colons != std::string::npos) text.replace(colons, 2, ".");
  return text + "." + (name.overload_name.empty() ? "default" : name.overload_name);
}

bool may_multiply(const std::string& name) {
  for (const char* part : {"mm", "mv", "matmul", "conv", "rnn", "lstm", "gru", "linear", "attention", "dot", "ger", "addr"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

const OpInfo* look_up(const at::RecordFunction& event) {
  Registry& registry = Registry::get();
  {
    const std::lock_guard lock(registry.mutex);
    if (const auto found = registry.infos.find(event.name()); found != registry.infos.end()) return found->second;
  }
  const std::optional<c10::OperatorName> name = event.operator_name();
  if (!name.has_value()) return nullptr;
  static const auto* const listening =
      new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));
  static_cast<void>(listening);
  const std::optional<c10::OperatorHandle> handle = c10::Dispatcher::singleton().findSchema(*name);
  if (!handle.has_value()) return nullptr;
  auto made = std::make_unique<OpInfo>(*handle);
  const std::lock_guard lock(registry.mutex);
  if (const auto found = registry.statistics.find(name->name); found != registry.statistics.end()) {
    made->statistics = found->second;
  }
  const auto [entry, is_new] = registry.infos.emplace(handle->schema().name().c_str(), made.get());
  if (is_new) static_cast<void>(made.release());
  return entry->second;
}

}  // namespace

OpInfo::OpInfo(const c10::OperatorHandle& handle)
    : handle(handle),
      name(write_name(handle.operator_name())),
      argument_count(handle.schema().arguments().size()),
      return_count(handle.schema().returns().size()),
      is_aten(name.starts_with("aten.")),
      is_only_autograds(name == "aten.detach_.default"),
      multiplies(!is_aten || may_multiply(name)),
      known_{ask_dispatcher(c10::DispatchKey::AutogradCPU), ask_dispatcher(c10::DispatchKey::AutogradCUDA)} {
  const auto& arguments = handle.schema().arguments();
  for (size_t position = 0; position < arguments.size() && position < 64; ++position) {
    const c10::AliasInfo* alias = arguments[position].alias_info();
    if (alias != nullptr && alias->isWrite()) written |= uint64_t{1} << position;
  }
}

AutogradKernel OpInfo::find_autograd_kernel(c10::DispatchKey autograd_key) const {
  if (is_aten && autograd_key == c10::DispatchKey::AutogradCPU) return known_[0];
  if (is_aten && autograd_key == c10::DispatchKey::AutogradCUDA) return known_[1];
  return ask_dispatcher(autograd_key);  // the kernels of other operators may be registered at any time
}

// By the rules of the dispatcher (OperatorEntry::computeDispatchTableEntryWithDebug).
AutogradKernel OpInfo::ask_dispatcher(c10::DispatchKey autograd_key) const {
  using c10::DispatchKey;
  if (handle.hasKernelForDispatchKey(autograd_key)) {
    return handle.isKernelFallthroughKernel(autograd_key) ? AutogradKernel::NONE : AutogradKernel::OWN;
  }
  const bool has_backend = handle.hasKernelForAnyDispatchKey(c10::getBackendKeySetFromAutograd(autograd_key)) ||
      handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
  if (!has_backend) {
    const bool is_nested = autograd_key == DispatchKey::AutogradNestedTensor &&
        handle.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutogradNestedTensor);
    if (is_nested || handle.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) {
      return AutogradKernel::COMPOSITE;
    }
  }
  const bool has_own = handle.hasKernelForDispatchKey(DispatchKey::Autograd) &&
      !handle.isKernelFallthroughKernel(DispatchKey::Autograd);
  return has_own ? AutogradKernel::OWN : AutogradKernel::NONE;
}

void set_statistics(std::map<std::string, Statistics> statistics) {
  Registry& registry = Registry::get();
  const std::lock_guard lock(registry.mutex);
  registry.statistics = std::move(statistics);
  for (const auto& [address, info] : registry.infos) {
    const auto found = registry.statistics.find(info->handle.operator_name().name);
    if (found != registry.statistics.end()) info->statistics = found->second;
  }
}

const OpInfo* find_op_info(const at::RecordFunction& event) {
  // Direct-mapped, a thread: almost every event is found here.
  struct Known {
    const char* name;
    uint64_t generation;
    const OpInfo* info;
  };
  static thread_local std::array<Known, 512> table{};
  const char* name = event.name();
  const uint64_t generation = Registry::get().generation.load(std::memory_order_acquire);
  Known& known = table[(reinterpret_cast<uintptr_t>(name) >> 4) % table.size()];
  if (known.name == name && known.generation == generation) return known.info;
  const OpInfo* info = look_up(event);
  if (info != nullptr) known = Known{name, generation, info};
  return info;
}

}  // namespace elbowroom
