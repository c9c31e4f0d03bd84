// Facts about an op that do not depend on its arguments.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace elbowroom {

// Filled by `ops/op_info.py`.
struct OpKind {
  std::string name, schema;
  bool is_traced, is_idle, uses_memory, may_write, is_replayable, is_random, is_source, is_convolution;
  bool has_other_ways;  // it takes another algorithm if it is refused memory
  bool uses_up;  // it changes an argument that nothing reads afterwards, so that it cannot run again
  bool takes_nothing = false;  // it writes its result to an argument, element by element
  bool is_sliceable = false;  // there is a rule for running it in slices
  bool is_by_item = false;  // it takes lists of tensors of equal length, each item by itself
  std::vector<int64_t> written;  // positions of the arguments that it writes to
  int64_t dropout = -1;  // position of the probability that makes the op random unless it is zero
  int64_t mean = -1, variance = -1, training = -1;  // positions of statistics that it updates in training, and the flag

  bool updates_statistics(const c10::IValue* arguments, size_t count) const;
  // Returns whether it may be replayed with these arguments.
  bool may_be_replayed(const c10::IValue* arguments, size_t count) const;
};

// Returns the facts about an op, calling Python the first time; null if it has no schema.
const OpKind* find_kind(const c10::OperatorHandle& op);

// Sets the function that returns the facts, given an op's name and overload.
void set_find_kind(std::function<OpKind(const std::string&, const std::string&)> find);

}  // namespace elbowroom
