// Ops over lists of tensors, run over a part of the lists at a time, so that what they list never has to be in memory at
// once.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <vector>

#include "op_kinds.h"

namespace elbowroom {

// Positions in the lists at which the parts of at most `most_bytes` end; empty if the op is not to be split, or cannot be
// with the same results.
std::vector<size_t> find_parts(const OpKind& op, const c10::IValue* arguments, size_t count, int64_t most_bytes);

// Calls `run` with the arguments of each part in turn, and puts the results of all on the stack instead of the arguments.
void run_parts(
    torch::jit::Stack& stack, size_t count, const std::vector<size_t>& ends,
    c10::function_ref<void(torch::jit::Stack&)> run);

}  // namespace elbowroom
