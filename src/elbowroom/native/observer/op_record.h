// The ops of one step as they ran: operators, arguments without their tensors, and what those tensors stood for.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "numeric_settings.h"
#include "op_info.h"

namespace elbowroom {

constexpr uint32_t NONE = std::numeric_limits<uint32_t>::max();

// Why an op cannot be run again from its record.
enum class Obstacle : uint8_t {
  NOTHING,
  NO_STORAGE,     // sparse, nested, XLA ...: the tensor has no storage of its own
  SUBCLASS,       // a Python class decides what ops on the tensor do
  WRAPPED,        // functorch's or functionalization's
  QUANTIZED,
  CONJUGATE,      // its bytes are not its value: the conjugate or negative bit is set
  META,           // a device without bytes
  SYMBOLIC,       // its sizes are symbols
  OBJECT,         // an argument that is neither a tensor nor a plain value
  RAISED,         // the op raised an exception
};

const char* describe(Obstacle obstacle);

// A tensor in an argument or a result. It holds nothing alive.
struct TensorUse {
  uint32_t storage = NONE;   // the storage's record
  uint32_t version = 0;      // of the storage when the op began
  uint32_t geometry = 0;     // where its sizes begin, and its strides after them
  uint16_t dimensions = 0;
  int16_t device_index = -1;
  at::ScalarType dtype = at::ScalarType::Undefined;
  c10::DeviceType device_type = c10::DeviceType::CPU;
  Obstacle obstacle = Obstacle::NOTHING;
  bool is_defined = false;
  bool requires_grad = false;  // and gradients were recorded: kernels ask for both
  int64_t offset = 0;        // elements
};

// A NUMBER is a value that the op is given as a tensor.
enum class ArgumentKind : uint8_t { VALUE, NUMBER, TENSOR, TENSORS, OPTIONAL_TENSORS };

struct Argument {
  ArgumentKind kind = ArgumentKind::VALUE;
  uint32_t first = 0;  // of the step's values or tensors
  uint32_t count = 0;  // tensors
};

struct OpRecord {
  const OpInfo* info = nullptr;
  uint32_t arguments = 0;          // where they begin; as many as the schema has
  uint32_t tensors = 0;            // where those of its arguments begin
  uint32_t tensor_count = 0;
  uint32_t results = 0;            // where its tensors begin, once it has ended
  uint32_t result_count = 0;
  uint32_t settings = 0;
  uint16_t thread = 0;             // which of the step's threads ran it
  Obstacle obstacle = Obstacle::NOTHING;
  bool has_ended = false;
  int64_t begin = 0;               // nanoseconds of the steady clock
  int64_t end = 0;
};

// One write to a storage, and the one before it.
struct Write {
  uint32_t op;
  uint32_t previous;
};

struct StorageRecord {
  bool is_alive() const { return storage != nullptr && c10::raw::weak_intrusive_ptr::use_count(storage) > 0; }

  // A weak reference: nothing else is at its address while it is there. Null once the storage was found dead.
  c10::StorageImpl* storage;
  uint64_t nbytes;
  uint32_t seen_by = NONE;         // the first op of whose arguments it was, or the one to come when it was asked for
  uint32_t made_by = NONE;         // the first op of whose results it was and of whose arguments it was not
  uint32_t version = 0;            // number of ops that have written to it
  uint32_t last_write = NONE;
  uint32_t died_before = NONE;     // number of ops when it was found dead: exact if the log tracks deaths
  bool is_watched = false;
  bool is_resizable = true;
};

class StepLog {
 public:
  StepLog() = default;
  ~StepLog();
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;

  // As much room as another step took, so that nothing is moved while this one is recorded.
  void reserve_as(const StepLog& other);

  // An op begins with these arguments; returns its number.
  uint32_t begin_op(const OpInfo& info, c10::ArrayRef<at::IValue> inputs, uint64_t thread);

  // An op that has begun was called before the kernel of another one that began earlier: they change numbers.
  void swap_ops(uint32_t first, uint32_t second) { std::swap(ops[first], ops[second]); }

  // It has ended, or raised an exception. `outputs` may have other values in front of the op's results.
  void end_op(uint32_t number, c10::ArrayRef<at::IValue> outputs, bool has_raised);

  // Storages that an op writes to: by its schema, and statistics that it updates.
  template <typename Visit>
  void visit_written(const OpRecord& op, Visit visit) const;

  // Whether an argument is a running statistic that this op updates and does not read.
  bool is_statistic(const OpRecord& op, size_t position) const;

  // The record of a storage; a new one if there is none.
  uint32_t find_storage(c10::StorageImpl* storage);

  // Let `died_before` of all storages be known.
  void sweep();

  std::mutex mutex;  // taken by whoever calls any of these
  bool tracks_deaths = false;
  bool reads_clock = true;
  std::vector<OpRecord> ops;
  std::vector<Argument> arguments;
  std::vector<at::IValue> values;
  std::vector<TensorUse> tensors;
  std::vector<int64_t> geometry;
  std::vector<StorageRecord> storages;
  std::vector<Write> writes;
  std::vector<NumericSettings> settings;
  std::vector<uint64_t> threads;

 private:
  void add_argument(OpRecord& op, const at::IValue& value);
  void add_value(OpRecord& op, const at::IValue& value);
  void add_number(OpRecord& op, const at::Tensor& tensor);
  TensorUse describe_tensor(const at::Tensor& tensor, uint32_t seen_by);
  uint32_t find_storage(c10::StorageImpl* storage, uint32_t seen_by);
  void add_result(OpRecord& op, uint32_t number, const at::Tensor& tensor);
  void write(uint32_t storage, uint32_t number);
  uint32_t find_settings(const OpInfo& info);
  uint16_t find_thread(uint64_t present);
  bool bury(size_t place);
  void sweep_some();

  uint32_t settings_ = 0;  // the present ones
  ska::flat_hash_map<c10::StorageImpl*, uint32_t> numbers_;
  std::vector<uint32_t> living_;
  size_t next_ = 0;  // of `living_`, counted down
};

template <typename Visit>
void StepLog::visit_written(const OpRecord& op, Visit visit) const {
  const uint64_t written = op.info->written;
  const Statistics& statistics = op.info->statistics;
  if (written == 0 && statistics.mean < 0) return;
  for (size_t position = 0; position < op.info->argument_count && position < 64; ++position) {
    if (((written >> position) & 1) == 0 && !is_statistic(op, position)) continue;
    const Argument& argument = arguments[op.arguments + position];
    if (argument.count == 0) continue;
    for (uint32_t index = argument.first; index < argument.first + argument.count; ++index) {
      if (tensors[index].storage != NONE) visit(tensors[index].storage);
    }
  }
}

}  // namespace elbowroom
