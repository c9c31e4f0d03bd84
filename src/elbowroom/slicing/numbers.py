"""Numbers among the arguments of an op, as far as they decide which kernel computes it, and how it rounds.

An optimizer's step size and bias corrections are other numbers in every step. What holds for one holds for all.
"""

from __future__ import annotations

import struct
from typing import Any

from elbowroom.slicing.op_call import OpCall

ARITHMETIC = frozenset(
    ("add", "sub", "mul", "div", "addcmul", "addcdiv", *("_fused_adam", "_fused_adamw", "_fused_sgd"))
)
"""Ops whose kernels, also those over lists, multiply, divide or scale by a number, in the same way by each that has no
special value."""

LIMIT = 1e12
"""Larger numbers, and smaller ones than its inverse, may overflow."""


def describe_numbers(call: OpCall, value: Any) -> Any:
    """Return what an argument that is no tensor is known by (see `describe_number`)."""
    if isinstance(value, (list, tuple)):
        return [describe_numbers(call, each) for each in value]
    return describe_number(call, value) if isinstance(value, float) else value


def describe_number(call: OpCall, value: float) -> str:
    """Return what a floating-point argument of an op is known by: its sign alone, if it is like most others.

    Others are known by their value: products with a power of two, or with a number of few digits, need no rounding, and
    so do not show whether a kernel rounds them before it adds.
    """
    name = call.op._opname.removeprefix("_foreach_").rstrip("_")
    is_arithmetic = name in ARITHMETIC and call.values.get("rounding_mode") is None
    if not is_arithmetic or not 1 / LIMIT < abs(value) < LIMIT:
        return repr(value)
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if bits & 0xFF == 0:  # of its 24 binary digits, 16 would do
        return repr(value)
    return "positive" if value > 0 else "negative"
