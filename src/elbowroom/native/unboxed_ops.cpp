// Watches the most frequent ops without boxing their arguments, which costs more than watching itself.
//
// Equivalent to `run_watched`, which boxes arguments: it handles these ops if there are several watchers, and all other
// ops.
#include <ATen/Operators.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "op_arguments.h"
#include "op_kinds.h"
#include "op_watch.h"
#include "state_storages.h"
#include "watched_ops.h"

namespace elbowroom {

namespace {

// Result of an op, a value or a reference.
template <typename Result>
struct Returned {
  void operator=(Result&& result) { value.emplace(std::move(result)); }
  Result get() { return std::move(*value); }
  std::optional<Result> value;
};

template <typename Result>
struct Returned<Result&> {
  void operator=(Result& result) { value = &result; }
  Result& get() { return *value; }
  Result* value = nullptr;
};

using Tensors = c10::SmallVector<at::Tensor, 2>;

// Calls `visit` for the defined tensors of an argument, as `visit_tensors` does for a boxed one.
template <typename Visit>
void visit_argument(const at::Tensor& tensor, const Visit& visit) {
  if (tensor.defined()) visit(tensor);
}

template <typename Visit>
void visit_argument(const std::optional<at::Tensor>& tensor, const Visit& visit) {
  if (tensor.has_value()) visit_argument(*tensor, visit);
}

template <typename Visit>
void visit_argument(const at::ITensorListRef& tensors, const Visit& visit) {
  for (const at::Tensor& each : tensors) visit_argument(each, visit);
}

template <typename Visit>
void visit_argument(const at::TensorList& tensors, const Visit& visit) {
  for (const at::Tensor& each : tensors) visit_argument(each, visit);
}

template <typename Visit>
void visit_argument(const c10::List<std::optional<at::Tensor>>& tensors, const Visit& visit) {
  for (const std::optional<at::Tensor>& each : tensors) visit_argument(each, visit);
}

template <typename Argument, typename Visit>
void visit_argument(const Argument&, const Visit&) {}

// The same for the tensors of an op's result.
template <typename Result, typename Visit>
void visit_result(const Result& result, const Visit& visit) { visit_argument(result, visit); }

template <typename Visit>
void visit_result(const std::vector<at::Tensor>& results, const Visit& visit) { visit_argument(at::TensorList(results), visit); }

template <typename... Results, typename Visit>
void visit_result(const std::tuple<Results...>& results, const Visit& visit) {
  std::apply([&](const auto&... each) { (visit_argument(each, visit), ...); }, results);
}

bool is_true(bool value) { return value; }

template <typename Argument>
bool is_true(const Argument&) { return false; }

// Returns the tensors that an op writes to.
template <typename... Arguments>
Tensors list_written(const OpKind& kind, const Arguments&... arguments) {
  Tensors written;
  const auto add = [&](int64_t position) {
    int64_t i = 0;
    const auto put = [&](const at::Tensor& tensor) { written.push_back(tensor); };
    ((i++ == position ? visit_argument(arguments, put) : void()), ...);
  };
  for (const int64_t position : kind.written) add(position);
  if (kind.mean >= 0) {
    int64_t i = 0;
    if (kind.training < 0 || ((i++ == kind.training && is_true(arguments)) || ...)) add(kind.mean), add(kind.variance);
  }
  return written;
}

// Runs a counted op that may have to be recorded. `has_begun`: set where it may have written.
class Counted final : public c10::OperatorKernel {
 public:
  Counted(OpWatch& watch, const OpKind& kind, const OpWatch::Count& count, bool& has_begun)
      : watch_(watch), kind_(kind), count_(count), has_begun_(has_begun) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    watch_.run(op, kind_, count_, stack, [&] {
      has_begun_ = true;
      op.redispatchBoxed(keys & BELOW_WATCH, stack);
    });
  }

 private:
  OpWatch& watch_;
  const OpKind& kind_;
  const OpWatch::Count count_;
  bool& has_begun_;
};

// Runs an op in slices that has failed as a whole.
class Refused final : public c10::OperatorKernel {
 public:
  Refused(OpWatch& watch, const OpKind& kind, python_error& refusal) : watch_(watch), kind_(kind), refusal_(refusal) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (!run_refused(watch_, op, kind_, stack, refusal_)) throw python_error(refusal_);
  }

 private:
  OpWatch& watch_;
  const OpKind& kind_;
  python_error& refusal_;
};

template <typename Op, typename Schema = typename Op::schema>
struct Unboxed;

template <typename Op, typename Result, typename... Arguments>
struct Unboxed<Op, Result(Arguments...)> {
  static Result run(c10::DispatchKeySet keys, Arguments... arguments) {
    static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    static std::atomic<const OpKind*> known{nullptr};
    Thread& thread = get_thread();
    if (thread.has_left) leave_again(thread);
    if (StateTable::is_any_managed()) heed_profilers(thread);
    if (is_for_python(keys)) return box(c10::BoxedKernel::makeFromFunction<&run_watched>(), op, keys, arguments...);
    const bool has_bytes = !keys.has_backend(c10::BackendComponent::MetaBit);
    OpWatch* const watch = has_bytes ? find_only_watch(thread) : nullptr;
    const bool is_unwatched = watch == nullptr && has_bytes && !has_watchers(thread);
    if (!is_unwatched && (watch == nullptr || watch->is_closed() || watch->has_waiting)) {
      return box(c10::BoxedKernel::makeFromFunction<&run_watched>(), op, keys, arguments...);
    }
    const OpKind* kind = known.load(std::memory_order_acquire);
    if (kind == nullptr) known.store(kind = find_kind(op), std::memory_order_release);
    if (is_unwatched) {
      const auto run = [&]() -> Result {
        const c10::impl::ExcludeDispatchKeyGuard hidden{c10::DispatchKeySet(WATCHED_KEY)};
        return Op::redispatch(keys & BELOW_WATCH, arguments...);
      };
      return run_with_state(*kind, thread, run, arguments...);
    }
    const bool is_sliceable = kind->is_sliceable && watch->has_slicer();
    bool has_begun = false;
    if (!is_sliceable) return run_whole(*watch, op, *kind, thread, keys, has_begun, arguments...);
    int64_t nbytes = 0;
    (visit_argument(arguments, [&](const at::Tensor& tensor) { nbytes += count_tensor_bytes(tensor); }), ...);
    if (nbytes >= watch->sliced_bytes || (kind->mean >= 0 && (watch->limits_device() || watch->is_tight(nbytes)))) {
      return box(c10::BoxedKernel::makeFromFunction<&run_watched>(), op, keys, arguments...);
    }
    try {
      return run_whole(*watch, op, *kind, thread, keys, has_begun, arguments...);
    } catch (python_error& refusal) {
      if (kind->may_write && has_begun) throw;  // its argument may be partly written
      return box(c10::BoxedKernel::makeFromFunctor(std::make_unique<Refused>(*watch, *kind, refusal)), op, keys, arguments...);
    }
  }

 private:
  // Runs an op as a whole. `has_begun`: set where it may have written.
  static Result run_whole(
      OpWatch& watch, const c10::OperatorHandle& op, const OpKind& kind, Thread& thread, c10::DispatchKeySet keys,
      bool& has_begun, Arguments... arguments) {
    if (watch.side_streams.is_on_new_one()) {
      bool may_move = false;
      (visit_argument(arguments, [&](const at::Tensor& tensor) { may_move = may_move || watch.may_move(tensor); }), ...);
      if (may_move) watch.side_streams.note();
    }
    if (!StateTable::is_any_managed()) return run_counted(watch, op, kind, watch.count(kind), thread, keys, has_begun, arguments...);
    OpWatch::Count count;
    const auto run = [&]() -> Result {
      count = watch.count(kind);
      watch.move_state(count.position, true);
      return run_counted(watch, op, kind, count, thread, keys, has_begun, arguments...);
    };
    Returned<Result> returned;
    returned = run_with_state(kind, thread, run, arguments...);
    watch.move_state(count.position, false);  // what the op has used is free to leave by now
    if (kind.uses_memory && watch.notes_results()) {
      const auto origin = kind.is_source ? OpWatch::Origin::FACTORY : OpWatch::Origin::OP;
      visit_result(*returned.value, [&](const at::Tensor& each) { watch.note_result(each, origin); });
    }
    return returned.get();
  }

  // Calls `run` while what the op uses is in memory.
  static Result run_with_state(
      const OpKind& kind, Thread& thread, c10::function_ref<Result()> run, Arguments... arguments) {
    if (!kind.uses_memory) return run();
    StateUse use;
    {
      const Running restoring(kind.name, thread);  // for the message, if there is no room
      (visit_argument(arguments, [&](const at::Tensor& tensor) { use.add(tensor); }), ...);
      use.begin(kind.may_write ? list_written(kind, arguments...) : Tensors());
    }
    return run();
  }

  static Result run_counted(
      OpWatch& watch, const c10::OperatorHandle& op, const OpKind& kind, const OpWatch::Count& count, Thread& thread,
      c10::DispatchKeySet keys, bool& has_begun, Arguments... arguments) {
    const Busy busy(thread);
    const c10::impl::ExcludeDispatchKeyGuard hidden{c10::DispatchKeySet(WATCHED_KEY)};
    if (watch.may_record(count)) {
      auto counted = std::make_unique<Counted>(watch, kind, count, has_begun);
      return box(c10::BoxedKernel::makeFromFunctor(std::move(counted)), op, keys, arguments...);
    }
    const auto call = [&]() -> Result {
      has_begun = true;
      return Op::redispatch(keys & BELOW_WATCH, arguments...);
    };
    if (kind.is_idle) return call();
    const bool is_limited = watch.limits_device();
    if (!kind.may_write && !watch.may_retry(kind) && !is_limited) {
      watch.table().sweep_if_many();
      const Running running(kind.name, thread);
      return call();
    }
    const Tensors written = kind.may_write ? list_written(kind, arguments...) : Tensors();
    Sizes sizes;
    if (is_limited) (visit_argument(arguments, [&](const at::Tensor& tensor) { sizes.add(tensor); }), ...);
    Returned<Result> returned;
    watch.run_unrecorded(kind, written, sizes, [&] { returned = call(); });
    return returned.get();
  }

  static Result box(
      const c10::BoxedKernel& kernel, const c10::OperatorHandle& op, c10::DispatchKeySet keys, Arguments... arguments) {
    return c10::impl::BoxedKernelWrapper<Result(Arguments...)>::call(kernel, op, keys, arguments...);
  }
};

template <typename... Ops>
void watch_unboxed(torch::Library& library) {
  const auto name = [](const std::string& op, const std::string& overload) {
    return overload.empty() ? op : op + "." + overload;
  };
  (library.impl(name(Ops::name, Ops::overload_name).c_str(), TORCH_FN(Unboxed<Ops>::run)), ...);
}

}  // namespace

// Kernels of the marks of `ops/update_marks.py`.
TORCH_LIBRARY_IMPL(elbowroom, CompositeExplicitAutograd, library) {
  for (const char* const mark : {"begin_update", "end_update"}) library.impl(mark, [](at::TensorList) {});
}

// None of these takes a device argument or writes to a list of tensors.
TORCH_LIBRARY_IMPL(aten, Fake, library) {
  namespace ops = at::_ops;
  watch_unboxed<
      ops::_grouped_mm, ops::_local_scalar_dense, ops::_scaled_dot_product_flash_attention_for_cpu,
      ops::_scaled_dot_product_flash_attention_for_cpu_backward, ops::_softmax, ops::_softmax_backward_data,
      ops::_unsafe_view, ops::add_Tensor, ops::add__Tensor, ops::addcdiv_, ops::addcmul_, ops::addmm, ops::as_strided,
      ops::bernoulli__float, ops::bmm, ops::cat, ops::clone, ops::convolution, ops::convolution_backward, ops::copy_,
      ops::detach, ops::div_Scalar, ops::div_Tensor, ops::div__Scalar, ops::div__Tensor, ops::embedding,
      ops::embedding_dense_backward, ops::exp, ops::expand, ops::gelu, ops::gelu_backward, ops::hardsigmoid,
      ops::hardsigmoid_backward, ops::hardswish_, ops::hardswish_backward, ops::index_Tensor, ops::index_put,
      ops::index_put_, ops::lerp__Scalar, ops::mean, ops::mean_dim, ops::mm, ops::mul_Scalar, ops::mul_Tensor,
      ops::mul__Tensor, ops::native_batch_norm, ops::native_batch_norm_backward, ops::native_layer_norm,
      ops::native_layer_norm_backward, ops::neg, ops::permute, ops::pow_Tensor_Scalar, ops::relu, ops::relu_,
      ops::rsqrt, ops::scatter_src, ops::select_backward, ops::select_int, ops::sigmoid, ops::sigmoid_,
      ops::sigmoid_backward, ops::silu, ops::silu_, ops::silu_backward, ops::slice_Tensor, ops::slice_backward,
      ops::softplus, ops::softplus_backward, ops::split_Tensor, ops::split_with_sizes, ops::sqrt, ops::squeeze_dim,
      ops::stack, ops::sub_Tensor, ops::sum_dim_IntList, ops::t, ops::tanh, ops::tanh_, ops::tanh_backward,
      ops::threshold_backward, ops::topk, ops::transpose_int, ops::unbind_int, ops::unsafe_split_Tensor,
      ops::unsqueeze, ops::view, ops::zero_>(library);
}

}  // namespace elbowroom
