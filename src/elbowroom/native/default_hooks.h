// Has autograd ask a step for what it calls when it saves a tensor.
#pragma once

namespace elbowroom {

// From now on, and for ever, autograd asks the step that is watched in its thread, unless the program has set hooks of its
// own (`torch.autograd.graph.saved_tensors_hooks`), which come first.
void serve_default_hooks();

}  // namespace elbowroom
