"""Tells how an op can be cut, by the rule of its overload name."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from elbowroom import _family
from elbowroom.ir.slicing import SlicePass
from elbowroom.slicing import rules
from elbowroom.slicing.op_call import OpCall, bind, find_targets
from elbowroom.slicing.rule import Alternatives, SliceRule


@functools.cache
def list_rules() -> dict[str, SliceRule]:
    """Return all rules by overload name ("aten.convolution.default")."""
    found: dict[str, SliceRule] = {}
    for name in _family.names(rules):
        found.update(_family.get(rules, name, "RULES"))
    return found


def find_passes(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, with_partial: bool = False
) -> Alternatives:
    """Return the ways to cut an op, best first; () if there is none.

    Args:
        args: the op's arguments; tensors may be fake.
        with_partial: include passes that are partial.
    """
    rule = list_rules().get(str(op))
    if rule is None:
        return ()
    call = bind(op, args, kwargs)
    if not call.find_mask() or not all(map(is_plain, call.reads)) or _crosses_devices(call) or _overlaps(call):
        return ()
    found = rule.find_passes(call)
    return found if with_partial else tuple(each for each in found if not any(part.is_partial for part in each))


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the elements of a tensor are those of its memory, in the order of its strides."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())


def _crosses_devices(call: OpCall) -> bool:
    """Tell whether a call reads tensors on several devices, or asks for a result elsewhere."""
    devices = {each.device for each in call.reads if each.ndim}
    if call.values.get("device") is not None:
        devices.add(torch.device(call.values["device"]))
    return len(devices) > 1 or bool(call.values.get("pin_memory"))


def _overlaps(call: OpCall) -> bool:
    """Tell whether an in-place op reads elements that another slice may have written before."""

    def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
        """Tell whether two tensors may have the same memory, and are not the same elements in the same order."""
        places = [(each.storage_offset(), each.shape, each.stride()) for each in (first, second)]
        return first.untyped_storage()._cdata == second.untyped_storage()._cdata and places[0] != places[1]

    return any(overlap(call.reads[index], each) for index in find_targets(call) for each in call.reads)


def find_passes_along(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], dimension: int, result: int = 0
) -> Alternatives:
    """Return the ways to cut an op that narrow one of its results along a dimension.

    Raises:
        ValueError: the op's slices along this dimension depend on each other, or it has no rule.
    """
    alternatives = find_passes(op, args, kwargs)
    found = tuple(each for each in alternatives if dimension in _find_dimensions((each,), result))
    if not found:
        others = ", ".join(map(str, sorted(_find_dimensions(alternatives, result))))
        reason = f"its slices are independent only along {others or 'none'}" if alternatives else "it has no rule"
        raise ValueError(f"{op} cannot be cut along dimension {dimension} of its result {result}: {reason}")
    return found


def check_passes(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], passes: Sequence[SlicePass]) -> None:
    """Check that passes are one of the ways to cut an op.

    Raises:
        ValueError: they are not, so slices may depend on each other, or results may be missing.
    """
    alternatives = find_passes(op, args, kwargs, with_partial=True)
    if not alternatives:
        raise ValueError(f"{op} cannot be cut: it has no rule for these arguments")
    if tuple(passes) not in alternatives:
        raise ValueError(
            f"{op} cannot be cut by these passes: its slices are not known to be independent. Known are: "
            + "; ".join(map(str, alternatives))
        )


def _find_dimensions(alternatives: Alternatives, result: int) -> set[int]:
    loops = (loop for each in alternatives for part in each if result in part.results for loop in part.loops)
    return {dimension for loop in loops if (dimension := loop.writes[result]) is not None}
