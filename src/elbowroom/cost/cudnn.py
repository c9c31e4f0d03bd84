"""Workspace of a convolution on a CUDA device: copies in the layout of the tensor cores, or little.

    [ input | result | weight ]   in channels_last          where tensor cores do it
    [ indices, partial sums ]                               where they do not
    never more than the limit: then cuDNN is asked for an algorithm that takes less

PyTorch sets no limit of its own: it takes the algorithms in the order in which cuDNN recommends them, and goes on to
the next where the workspace of one cannot be allocated (`aten/src/ATen/native/cudnn/Conv_v7.cpp`, `Conv_v8.cpp`: out of
memory is caught), down to algorithms that take none. So on a full device a convolution never needs what it would like
to have. A trace knows no free memory, so one limit stands for it. That an algorithm with less is slower is not priced.

Source: kernel traces of the artifact of H. Zhang, Y. E. Zhou, Y. Xue, Y. Liu, J. Huang, "G10", MICRO 2023: on an A100
    the convolutions of ResNet-152 (1,280 images), Inception-v3 (1,536) and SENet-154 (1,024) allocate either what their
    input and their result take, one of these, or a few hundred MiB at most, mostly 128 or less. The limit lies between
    the defaults of frameworks that have one: 512 MiB in PaddlePaddle (FLAGS_conv_workspace_size_limit), 4 GiB in
    TensorFlow (TF_CUDNN_WORKSPACE_LIMIT_IN_MB). vDNN (MICRO 2016) makes do with none at all. Inferred: that layouts are
    contiguous, since a trace does not record them; channels_last needs no copies.
"""

from __future__ import annotations

from collections.abc import Mapping

from elbowroom.cost.shapes import element_bytes, view_bytes
from elbowroom.ir.trace import Op, View

LIMIT_BYTES = 1 << 30
"""No convolution takes more."""

PLAIN_LIMIT_BYTES = 128 << 20
"""Nor more than this without tensor cores, whose layout is what takes the most."""


def estimate_cudnn(op: Op, rates: Mapping[tuple[str, str], float], *, backward: bool) -> int:
    """Bytes that a convolution allocates inside itself at most, beyond its results.

    Backward takes one gradient after the other, each from two of the same three: input, result and weight.

    Args:
        rates: of the device, by (kind, dtype).
    """
    operands = op.reads[:3] if backward else (*op.reads[:2], *op.writes[:1])
    most = LIMIT_BYTES if operands and _has_tensor_cores(operands[0], rates) else PLAIN_LIMIT_BYTES
    return min(most, sum(view_bytes(view) for view in operands))


def _has_tensor_cores(view: View, rates: Mapping[tuple[str, str], float]) -> bool:
    """Half precision that is faster than single, and single precision that is faster than products (TF32)."""
    rate, single = rates.get(("convolution", view.dtype), 0.0), rates.get(("convolution", "float32"), 0.0)
    if element_bytes(view.dtype) < 4:
        return rate > single
    return rate > rates.get(("matmul", view.dtype), rate)
