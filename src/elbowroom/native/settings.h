// Settings that select kernels, and so affect results, and that a program may change while it runs.
//
// A forward pass may run under `torch.backends.cudnn.flags(...)` or with another number of threads, and results may
// depend on grad mode (a oneDNN LSTM returns its workspace only if gradients are recorded). A replay in the backward
// pass must run under the settings of the original op.
#pragma once

#include <ATen/Context.h>

#include <array>

namespace elbowroom {

struct Settings {
  bool grad, deterministic, warn_only, mkldnn, mkldnn_deterministic, nnpack;
  int threads;
  c10::ScalarType default_dtype;
  std::array<at::Float32Precision, 6> precisions;  // of matrix products, convolutions and RNNs on oneDNN and CUDA
  bool cudnn, cudnn_benchmark, cudnn_deterministic, fp16_accumulation;
  at::CuBLASReductionOption fp16_reduction, bf16_reduction;

  bool operator==(const Settings&) const = default;
};

// Returns this thread's settings.
Settings read_settings();

// Changes settings, and restores them when destroyed.
class SettingsGuard {
 public:
  SettingsGuard() : before_(read_settings()), present_(before_) {}
  ~SettingsGuard() { change(before_); }
  SettingsGuard(const SettingsGuard&) = delete;
  SettingsGuard& operator=(const SettingsGuard&) = delete;

  void change(const Settings& wanted);

 private:
  const Settings before_;
  Settings present_;
};

}  // namespace elbowroom
