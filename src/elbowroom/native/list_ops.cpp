#include "list_ops.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace elbowroom {

namespace {

bool is_uniform(const at::Tensor& tensor, const at::Tensor& first) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.device() != first.device()) return false;
  // On other devices kernels for all at once are chosen by what all are.
  return tensor.is_cpu() || (tensor.scalar_type() == first.scalar_type() && tensor.is_contiguous());
}

c10::IValue cut(const c10::IValue& value, size_t begin, size_t end) {
  if (!value.isList() || value.toListRef().empty()) return value;
  const c10::List<c10::IValue> whole = value.toList();
  c10::impl::GenericList part(whole.elementType());
  for (size_t i = begin; i < end; ++i) part.push_back(whole.get(i));
  return part;
}

}  // namespace

std::vector<size_t> find_parts(const OpKind& op, const c10::IValue* arguments, size_t count, int64_t most_bytes) {
  if (!op.is_by_item) return {};
  std::vector<int64_t> nbytes;
  const at::Tensor* first = nullptr;
  for (size_t i = 0; i < count; ++i) {
    if (!arguments[i].isList()) continue;
    const auto items = arguments[i].toListRef();
    if (items.empty()) continue;
    if (nbytes.empty()) nbytes.resize(items.size());
    if (items.size() != nbytes.size()) return {};
    for (size_t item = 0; item < items.size(); ++item) {
      if (!items[item].isTensor()) continue;
      const at::Tensor& tensor = items[item].toTensor();
      if (first == nullptr) first = &tensor;
      if (!first->defined() || !is_uniform(tensor, *first)) return {};
      nbytes[item] += static_cast<int64_t>(tensor.nbytes());
    }
  }
  std::vector<size_t> ends;
  int64_t sum = 0;
  for (size_t item = 0; item < nbytes.size(); ++item) {
    if (sum > 0 && sum + nbytes[item] > most_bytes) {
      ends.push_back(item);
      sum = 0;
    }
    sum += nbytes[item];
  }
  if (!ends.empty()) ends.push_back(nbytes.size());
  return ends;
}

void run_parts(
    torch::jit::Stack& stack, size_t count, const std::vector<size_t>& ends,
    c10::function_ref<void(torch::jit::Stack&)> run) {
  const torch::jit::Stack arguments = torch::jit::pop(stack, count);
  std::vector<c10::List<at::Tensor>> results;
  size_t begin = 0;
  for (const size_t end : ends) {
    torch::jit::Stack part;
    for (const c10::IValue& argument : arguments) part.push_back(cut(argument, begin, end));
    run(part);
    if (begin == 0) results.resize(part.size());
    for (size_t i = 0; i < results.size(); ++i) results[i].append(part[i].toTensorList());
    begin = end;
  }
  for (c10::List<at::Tensor>& each : results) stack.emplace_back(std::move(each));
}

}  // namespace elbowroom
