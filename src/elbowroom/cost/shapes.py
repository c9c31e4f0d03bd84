"""Facts that follow from an op's views: bytes, dtypes, and which ops touch no bytes at all."""

from __future__ import annotations

import math
import re

from elbowroom.ir.trace import Op, View

_BITS = re.compile(r"\d+")
_SIZES = {"bool": 1, "bfloat16": 2, "complex32": 4, "complex64": 8, "complex128": 16}
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


def short_name(op: Op) -> str:
    """The op without its namespace and overload: "convolution" for "aten.convolution.default"."""
    parts = op.name.replace("::", ".").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def element_bytes(dtype: str) -> int:
    """Bytes of one element: 4 for "float32", 1 for "float8_e4m3fn"; 4 for a dtype that is not known."""
    if dtype in _SIZES:
        return _SIZES[dtype]
    bits = _BITS.search(dtype)
    return max(int(bits[0]) // 8, 1) if bits else 4


def count_elements(view: View) -> int:
    """Elements of a view; 1 for a scalar."""
    return math.prod(view.shape)


def view_bytes(view: View) -> int:
    """Bytes of a view's elements, each counted once for every place it appears in."""
    return count_elements(view) * element_bytes(view.dtype)


def is_floating(dtype: str) -> bool:
    """Tell whether a dtype is floating-point or complex."""
    return dtype.startswith(("float", "bfloat", "complex"))


def touches_no_bytes(op: Op) -> bool:
    """Tell whether an op touches no bytes: it makes a view of a storage, or allocates memory without contents."""
    if short_name(op) in _ALLOCATIONS:
        return True
    read = {(view.storage, view.version) for view in op.reads}
    return bool(op.writes) and all((view.storage, view.version) in read for view in op.writes)
