#include "numeric_settings.h"

#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>

namespace elbowroom {

namespace {

constexpr at::Float32Op OPS[3] = {at::Float32Op::MATMUL, at::Float32Op::CONV, at::Float32Op::RNN};

bool has_cuda() {
  static const bool has = at::hasCUDA();
  return has;
}

bool allows_reduced(at::CuBLASReductionOption option) {
  return option == at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
}

bool allows_split(at::CuBLASReductionOption option) {
  return option != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK;
}

}  // namespace

NumericSettings NumericSettings::read() {
  const at::Context& context = at::globalContext();
  NumericSettings read = read_common({});
  read.is_mkldnn = context.userEnabledMkldnn();
  read.is_mkldnn_deterministic = context.deterministicMkldnn();
  read.is_nnpack = context.userEnabledNNPACK();
  for (int op = 0; op < 3; ++op) {
    read.mkldnn_precision[op] = context.float32Precision(at::Float32Backend::MKLDNN, OPS[op]);
    if (has_cuda()) read.cuda_precision[op] = context.float32Precision(at::Float32Backend::CUDA, OPS[op]);
  }
  if (!has_cuda()) return read;
  read.is_cudnn = context.userEnabledCuDNN();
  read.is_cudnn_benchmark = context.benchmarkCuDNN();
  read.is_cudnn_deterministic = context.deterministicCuDNN();
  read.is_fp16_accumulation = context.allowFP16AccumulationCuBLAS();
  read.fp16_reduction = context.allowFP16ReductionCuBLAS();
  read.bf16_reduction = context.allowBF16ReductionCuBLAS();
  return read;
}

NumericSettings NumericSettings::read_common(const NumericSettings& known) {
  const at::Context& context = at::globalContext();
  NumericSettings read = known;
  read.is_grad_enabled = c10::GradMode::is_enabled();
  read.is_deterministic = context.deterministicAlgorithms();
  read.is_warning_only = context.deterministicAlgorithmsWarnOnly();
  read.default_dtype = c10::typeMetaToScalarType(c10::get_default_dtype());
  read.threads = at::get_num_threads();
  return read;
}

void NumericSettings::apply(const NumericSettings& present) const {
  at::Context& context = at::globalContext();
  if (is_grad_enabled != present.is_grad_enabled) c10::GradMode::set_enabled(is_grad_enabled);
  if (is_deterministic != present.is_deterministic || is_warning_only != present.is_warning_only) {
    context.setDeterministicAlgorithms(is_deterministic, is_warning_only);
  }
  if (is_mkldnn != present.is_mkldnn) context.setUserEnabledMkldnn(is_mkldnn);
  if (is_mkldnn_deterministic != present.is_mkldnn_deterministic) {
    context.setDeterministicMkldnn(is_mkldnn_deterministic);
  }
  if (is_nnpack != present.is_nnpack) context.setUserEnabledNNPACK(is_nnpack);
  if (is_cudnn != present.is_cudnn) context.setUserEnabledCuDNN(is_cudnn);
  if (is_cudnn_benchmark != present.is_cudnn_benchmark) context.setBenchmarkCuDNN(is_cudnn_benchmark);
  if (is_cudnn_deterministic != present.is_cudnn_deterministic) context.setDeterministicCuDNN(is_cudnn_deterministic);
  if (is_fp16_accumulation != present.is_fp16_accumulation) context.setAllowFP16AccumulationCuBLAS(is_fp16_accumulation);
  if (default_dtype != present.default_dtype) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(default_dtype));
  }
  if (fp16_reduction != present.fp16_reduction) {
    context.setAllowFP16ReductionCuBLAS(allows_reduced(fp16_reduction), allows_split(fp16_reduction));
  }
  if (bf16_reduction != present.bf16_reduction) {
    context.setAllowBF16ReductionCuBLAS(allows_reduced(bf16_reduction), allows_split(bf16_reduction));
  }
  for (int op = 0; op < 3; ++op) {
    if (mkldnn_precision[op] != present.mkldnn_precision[op]) {
      context.setFloat32Precision(at::Float32Backend::MKLDNN, OPS[op], mkldnn_precision[op]);
    }
    if (cuda_precision[op] != present.cuda_precision[op]) {
      context.setFloat32Precision(at::Float32Backend::CUDA, OPS[op], cuda_precision[op]);
    }
  }
  if (threads != present.threads) at::set_num_threads(threads);
}

}  // namespace elbowroom
