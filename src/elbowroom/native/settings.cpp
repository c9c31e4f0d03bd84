#include "settings.h"

#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace elbowroom {

namespace {

constexpr std::array<std::pair<at::Float32Backend, at::Float32Op>, 6> PRECISIONS = {{
    {at::Float32Backend::MKLDNN, at::Float32Op::MATMUL},
    {at::Float32Backend::MKLDNN, at::Float32Op::CONV},
    {at::Float32Backend::MKLDNN, at::Float32Op::RNN},
    {at::Float32Backend::CUDA, at::Float32Op::MATMUL},
    {at::Float32Backend::CUDA, at::Float32Op::CONV},
    {at::Float32Backend::CUDA, at::Float32Op::RNN},
}};

}  // namespace

Settings read_settings() {
  static const bool has_cuda = at::Context::hasCUDA();
  const at::Context& context = at::globalContext();
  Settings found{};
  found.grad = c10::GradMode::is_enabled();
  found.deterministic = context.deterministicAlgorithms();
  found.warn_only = context.deterministicAlgorithmsWarnOnly();
  found.mkldnn = context.userEnabledMkldnn();
  found.mkldnn_deterministic = context.deterministicMkldnn();
  found.nnpack = context.userEnabledNNPACK();
  found.threads = at::get_num_threads();
  found.default_dtype = c10::get_default_dtype_as_scalartype();
  for (size_t i = 0; i < (has_cuda ? PRECISIONS.size() : 3); ++i) {
    found.precisions[i] = context.float32Precision(PRECISIONS[i].first, PRECISIONS[i].second);
  }
  if (has_cuda) {
    found.cudnn = context.userEnabledCuDNN();
    found.cudnn_benchmark = context.benchmarkCuDNN();
    found.cudnn_deterministic = context.deterministicCuDNN();
    found.fp16_accumulation = context.allowFP16AccumulationCuBLAS();
    found.fp16_reduction = context.allowFP16ReductionCuBLAS();
    found.bf16_reduction = context.allowBF16ReductionCuBLAS();
  }
  return found;
}

void SettingsGuard::change(const Settings& wanted) {
  const Settings now = std::exchange(present_, wanted);
  if (now == wanted) return;
  at::Context& context = at::globalContext();
  if (now.grad != wanted.grad) c10::GradMode::set_enabled(wanted.grad);
  if (now.deterministic != wanted.deterministic || now.warn_only != wanted.warn_only) {
    context.setDeterministicAlgorithms(wanted.deterministic, wanted.warn_only);
  }
  if (now.mkldnn != wanted.mkldnn) context.setUserEnabledMkldnn(wanted.mkldnn);
  if (now.mkldnn_deterministic != wanted.mkldnn_deterministic) {
    context.setDeterministicMkldnn(wanted.mkldnn_deterministic);
  }
  if (now.nnpack != wanted.nnpack) context.setUserEnabledNNPACK(wanted.nnpack);
  if (now.threads != wanted.threads) at::set_num_threads(wanted.threads);
  if (now.default_dtype != wanted.default_dtype) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(wanted.default_dtype));
  }
  for (size_t i = 0; i < PRECISIONS.size(); ++i) {
    if (now.precisions[i] == wanted.precisions[i]) continue;
    context.setFloat32Precision(PRECISIONS[i].first, PRECISIONS[i].second, wanted.precisions[i]);
  }
  if (now.cudnn != wanted.cudnn) context.setUserEnabledCuDNN(wanted.cudnn);
  if (now.cudnn_benchmark != wanted.cudnn_benchmark) context.setBenchmarkCuDNN(wanted.cudnn_benchmark);
  if (now.cudnn_deterministic != wanted.cudnn_deterministic) context.setDeterministicCuDNN(wanted.cudnn_deterministic);
  if (now.fp16_accumulation != wanted.fp16_accumulation) context.setAllowFP16AccumulationCuBLAS(wanted.fp16_accumulation);
  const auto unpack = [](at::CuBLASReductionOption option) {
    return std::make_pair(
        option != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK &&
            option != at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK,
        option != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK);
  };
  if (now.fp16_reduction != wanted.fp16_reduction) {
    const auto [reduced, split] = unpack(wanted.fp16_reduction);
    context.setAllowFP16ReductionCuBLAS(reduced, split);
  }
  if (now.bf16_reduction != wanted.bf16_reduction) {
    const auto [reduced, split] = unpack(wanted.bf16_reduction);
    context.setAllowBF16ReductionCuBLAS(reduced, split);
  }
}

}  // namespace elbowroom
