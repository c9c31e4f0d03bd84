#include "default_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <mutex>
#include <utility>

#include "op_watch.h"
#include "saved_tensors.h"
#include "watched_ops.h"

namespace elbowroom {

namespace {

namespace autograd = torch::autograd;

using NodePtr = decltype(autograd::Edge::function);  // in PyTorch 2.11 a std::shared_ptr

// PyTorch asks its default engine for default hooks. This engine forwards all other calls to the previous one. Backward
// passes that Python begins do not use it.
class DefaultEngine final : public autograd::Engine {
 public:
  explicit DefaultEngine(autograd::Engine& engine) : engine_(engine) {}

  autograd::variable_list execute(
      const autograd::edge_list& roots, const autograd::variable_list& inputs, bool keep_graph, bool create_graph,
      bool accumulate_grad, const autograd::edge_list& outputs) override {
    return engine_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<autograd::GraphTask>& task, NodePtr root, autograd::InputBuffer&& input) override {
    return engine_.execute_with_graph_task(task, std::move(root), std::move(input));
  }

  std::unique_ptr<autograd::AnomalyMetadata> make_anomaly_metadata() override { return engine_.make_anomaly_metadata(); }

  std::unique_ptr<autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto& program = at::SavedTensorDefaultHooks::get_tls_state();
    OpWatch* const watch = program.stack.empty() && !program.is_tracing ? find_watch() : nullptr;
    std::shared_ptr<SavedTensors> step = watch == nullptr ? nullptr : watch->saved_tensors.lock();
    return step ? SavedTensors::make_hooks(std::move(step)) : engine_.get_default_saved_variable_hooks();
  }

  void thread_on_exception(
      const std::shared_ptr<autograd::GraphTask>& task, const NodePtr& node, std::exception& error) override {
    engine_.thread_on_exception(task, node, error);
  }

  void thread_init(int device, const std::shared_ptr<autograd::ReadyQueue>& queue, bool should_increment) override {
    engine_.thread_init(device, queue, should_increment);
  }

 private:
  autograd::Engine& engine_;
};

DefaultEngine* served = nullptr;

}  // namespace

void serve_default_hooks() {
  static std::once_flag once;
  std::call_once(once, [] {
    served = new DefaultEngine(autograd::Engine::get_default_engine());  // never freed: threads may use it at exit
    autograd::set_default_engine_stub([]() -> autograd::Engine& { return *served; });
  });
}

}  // namespace elbowroom
