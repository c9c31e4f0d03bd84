// Makes a step provide autograd's default saved-tensor hooks.
#pragma once

namespace elbowroom {

// Installs, permanently, the hooks of the step that is watched in the current thread as autograd's default hooks. The
// program's own hooks (`torch.autograd.graph.saved_tensors_hooks`) take precedence.
void serve_default_hooks();

}  // namespace elbowroom
