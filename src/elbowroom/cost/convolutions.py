"""Workspace of a convolution on a CPU: copies of its operands in the layouts of its kernels.

- **Blocked.** oneDNN works on blocked layouts (channels in groups of 16), so operands are copied in and results out; in
  half precision gradients of weights are summed in float32 as well. How many copies are alive at once depends on
  layouts, which a trace does not record, and on kernels that oneDNN picks by shape. So the coefficients below were
  fitted to measurements, by linear programming: as small as possible, yet never below what was seen.
- **Multiplied.** Convolutions that oneDNN's kernels do not support without AVX-512 use matrix products.
- **Written out.** Convolutions that PyTorch does not pass to oneDNN use its own kernels, which write out the window of
  every element of the result, for the whole batch (im2col).

Source: measured with torch 2.13 (oneDNN inside), two threads. With AVX-512: 6,500 different convolutions, both ways,
    of ResNet-50, VGG-16, DenseNet-121, MobileNetV3, ConvNeXt, ViT, a U-Net and 2,000 random shapes, float32 and
    bfloat16, contiguous and channels_last; 3,000 random shapes more raised the coefficients of 1x1 kernels. With AVX2:
    16,000 in float32, which the same coefficients cover but for what is multiplied and for groups; 9,000 in other
    dtypes, all written out. More threads need more, where each thread has its own scratch.
"""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

from elbowroom.cost.shapes import element_bytes, view_bytes
from elbowroom.ir.trace import Op, View

_BLOCK = 16
_SMALL_BYTES = 128 << 10
"""Scratch memory of each call, independent of its shape."""

_COEFFICIENTS = {
    (False, "dense", "half"): (0.98, 0, 0.14, 0, 1.86, 0, 0),
    (False, "dense", "single"): (0.98, 0, 0, 0.03, 1.87, 0.2, 0),
    (False, "depthwise", "half"): (0.7, 1.31, 0, 0, 0, 0.02, 0),
    (False, "depthwise", "single"): (0.65, 1.52, 0, 0, 0, 0, 0.07),
    (False, "grouped", "half"): (0, 0, 0, 0, 157.59, 35.44, 12.85),
    (False, "grouped", "single"): (0, 0, 0, 0.92, 117.9, 1.07, 0),
    (False, "other", "half"): (2.04, 0, 0.25, 0, 1.06, 0.07, 4.48),
    (False, "other", "single"): (0, 0, 0, 1.64, 1.7, 17.76, 0.52),
    (False, "other grouped", "half"): (0, 11.18, 0.47, 3.31, 0.98, 0.44, 5.14),
    (False, "other grouped", "single"): (0, 0.53, 0, 0.91, 128.04, 4.67, 0),
    (False, "pointwise", "half"): (0, 0.39, 1.05, 0.32, 1.05, 0.49, 4.08),
    (False, "pointwise", "single"): (0, 0.01, 1.0, 0.83, 0.98, 0.02, 1.04),
    (False, "strided pointwise", "half"): (0, 0.55, 1.12, 1.0, 1.05, 0.61, 3.01),
    (False, "strided pointwise", "single"): (1.05, 0.02, 0.11, 0, 1.21, 0.5, 0),
    (True, "dense", "half"): (0.36, 0, 0.95, 0.73, 4.05, 1.83, 2.26),
    (True, "dense", "single"): (0.74, 0, 1.05, 0.14, 2.82, 0, 0.89),
    (True, "depthwise", "half"): (0, 0.08, 0, 0, 817.23, 18.51, 14.08),
    (True, "depthwise", "single"): (0.98, 1.03, 0, 0, 255.14, 0, 0),
    (True, "grouped", "half"): (0, 0, 0, 0, 387.78, 40.77, 0),
    (True, "grouped", "single"): (0, 3.33, 0.4, 0.07, 113.03, 1.22, 0),
    (True, "other", "half"): (0, 0.67, 1.37, 1.52, 4.14, 1.63, 0.66),
    (True, "other", "single"): (0.35, 1.83, 0, 0.31, 8.35, 12.35, 1.46),
    (True, "other grouped", "half"): (0, 0, 0, 0.52, 788.42, 19.47, 16.25),
    (True, "other grouped", "single"): (0, 0.51, 0, 1.25, 256.97, 0.69, 0.4),
    (True, "pointwise", "half"): (0, 0.18, 0.91, 1.04, 2.1, 2.62, 1.56),
    (True, "pointwise", "single"): (0.01, 0, 1.01, 1.01, 2.05, 0, 0),
    (True, "strided pointwise", "half"): (1.0, 0, 1.05, 0, 2.1, 0.4, 4.63),
    (True, "strided pointwise", "single"): (1.0, 0, 1.05, 0, 2.0, 0, 2.05),
}
"""Bytes allocated per byte of: the larger and the smaller of input and output, input, output, weight, one image of the
input, one image of the output; channels of all of them rounded up to whole blocks. By (backward, kind, precision)."""

_BLOCKED = {"AVX512": ("float32", "bfloat16"), "AVX2": ("float32",)}
"""Dtypes that PyTorch passes to oneDNN, by instruction set."""

_WRITTEN_OUT = {"AVX512": ("float64",), "AVX2": ("float64", "bfloat16", "float16")}
"""Dtypes that it never passes to oneDNN. For dtypes in neither table, both are possible."""


class _Geometry(NamedTuple):
    source: View
    weight: View
    result: View
    groups: int


def estimate_convolution(op: Op, *, backward: bool, isa: str, is_dilated: bool) -> int:
    """Estimate the workspace of a convolution in bytes.

    Args:
        op: reads input, weight and an optional bias; a backward op reads the gradient of the result before them.
        isa: the processor's instruction set, as in `HardwareProfile`.
        is_dilated: whether windows have gaps, or some lie entirely in the padding.
    """
    geometry = _read_geometry(op, backward=backward)
    if geometry is None:
        return sum(view_bytes(view) for view in op.reads + op.writes)
    dtype = geometry.source.dtype
    if dtype in _WRITTEN_OUT.get(isa, ()):
        return _estimate_written_out(geometry, backward=backward)
    blocked = _estimate_blocked(geometry, backward=backward)
    if dtype not in _BLOCKED.get(isa, ()):
        return max(blocked, _estimate_written_out(geometry, backward=backward))
    if isa == "AVX512":
        return blocked
    return max(blocked, _estimate_multiplied(geometry, backward=backward, is_dilated=is_dilated))


def _estimate_blocked(geometry: _Geometry, *, backward: bool) -> int:
    source, _, result, _ = geometry
    inputs, outputs, weights = _count_blocked(geometry)
    precision = "half" if element_bytes(source.dtype) < 4 else "single"
    coefficients = _COEFFICIENTS[backward, _name_kind(geometry), precision]
    amounts = (
        max(inputs, outputs),
        min(inputs, outputs),
        inputs,
        outputs,
        weights,
        inputs / max(source.shape[0], 1),
        outputs / max(result.shape[0], 1),
    )
    return _SMALL_BYTES + math.ceil(math.fsum(map(operator.mul, coefficients, amounts)))


def _estimate_multiplied(geometry: _Geometry, *, backward: bool, is_dilated: bool) -> int:
    """Count the windows of an image for each of two threads, and weight gradients per image, in several layouts."""
    source, weight, _, groups = geometry
    inputs, outputs, weights = _count_blocked(geometry)
    is_large = any(kernel > pixels for kernel, pixels in zip(weight.shape[2:], source.shape[2:], strict=True))
    if is_dilated or (backward and is_large):
        images = max(source.shape[0], 1)
        copies = 2 if not backward else 8.4 if images > 1 else 4.2
        windows = 2 * _count_windows(geometry) / images
        windows = windows if is_dilated else min(windows, 2 * weights)
        return _SMALL_BYTES + math.ceil(1.05 * (inputs + outputs) + copies * weights + windows)
    if groups == 1:
        return 0
    more = max(inputs, outputs) if backward else 0
    return _SMALL_BYTES + math.ceil(1.1 * (inputs + outputs)) + more + weights


def _estimate_written_out(geometry: _Geometry, *, backward: bool) -> int:
    """Count all windows, and a copy of each operand (or of its groups) in another layout. In half precision the
    gradient of a bias is summed in float32."""
    source, weight, result, _ = geometry
    copies = sum(map(view_bytes, (source, weight, result)))
    bias = 3 * view_bytes(result) if backward and element_bytes(result.dtype) < 4 else 0
    return _SMALL_BYTES + max(copies + _count_windows(geometry), bias)


def _count_windows(geometry: _Geometry) -> int:
    """Return the bytes of the windows of a whole batch. A transposed convolution has windows of the result."""
    source, weight, result, _ = geometry
    window = math.prod(weight.shape[2:]) * element_bytes(source.dtype) * source.shape[0]
    forward, transposed = source.shape[1] * math.prod(result.shape[2:]), result.shape[1] * math.prod(source.shape[2:])
    return window * (max(forward, transposed) if _may_be_transposed(geometry) else forward)


def _count_blocked(geometry: _Geometry) -> tuple[int, int, int]:
    """Return the bytes of input, result and weight, with channels rounded up to whole blocks."""
    source, weight, result, groups = geometry
    weights = _blocked_bytes(weight, (0, 1)) if groups == 1 else view_bytes(weight)
    return _blocked_bytes(source, (1,)), _blocked_bytes(result, (1,)), weights


def _read_geometry(op: Op, *, backward: bool) -> _Geometry | None:
    if len(op.reads) < 2 + backward or not op.writes:
        return None
    source, weight = op.reads[1:3] if backward else op.reads[:2]
    result = op.reads[0] if backward else op.writes[0]
    shapes = (source.shape, weight.shape, result.shape)
    # Without a batch dimension, or with another argument order, the op is not one of those measured.
    if len({len(shape) for shape in shapes}) != 1 or len(source.shape) < 3 or not math.prod(weight.shape):
        return None
    # The weight is (out, in / groups) or, transposed, (in, out / groups).
    groups = source.shape[1] * result.shape[1] // (weight.shape[0] * weight.shape[1])
    return _Geometry(source, weight, result, max(groups, 1))


def _name_kind(geometry: _Geometry) -> str:
    source, weight, result, groups = geometry
    inner, outer = math.prod(source.shape[2:]), math.prod(result.shape[2:])
    transposed = _may_be_transposed(geometry)
    dimensions = len(source.shape) - 2
    if groups > 1:
        if transposed or dimensions != 2:
            return "other grouped"
        return "depthwise" if weight.shape[:2] == (groups, 1) else "grouped"
    if transposed or dimensions == 3:
        return "other"
    if math.prod(weight.shape[2:]) > 1:
        return "dense"
    return "pointwise" if inner == outer else "strided pointwise"


def _may_be_transposed(geometry: _Geometry) -> bool:
    source, weight, result, _ = geometry
    return weight.shape[0] != result.shape[1] or math.prod(result.shape[2:]) > math.prod(source.shape[2:])


def _blocked_bytes(view: View, dimensions: tuple[int, ...]) -> int:
    shape = [
        math.ceil(size / _BLOCK) * _BLOCK if dimension in dimensions else size
        for dimension, size in enumerate(view.shape)
    ]
    return math.prod(shape) * element_bytes(view.dtype)
