// The records of a step as Python objects: looked up when they are asked for.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "op_record.h"

namespace elbowroom {

using Log = std::shared_ptr<StepLog>;

struct OpView {
  Log log;
  uint32_t number;
};

struct StorageView {
  Log log;
  uint32_t number;
};

struct TensorView {
  Log log;
  TensorUse use;
};

// RecordedOp, StorageRecord, TensorUse.
void bind_records(pybind11::module_& module);

}  // namespace elbowroom
