// What is known of an op whatever it is given.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace elbowroom {

// See `ops/op_info.py`, which says what these are.
struct OpKind {
  std::string name, schema;
  bool is_traced, is_idle, uses_memory, may_write, is_replayable, is_random, is_source, is_convolution;
  bool is_by_item = false;  // it takes lists of tensors of equal length, each item by itself
  std::vector<int64_t> written;  // positions of the arguments that it writes to
  int64_t dropout = -1;  // position of the probability that makes it random if it is not zero
  int64_t mean = -1, variance = -1, training = -1;  // positions of statistics that it updates if it is training

  bool updates_statistics(const c10::IValue* arguments, size_t count) const;
  // Whether it may be replayed with these arguments.
  bool may_be_replayed(const c10::IValue* arguments, size_t count) const;
};

// Returns what is known of an op, which is asked of Python the first time; null where it has no schema.
const OpKind* find_kind(const c10::OperatorHandle& op);

// Sets the function that is asked, with an op's name and its overload's.
void set_find_kind(std::function<OpKind(const std::string&, const std::string&)> find);

}  // namespace elbowroom
