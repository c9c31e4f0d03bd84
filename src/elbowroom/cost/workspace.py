"""Workspace of an op: reordered copies, casts, and scratch memory of its threads, beyond its results.

    live bytes       .--- workspace ---.
                ____/                   \\______ results
         before                                 after

The rules are upper bounds, as tight as a trace allows: it does not record strides, and many ops copy an operand only
where it is not laid out as they like. Where a step was measured, `price` takes what was measured instead.

Source: measured with torch 2.13 on a CPU with two threads: whole training steps of ResNet-50, VGG-16, DenseNet-121,
    MobileNetV3, ConvNeXt, ViT, GPT-2, BERT, LSTM and a U-Net, float32, bfloat16 and autocast, contiguous and
    channels_last, and some 120 single ops. CUDA kernels were not measured: convolutions have rules of their own there
    (`cost.cudnn`), for all else the same ones stand in.
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
"""A Python number as a tensor, the smallest block of the allocator."""
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
    """Bytes that an op allocates inside itself at most, beyond its results.

    An op that is not known is taken to allocate nothing of size, as most do, unless it is a decomposition, a transform
    or an operator from outside PyTorch: these are taken to copy all they read and write.

    Args:
        cuda_rates: of a CUDA device, by (kind, dtype); None for a CPU.
        isa: of a CPU, as in `HardwareProfile`.
        is_dilated: of a convolution, whether its windows have gaps, or some lie beside the image altogether; a trace
            does not tell.
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
    """Operands of another dtype than the widest one are converted first."""
    widest = max(element_bytes(view.dtype) for view in op.reads + op.writes)
    kinds = {view.dtype for view in op.reads}
    narrow = [view for view in op.reads if len(kinds) > 1 and element_bytes(view.dtype) < widest]
    mixed = [view for view in op.reads if len(kinds) > 1 and not is_floating(view.dtype) and view not in narrow]
    return widest * sum(count_elements(view) for view in narrow + mixed)


def _reduce(op: Op) -> int:
    """Means and products of half precision, and sums of narrow integers, run on a converted copy."""
    view, results = op.reads[0], sum(count_elements(write) for write in op.writes)
    if is_floating(view.dtype):
        # A sum converts as it reads, unless it keeps the channels, in the middle.
        plain = short_name(op) == "sum" and not (len(view.shape) > 2 and results == view.shape[1])
        return 4 * (count_elements(view) + results) if _is_half(view) and not plain else 0
    return 8 * (count_elements(view) + results) if element_bytes(view.dtype) < 8 else 0


def _loss(op: Op) -> int:
    elements = max(count_elements(view) for view in op.reads)
    unreduced = _LOSSES[short_name(op)] * _largest(op)
    return unreduced + (4 * elements if _is_half(op.reads[0]) else 0) + _SCALAR_BYTES


def _product(op: Op) -> int:
    """In half precision, threads pack panels of the operands and sum in float32."""
    factors = [view for view in op.reads if is_floating(view.dtype)]  # and not the ends of groups
    if not any(map(_is_half, factors)):
        return 0
    left = factors[-2] if len(factors) > 1 else factors[0]
    inner = left.shape[-1] if left.shape else 1
    panels = 180_224 + 1280 * inner + count_elements(left) // 16
    # A panel has a largest size; one of a transposed left operand, which only `mm` meets in a step, is larger.
    packed_bias = short_name(op) in ("addmm", "linear")
    return min(panels, 409_600 if packed_bias else 2_359_296)


def _attention(op: Op) -> int:
    """Each thread holds the scores of one tile: up to 256 queries by 512 keys, in float32 and the operands' dtype."""
    query, key = op.reads[0], op.reads[1]
    if len(query.shape) < 2 or len(key.shape) < 2:
        return _largest(op)
    length, width = query.shape[-2:]
    rows, columns = _tile(length), min(key.shape[-2], 512)
    single = max(4, element_bytes(query.dtype))
    tile = rows * columns * (6 if _is_half(query) else single) + single * rows * (width + 2)
    return _THREADS * tile


def _attention_backward(op: Op) -> int:
    """A contiguous copy of the gradient, and each thread's tiles of scores and of their gradients."""
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
    """The weights in blocked layouts, and the gates of every step of the sequence in float32. Forward, beside that,
    what is kept for the backward pass, where nothing tells how large that is."""
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
    """States of every step, inputs and gradients among them, in rows of whole blocks; each kind on pages of its own."""
    row = 4 * (math.ceil(max(width, inputs.shape[-1]) / 16) * 16 + 16)
    steps, others = inputs.shape[0] + 1, inputs.shape[1] + 1
    rows = max(steps * inputs.shape[1], others * inputs.shape[0])  # whichever of the first two counts the steps
    return gates + math.ceil(11.2 * row * rows) + 10 * 4096


def _normalize_layer(op: Op) -> int:
    """A copy of an input that is not contiguous (the transposed one of a vision transformer); statistics in float32."""
    rows = math.prod(op.reads[0].shape[:-1]) if _is_half(op.reads[0]) else 0
    return _largest(op) + 2 * 4 * rows


def _batch_norm_backward(op: Op) -> int:
    """A copy of the gradient where it is laid out unlike the input; of small images, of both."""
    inputs = max(op.reads, key=view_bytes)
    copies = 2 if math.prod(inputs.shape[2:]) <= 64 else 1
    return copies * view_bytes(inputs) + 64 * _channels(op)


def _isin(op: Op) -> int:
    """Few candidates are compared one by one; many are sorted among the elements, each with its position."""
    if len(op.reads) < 2:
        count = count_elements(op.reads[0])
        is_one_candidate = bool(op.writes) and count_elements(op.writes[0]) == count
        return 0 if is_one_candidate else 32 * count  # a number is looked for in float64
    elements, candidates = map(count_elements, op.reads[:2])
    if candidates < int(10 * math.pow(elements, 0.145)):
        return 0
    widest = max(element_bytes(view.dtype) for view in op.reads)
    return (24 + 2 * widest) * elements + (16 + 2 * widest) * candidates


def _allclose(op: Op) -> int:
    """Differences and tolerances of operands that are expanded to one shape, and what was found of each element."""
    axes = max(len(view.shape) for view in op.reads)
    shapes = [(1,) * (axes - len(view.shape)) + view.shape for view in op.reads]
    widest = max(element_bytes(view.dtype) for view in op.reads)
    elements: int = math.prod(max(sizes) for sizes in zip(*shapes, strict=True))
    return (4 + 3 * widest) * elements + 64 * _SCALAR_BYTES


def _distances(op: Op) -> int:
    """Both operands with two more columns each; of the first one, first the product with -2."""
    if len(op.reads) < 2 or not all(view.shape for view in op.reads):
        return sum(view_bytes(view) for view in op.reads + op.writes)
    (left, left_more), (right, right_more) = (
        (view_bytes(view), 2 * view_bytes(view) // max(1, view.shape[-1])) for view in op.reads[:2]
    )
    first = left + left_more + right_more - sum(view_bytes(view) for view in op.writes)
    return left + left_more + max(right + right_more, first)


def _copy(op: Op) -> int:
    """A matrix that is transposed on the way goes through a tile of 60 by 60."""
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
    # Positions that are expanded (the token types of BERT) are copied.
    "embedding": lambda op: sum(view_bytes(view) for view in op.reads if not is_floating(view.dtype)),
    "embedding_dense_backward": lambda op: sum(view_bytes(view) for view in op.reads if not is_floating(view.dtype)),
    # The largest of a bag are found with their positions.
    "_embedding_bag": lambda op: 2 * sum(view_bytes(view) for view in op.reads[1:]) + _SCALAR_BYTES,
    "_embedding_bag_backward": lambda op: sum(view_bytes(view) for view in op.reads + op.writes),
    "_safe_softmax": lambda op: math.ceil(0.26 * _largest(op)) + _SCALAR_BYTES,
    "logsumexp": lambda op: _largest(op) + 4 * sum(view_bytes(view) for view in op.writes),
    "upsample_nearest2d": lambda op: sum(view_bytes(view) for view in op.reads + op.writes),
    "upsample_bilinear2d": lambda op: sum(view_bytes(view) for view in op.reads + op.writes) + (16 << 10),
    "upsample_bicubic2d": lambda op: sum(view_bytes(view) for view in op.reads + op.writes) + (16 << 10),
    # Their gradient, where it is not contiguous.
    **dict.fromkeys([f"upsample_{kind}2d_backward" for kind in ("nearest", "bilinear", "bicubic")], _largest),
    "roll": _largest,  # by more than one dimension, one after the other
    "im2col": lambda op: view_bytes(op.reads[0]),
    "col2im": _largest,
    "_adaptive_avg_pool2d_backward": _largest,
    "scatter": lambda op: 4 * count_elements(op.reads[0]),
    "scatter_add": lambda op: 4 * count_elements(op.reads[0]),
    "scatter_reduce": lambda op: 4 * count_elements(op.reads[0]),
    "gather": lambda op: 4 * count_elements(op.reads[0]) if _is_half(op.reads[0]) else 0,
    "sort": lambda op: 32 * (op.reads[0].shape[-1] if op.reads[0].shape else 1),
    # A copy that is reordered, and for kthvalue the positions of its elements.
    "kthvalue": lambda op: view_bytes(op.reads[0]) + 8 * count_elements(op.reads[0]),
    "median": lambda op: view_bytes(op.reads[0]) + _copy(op),
    "nanmedian": lambda op: view_bytes(op.reads[0]) + _copy(op),
    # A random number for each category, and those of the chosen ones.
    "multinomial": lambda op: view_bytes(op.reads[0]) + sum(view_bytes(view) for view in op.writes) + _SCALAR_BYTES,
    "histc": lambda op: (1 + _THREADS) * sum(view_bytes(view) for view in op.writes) + _SCALAR_BYTES,
    "isin": _isin,
    "allclose": _allclose,
    "_euclidean_dist": _distances,
    "clone": _copy,
    "copy": _copy,
}
