// Runs recorded ops again, below autograd, under the settings that they ran under, and unobserved.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "op_record.h"

namespace elbowroom {

// A storage's bytes, and how many ops had written to it when they were so.
struct Bytes {
  c10::Storage storage;
  uint32_t version;
};

// Replays `ops`, in this order, and returns the storages of `wanted` (records) that they made. Everything else that they
// make is freed after its last use. `present`: what they read and do not make.
//
// Throws std::runtime_error, before the op in question runs, where an op cannot be replayed, reads what is not there or
// is at another version, or would write to what the replay has not made; and after it where it made something else.
std::unordered_map<uint32_t, Bytes> replay(
    StepLog& log,
    const std::vector<uint32_t>& ops,
    std::unordered_map<uint32_t, Bytes> present,
    const std::vector<uint32_t>& wanted);

}  // namespace elbowroom
