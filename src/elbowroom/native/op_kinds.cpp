#include "op_kinds.h"

#include <ATen/Context.h>
#include <pthread.h>

#include <mutex>
#include <new>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace elbowroom {

namespace {

std::function<OpKind(const std::string&, const std::string&)> ask;  // NOLINT: set when the extension is loaded
std::shared_mutex mutex;
// Never freed: recordings refer to them. A program may deregister its own ops, so addresses of schemas are reused.
std::unordered_map<const c10::FunctionSchema*, const OpKind*> known;

}  // namespace

namespace {

bool is_by_item(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  const auto has = [&](const char* prefix) { return name.starts_with(prefix); };
  if (!has("aten::_foreach_") && !has("aten::_amp_foreach_") && !has("aten::_fused_ada") && !has("aten::_fused_sgd")) return false;
  const std::string tensors = "Tensor[]";
  for (const c10::Argument& each : schema.returns()) {
    if (each.type()->str() != tensors) return false;
  }
  for (const c10::Argument& each : schema.arguments()) {
    if (each.name() == "scalars" && each.type()->str() == "Tensor") return false;  // one tensor, with a number for each
  }
  return true;
}

}  // namespace

bool OpKind::updates_statistics(const c10::IValue* arguments, size_t count) const {
  if (mean < 0) return false;
  return training < 0 || (training < static_cast<int64_t>(count) && arguments[training].isBool() && arguments[training].toBool());
}

bool OpKind::may_be_replayed(const c10::IValue* arguments, size_t count) const {
  if (!is_replayable) return false;
  if (dropout >= 0) {
    return dropout < static_cast<int64_t>(count) && arguments[dropout].isDouble() && arguments[dropout].toDouble() == 0;
  }
  if (is_convolution && count > 6 && arguments[0].isTensor() && arguments[0].toTensor().is_cuda()) {
    const at::Context& context = at::globalContext();
    // With benchmarking, cuDNN chooses algorithms by timing. A transposed convolution uses the backward algorithms,
    // whose order of additions may vary.
    if (context.benchmarkCuDNN()) return false;
    const bool is_fixed = context.deterministicCuDNN() || context.deterministicAlgorithms();
    return is_fixed || !arguments[6].toBool();
  }
  return true;
}

const OpKind* find_kind(const c10::OperatorHandle& op) {
  if (!op.hasSchema()) return nullptr;
  const c10::FunctionSchema* schema = &op.schema();
  {
    const std::shared_lock<std::shared_mutex> guard(mutex);
    const auto found = known.find(schema);
    if (found != known.end() && found->second->schema == schema->name()) return found->second;
  }
  auto* made = new OpKind(ask(schema->name(), schema->overload_name()));  // calls Python: not under the mutex
  made->schema = schema->name();
  made->is_by_item = is_by_item(*schema);
  const std::unique_lock<std::shared_mutex> guard(mutex);
  return known.insert_or_assign(schema, made).first->second;
}

void set_find_kind(std::function<OpKind(const std::string&, const std::string&)> find) {
  ask = std::move(find);
  // No other thread holds the lock at a fork. The child makes a new one, since the lock's owner has another id there.
  pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { new (&mutex) std::shared_mutex; });
}

}  // namespace elbowroom
