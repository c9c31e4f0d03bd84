"""Embedding: along its features, and along the indices that are looked up."""

from __future__ import annotations

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, SliceRule, cut


def _find_passes(call: OpCall) -> Alternatives:
    indices, features = call["indices"], call["weight"].shape[1]
    found = [cut(call, indices.shape[each], {"indices": each}, {0: each}) for each in range(indices.ndim)]
    found.append(cut(call, features, {"weight": 1}, {0: indices.ndim}))
    return tuple((each,) for each in found)


def _find_passes_backward(call: OpCall) -> Alternatives:
    """Cut the gradient of the weight. Along the indices it is a sum, unless it is divided by their frequency."""
    grad, indices = call["grad_output"], call["indices"]
    found = [cut(call, grad.shape[-1], {"grad_output": -1}, {0: 1})]
    if indices.ndim and not call["scale_grad_by_freq"]:
        found.append(cut(call, indices.shape[0], {"grad_output": 0, "indices": 0}, {}, sums=True))
    return tuple((each,) for each in found)


RULES = {
    "aten.embedding.default": SliceRule(_find_passes, indices={"indices": lambda call: call["weight"].shape[0]}),
    "aten.embedding_dense_backward.default": SliceRule(
        _find_passes_backward, indices={"indices": lambda call: call["num_weights"]}
    ),
}
