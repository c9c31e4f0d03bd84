"""Facts that follow from an op's views: bytes, dtypes, and whether it touches any bytes."""

from __future__ import annotations

import math
import re

from elbowroom.ir.trace import Op, View
from elbowroom.ir.updates import MARKS

_BITS = re.compile(r"\d+")
_SIZES = {"bool": 1, "bfloat16": 2, "complex32": 4, "complex64": 8, "complex128": 16}
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


def short_name(op: Op) -> str:
    """Return an op's name without namespace and overload: "convolution" for "aten.convolution.default"."""
    parts = op.name.replace("::", ".").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element: 4 for "float32", 1 for "float8_e4m3fn"; 4 for an unknown dtype."""
    if dtype in _SIZES:
        return _SIZES[dtype]
    bits = _BITS.search(dtype)
    return max(int(bits[0]) // 8, 1) if bits else 4


def count_elements(view: View) -> int:
    """Return the number of elements of a view; 1 for a scalar."""
    return math.prod(view.shape)


def view_bytes(view: View) -> int:
    """Return the bytes of a view's elements; those of an expanded view are counted repeatedly."""
    return count_elements(view) * element_bytes(view.dtype)


def is_floating(dtype: str) -> bool:
    """Tell whether a dtype is floating-point or complex."""
    return dtype.startswith(("float", "bfloat", "complex"))


def makes_only_a_view(op: Op) -> bool:
    """Tell whether an op makes a view of its one argument, or reads one number: it writes nothing (`Op.writes`)."""
    return len(op.reads) == 1 and not op.writes and not op.flops


def touches_no_bytes(op: Op) -> bool:
    """Tell whether an op only makes views of a storage, allocates uninitialized memory, or marks a place."""
    if short_name(op) in _ALLOCATIONS or op.name in MARKS:
        return True
    read = {(view.storage, view.version) for view in op.reads}
    return bool(op.writes) and all((view.storage, view.version) in read for view in op.writes)
