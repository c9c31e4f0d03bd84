// What is known of an operator, found once: what it writes to, and how far down the dispatcher it runs as one op.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <string>

namespace at {
struct RecordFunction;
}

namespace elbowroom {

// What runs at an operator's autograd key.
enum class AutogradKernel : uint8_t {
  COMPOSITE,  // a composite of other ops: a dispatch mode sees those, not this one
  OWN,        // a kernel of its own, which excludes autograd before it calls the backend's
  NONE,       // nothing: the backend's kernel is called with autograd still on
};

// Running statistics that an op updates although its schema does not say so: positions of its arguments.
struct Statistics {
  int mean = -1;
  int variance = -1;
  int training = -1;  // the flag that says whether they are updated; -1 for an op that always does
};

struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& handle);

  AutogradKernel find_autograd_kernel(c10::DispatchKey autograd_key) const;

  c10::OperatorHandle handle;
  std::string name;            // as Python writes it: aten.add.Tensor
  size_t argument_count;
  size_t return_count;
  uint64_t written = 0;        // bits: the arguments that it writes to, by its schema
  Statistics statistics;
  bool is_aten;
  bool is_only_autograds;      // autograd's kernel does all of it, and no bytes are read or written
  bool multiplies;             // it may be a matrix product, convolution or the like, whose libraries have settings
  std::atomic<bool> is_registered{true};

 private:
  AutogradKernel ask_dispatcher(c10::DispatchKey autograd_key) const;

  std::array<AutogradKernel, 2> known_;  // of the CPU and of CUDA
};

// Which statistics ops update, by their names without overload. To be told before any op is observed.
void set_statistics(std::map<std::string, Statistics> statistics);

// The operator of an event; null where the event is none (a name that the program gave). The answer is valid for ever,
// but an operator may be taken away again: `is_registered`.
const OpInfo* find_op_info(const at::RecordFunction& event);

}  // namespace elbowroom
