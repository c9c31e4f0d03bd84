"""Workspace of a convolution on a CUDA device: copies in the layout of the tensor cores, or little.

    [ input | result | weight ]   in channels_last          with tensor cores
    [ indices, partial sums ]                               without
    never more than the limit, beyond which cuDNN uses an algorithm with less workspace

PyTorch sets no limit of its own: it tries algorithms in the order in which cuDNN recommends them, and goes on to the
next if the workspace of one cannot be allocated (`aten/src/ATen/native/cudnn/Conv_v7.cpp`, `Conv_v8.cpp`: out of memory
is caught), down to algorithms without workspace. So on a full device a convolution gets by with less. A trace does not
know the free memory, so a fixed limit stands for it. That algorithms with less workspace are slower is not priced.

Source: kernel traces of the artifact of H. Zhang, Y. E. Zhou, Y. Xue, Y. Liu, J. Huang, "G10", MICRO 2023: on an A100
    the convolutions of ResNet-152 (1,280 images), Inception-v3 (1,536) and SENet-154 (1,024) allocate either what their
    input and their result take, one of these, or a few hundred MiB at most, mostly 128 or less. The limit lies between
    the defaults of frameworks that have one: 512 MiB in PaddlePaddle (FLAGS_conv_workspace_size_limit), 4 GiB in
    TensorFlow (TF_CUDNN_WORKSPACE_LIMIT_IN_MB). vDNN (MICRO 2016) uses algorithms without workspace. Inferred: layouts
    are contiguous, since a trace does not record them; channels_last needs no copies.
"""

from __future__ import annotations

from collections.abc import Mapping

from elbowroom.cost.shapes import element_bytes, view_bytes
from elbowroom.ir.trace import Op, View

LIMIT_BYTES = 1 << 30
"""Limit on the workspace of a convolution."""

PLAIN_LIMIT_BYTES = 128 << 20
"""Limit without tensor cores, whose layout takes most of the workspace."""


def estimate_cudnn(op: Op, rates: Mapping[tuple[str, str], float], *, backward: bool) -> int:
    """Estimate the workspace of a convolution in bytes, as an upper bound.

    A backward op computes one gradient after the other, each from two of input, result and weight.

    Args:
        rates: rates of the device, by (kind, dtype).
    """
    operands = op.reads[:3] if backward else (*op.reads[:2], *op.writes[:1])
    most = LIMIT_BYTES if operands and _has_tensor_cores(operands[0], rates) else PLAIN_LIMIT_BYTES
    return min(most, sum(view_bytes(view) for view in operands))


def _has_tensor_cores(view: View, rates: Mapping[tuple[str, str], float]) -> bool:
    """Tell by the rates: half precision is faster than single, or single is faster than matmul (TF32)."""
    rate, single = rates.get(("convolution", view.dtype), 0.0), rates.get(("convolution", "float32"), 0.0)
    if element_bytes(view.dtype) < 4:
        return rate > single
    return rate > rates.get(("matmul", view.dtype), rate)
