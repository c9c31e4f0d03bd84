// Settings that choose kernels, and so bits, beside an op's arguments: what each op ran under, and its replay does.
#pragma once

#include <ATen/Context.h>

#include <cstdint>

namespace elbowroom {

struct NumericSettings {
  // As they are in this thread.
  static NumericSettings read();

  // What any op may ask for; and of `known`, what only ops that multiply ask for: it takes long to read.
  static NumericSettings read_common(const NumericSettings& known);

  // Change those that differ from `present`, which is what holds now.
  void apply(const NumericSettings& present) const;

  bool operator==(const NumericSettings&) const = default;

  bool is_grad_enabled, is_deterministic, is_warning_only, is_mkldnn, is_mkldnn_deterministic, is_nnpack;
  bool is_cudnn, is_cudnn_benchmark, is_cudnn_deterministic, is_fp16_accumulation;
  at::ScalarType default_dtype;
  at::CuBLASReductionOption fp16_reduction, bf16_reduction;
  at::Float32Precision mkldnn_precision[3], cuda_precision[3];
  int threads;
};

}  // namespace elbowroom
