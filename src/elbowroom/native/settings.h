// What chooses a kernel, and so its bits, beside its arguments: settings that a program may change as it runs.
//
// A forward pass may run under `torch.backends.cudnn.flags(...)` or with another number of threads, and what is saved
// may depend on whether gradients are recorded (a oneDNN LSTM makes its workspace only then). A replay, in the backward
// pass, has to run under what the op ran under.
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

// Those of this thread.
Settings read_settings();

// Sets those that differ from the present ones, and sets them back when it ends.
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
