"""Workspace of an op: reordered copies, casts, and scratch memory of its threads, beyond its results.

    live bytes       .--- workspace ---.
                ____/                   \\______ results
         before                                 after

The rules are upper bounds, as tight as a trace allows: it does not record strides, and many ops copy an operand only if
their kernels do not support its strides. For a measured step `price` uses the measurements instead.

Source: measured with torch 2.13 on a CPU with two threads: whole training steps of ResNet-50, VGG-16, DenseNet-121,
    MobileNetV3, ConvNeXt, ViT, GPT-2, BERT, LSTM and a U-Net, float32, bfloat16 and autocast, contiguous and
    channels_last, and some 120 single ops. CUDA kernels were not measured: convolutions have their own rules there
    (`cost.cudnn`), and all other ops use the same rules as on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from elbowroom.cost.convolutions import estimate_convolution
from elbowroom.cost.cudnn import estimate_cudnn
from elbowroom.cost.roofline import find_kind
from elbowroom.cost.shapes import (
    count_elements,
    element_bytes,
    is_floating,
    short_name,
    touches_no_bytes,
    view_bytes,
)
from elbowroom.ir.trace import Op, View

_SCALAR_BYTES = 64
"""Size of a Python number as a tensor: the allocator's smallest block."""
_THREADS = 2

_POINTWISE = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "pow",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "where",
        "lerp",
        "addcmul",
        "addcdiv",
        "atan2",
        "hypot",
        "remainder",
        "fmod",
        "copysign",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "bitwise_and",
        "bitwise_or",
        "xlogy",
        "threshold_backward",
        "gelu_backward",
        "silu_backward",
        "sigmoid_backward",
        "tanh_backward",
        "mse_loss_backward",
        "smooth_l1_loss_backward",
    ]
)
_REDUCTIONS = frozenset(["sum", "mean", "nansum", "prod", "cumsum", "cumprod", "count_nonzero"])
_LOSSES = {
    "mse_loss": 1,
    "l1_loss": 1,
    "smooth_l1_loss": 1,
    "huber_loss": 1,
    "soft_margin_loss": 2,
    "binary_cross_entropy": 2,
    "binary_cross_entropy_with_logits": 2,
}
_HEAVY = ("linalg_", "_linalg_", "fft_", "_fft_", "cholesky", "svd", "triangular_solve", "lu_", "_cdist", "_ctc")


def estimate_workspace(
    op: Op,
    cuda_rates: Mapping[tuple[str, str], float] | None = None,
    *,
    isa: str = "AVX512",
    is_dilated: bool = False,
) -> int:
    """Estimate the workspace of an op in bytes, as an upper bound.

    An unknown op counts as one without workspace, like most ops, unless it is a matrix decomposition, a transform or an
    op from outside PyTorch: these count as copying all that they read and write.

    Args:
        cuda_rates: rates of a CUDA device, by (kind, dtype); None for a CPU.
        isa: instruction set of a CPU, as in `HardwareProfile`.
        is_dilated: whether a convolution's windows have gaps, or some lie entirely in the padding; not recorded in a
            trace.
    """
    if touches_no_bytes(op) or not op.reads:
        return 0
    name = short_name(op)
    if find_kind(op) == "convolution":
        backward = "backward" in name
        if cuda_rates is not None:
            return estimate_cudnn(op, cuda_rates, backward=backward)
        return estimate_convolution(op, backward=backward, isa=isa, is_dilated=is_dilated)
    rule = _RULES.get(name) or _RULES.get(name.rstrip("_"))
    if rule is not None:
        return max(_SCALAR_BYTES, rule(op))
    if name.startswith(_HEAVY) or not op.name.startswith(("aten", "prim")):
        return sum(view_bytes(view) for view in op.reads + op.writes)
    return _SCALAR_BYTES


def _largest(op: Op) -> int:
    return max(view_bytes(view) for view in op.reads + op.writes)


def _is_half(view: View) -> bool:
    return is_floating(view.dtype) and element_bytes(view.dtype) < 4


def _channels(op: Op) -> int:
    return max((view.shape[1] for view in op.reads if len(view.shape) > 1), default=1)


def _cast_operands(op: Op) -> int:
    """Count conversions of operands to the widest dtype."""
    widest = max(element_bytes(view.dtype) for view in op.reads + op.writes)
    kinds = {view.dtype for view in op.reads}
    narrow = [view for view in op.reads if len(kinds) > 1 and element_bytes(view.dtype) < widest]
    mixed = [view for view in op.reads if len(kinds) > 1 and not is_floating(view.dtype) and view not in narrow]
    return widest * sum(count_elements(view) for view in narrow + mixed)


def _reduce(op: Op) -> int:
    """Count the converted copies for means and products in half precision, and for sums of narrow integers."""
    view, results = op.reads[0], sum(count_elements(write) for write in op.writes)
    if is_floating(view.dtype):
        # A sum converts on the fly, unless it keeps the channels, the middle dimension.
        plain = short_name(op) == "sum" and not (len(view.shape) > 2 and results == view.shape[1])
        return 4 * (count_elements(view) + results) if _is_half(view) and not plain else 0
    return 8 * (count_elements(view) + results) if element_bytes(view.dtype) < 8 else 0


def _loss(op: Op) -> int:
    elements = max(count_elements(view) for view in op.reads)
    unreduced = _LOSSES[short_name(op)] * _largest(op)
    return unreduced + (4 * elements if _is_half(op.reads[0]) else 0) + _SCALAR_BYTES


def _product(op: Op) -> int:
    """Count the panels of operands that threads pack, and sums in float32, in half precision."""
    factors = [view for view in op.reads if is_floating(view.dtype)]  # without the offsets of groups
    if not any(map(_is_half, factors)):
        return 0
    left = factors[-2] if len(factors) > 1 else factors[0]
    inner = left.shape[-1] if left.shape else 1
    panels = 180_224 + 1280 * inner + count_elements(left) // 16
    # Panels have a maximum size, larger for a transposed left operand, which in a step only `mm` has.
    packed_bias = short_name(op) in ("addmm", "linear")
    return min(panels, 409_600 if packed_bias else 2_359_296)


def _attention(op: Op) -> int:
    """Count each thread's tile of scores: up to 256 queries by 512 keys, in float32 and the operands' dtype."""
    query, key = op.reads[0], op.reads[1]
    if len(query.shape) < 2 or len(key.shape) < 2:
        return _largest(op)
    length, width = query.shape[-2:]
    rows, columns = _tile(length), min(key.shape[-2], 512)
    single = max(4, element_bytes(query.dtype))
    tile = rows * columns * (6 if _is_half(query) else single) + single * rows * (width + 2)
    return _THREADS * tile


def _attention_backward(op: Op) -> int:
    """Count a contiguous copy of the gradient, and each thread's tiles of scores and of their gradients."""
    gradient, query, key = op.reads[:3] if len(op.reads) >= 3 else (op.reads[0],) * 3
    if len(query.shape) < 2 or len(key.shape) < 2:
        return 2 * _largest(op)
    rows, columns = _tile(query.shape[-2]), min(key.shape[-2], 512)
    half = _is_half(query)
    single = max(4, element_bytes(query.dtype))
    tile = rows * columns * (15 if half else 2 * single) + rows * 128 * single + (16_384 if half else 0)
    return view_bytes(gradient) + _THREADS * tile


def _tile(length: int) -> int:
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32)


def _recurrent(op: Op) -> int:
    """Count the weights in blocked layouts and the gates of the whole sequence in float32; forward also the reserve for
    the backward pass, if the trace does not record its size."""
    inputs, *others = op.reads
    matrices = [view for view in others if len(view.shape) == 2][:2]
    if not matrices or len(inputs.shape) != 3:
        return _largest(op)
    gates = 4 * count_elements(inputs) // max(inputs.shape[-1], 1) * matrices[0].shape[0]
    weights = sum(view_bytes(view) for view in matrices)
    if "backward" in short_name(op):
        copies = 3 if _is_half(inputs) else 2
        states = view_bytes(inputs) + gates // 2
        return math.ceil(1.1 * (gates + copies * weights)) + states + (64 << 10)
    is_known = any(view.dtype == "uint8" and count_elements(view) for view in op.writes)
    kept = 0 if is_known else _count_kept(inputs, matrices[0].shape[0] // 4, gates)
    return math.ceil(1.05 * (gates + weights)) + kept + (64 << 10)


def _count_kept(inputs: View, width: int, gates: int) -> int:
    """Count states, inputs and gradients of the whole sequence, in rows of whole blocks, each kind on separate
    pages."""
    row = 4 * (math.ceil(max(width, inputs.shape[-1]) / 16) * 16 + 16)
    steps, others = inputs.shape[0] + 1, inputs.shape[1] + 1
    rows = max(steps * inputs.shape[1], others * inputs.shape[0])  # whichever of the first two counts the steps
    return gates + math.ceil(11.2 * row * rows) + 10 * 4096


def _normalize_layer(op: Op) -> int:
    """Count a copy of a non-contiguous input (as in a vision transformer), and statistics in float32."""
    rows = math.prod(op.reads[0].shape[:-1]) if _is_half(op.reads[0]) else 0
    return _largest(op) + 2 * 4 * rows


def _batch_norm_backward(op: Op) -> int:
    """Count a copy of the gradient if its layout differs from the input's; for small images, of both."""
    inputs = max(op.reads, key=view_bytes)
    copies = 2 if math.prod(inputs.shape[2:]) <= 64 else 1
    return copies * view_bytes(inputs) + 64 * _channels(op)


def _isin(op: Op) -> int:
    """Count the sort of elements and candidates with their positions. Few candidates are compared one by one
    instead."""
    if len(op.reads) < 2:
        count = count_elements(op.reads[0])
        is_one_candidate = bool(op.writes) and count_elements(op.writes[0]) == count
        return 0 if is_one_candidate else 32 * count  # a Python number is compared in float64
    elements, candidates = map(count_elements, op.reads[:2])
    if candidates < int(10 * math.pow(elements, 0.145)):
        return 0
    widest = max(element_bytes(view.dtype) for view in op.reads)
    return (24 + 2 * widest) * elements + (16 + 2 * widest) * candidates


def _allclose(op: Op) -> int:
    """Count differences, tolerances and comparison results of the broadcast operands."""
    axes = max(len(view.shape) for view in op.reads)
    shapes = [(1,) * (axes - len(view.shape)) + view.shape for view in op.reads]
    widest = max(element_bytes(view.dtype) for view in op.reads)
    elements: int = math.prod(max(sizes) for sizes in zip(*shapes, strict=True))
    return (4 + 3 * widest) * elements + 64 * _SCALAR_BYTES


def _distances(op: Op) -> int:
    """Count both operands with two more columns each, and before that the first one multiplied by -2."""
    if len(op.reads) < 2 or not all(view.shape for view in op.reads):
        return sum(view_bytes(view) for view in op.reads + op.writes)
    (left, left_more), (right, right_more) = (
        (view_bytes(view), 2 * view_bytes(view) // max(1, view.shape[-1])) for view in op.reads[:2]
    )
    first = left + left_more + right_more - sum(view_bytes(view) for view in op.writes)
    return left + left_more + max(right + right_more, first)


def _copy(op: Op) -> int:
    """Count the 60 x 60 tile through which a matrix is transposed."""
    view = op.reads[-1]
    return 3600 * element_bytes(view.dtype) if len(view.shape) == 2 and count_elements(view) >= 3600 else 0


_RULES: dict[str, Callable[[Op], int]] = {
    **dict.fromkeys(_POINTWISE, _cast_operands),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(_LOSSES, _loss),
    # Products in groups are computed one after another.
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "linear", "mv", "addmv", "dot", "_grouped_mm"), _product),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent,
    "native_batch_norm": lambda op: 64 * _channels(op),
    "_native_batch_norm_legit": lambda op: 64 * _channels(op),
    "native_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm": _normalize_layer,
    "native_layer_norm_backward": lambda op: math.ceil(2.02 * _largest(op)) + (16 << 10),
    "native_group_norm": lambda op: 32 * _channels(op) * max(op.reads[0].shape[:1], default=1) + 1024,
    "native_group_norm_backward": lambda op: 32 * _channels(op) * max(op.reads[0].shape[:1], default=1) + 1024,
    # Expanded positions (the token types of BERT) are copied.
    "embedding": lambda op: sum(view_bytes(view) for view in op.reads if not is_floating(view.dtype)),
    "embedding_dense_backward": lambda op: sum(view_bytes(view) for view in op.reads if not is_floating(view.dtype)),
    # A maximum over a bag also records positions.
    "_embedding_bag": lambda op: 2 * sum(view_bytes(view) for view in op.reads[1:]) + _SCALAR_BYTES,
    "_embedding_bag_backward": lambda op: sum(view_bytes(view) for view in op.reads + op.writes),
    "_safe_softmax": lambda op: math.ceil(0.26 * _largest(op)) + _SCALAR_BYTES,
    "logsumexp": lambda op: _largest(op) + 4 * sum(view_bytes(view) for view in op.writes),
    "upsample_nearest2d": lambda op: sum(view_bytes(view) for view in op.reads + op.writes),
    "upsample_bilinear2d": lambda op: sum(view_bytes(view) for view in op.reads + op.writes) + (16 << 10),
    "upsample_bicubic2d": lambda op: sum(view_bytes(view) for view in op.reads + op.writes) + (16 << 10),
    # A copy of the gradient if it is not contiguous.
    **dict.fromkeys([f"upsample_{kind}2d_backward" for kind in ("nearest", "bilinear", "bicubic")], _largest),
    "roll": _largest,  # over several dimensions, one after the other
    "im2col": lambda op: view_bytes(op.reads[0]),
    "col2im": _largest,
    "_adaptive_avg_pool2d_backward": _largest,
    "scatter": lambda op: 4 * count_elements(op.reads[0]),
    "scatter_add": lambda op: 4 * count_elements(op.reads[0]),
    "scatter_reduce": lambda op: 4 * count_elements(op.reads[0]),
    "gather": lambda op: 4 * count_elements(op.reads[0]) if _is_half(op.reads[0]) else 0,
    "sort": lambda op: 32 * (op.reads[0].shape[-1] if op.reads[0].shape else 1),
    # A reordered copy, and for kthvalue the positions of its elements.
    "kthvalue": lambda op: view_bytes(op.reads[0]) + 8 * count_elements(op.reads[0]),
    "median": lambda op: view_bytes(op.reads[0]) + _copy(op),
    "nanmedian": lambda op: view_bytes(op.reads[0]) + _copy(op),
    # A random number for each category and for each result.
    "multinomial": lambda op: view_bytes(op.reads[0]) + sum(view_bytes(view) for view in op.writes) + _SCALAR_BYTES,
    "histc": lambda op: (1 + _THREADS) * sum(view_bytes(view) for view in op.writes) + _SCALAR_BYTES,
    "isin": _isin,
    "allclose": _allclose,
    "_euclidean_dist": _distances,
    "clone": _copy,
    "copy": _copy,
}
