"""Chooses how an op is cut into slices, and how large these are."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from elbowroom._folders import find_temporary
from elbowroom.errors import NO_ROOM, Infeasible, MemoryRefused
from elbowroom.ir.slicing import SlicePass, count_parts, count_whole_bytes
from elbowroom.slicing.exactness_store import Exactness, ExactnessStore
from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.probe import find_exact, memory_in_files
from elbowroom.slicing.registry import find_passes
from elbowroom.slicing.rule import Alternatives
from elbowroom.slicing.vector_ends import ELEMENTWISE, find_telling

logger = logging.getLogger(__name__)

PROBED = (0.75, 0.35, 0.15, 0.05)
"""Tensors of a probe take at most this share of the budget; less is tried if kernels' workspaces do not fit beside."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A way to run an op in slices.

    Attributes:
        passes: that compute its results.
        parts: number of slices of each loop, by pass.
        exactness: answer of the probe; INEXACT for cuts that change the order of a sum.
    """

    passes: tuple[SlicePass, ...]
    parts: Mapping[SlicePass, tuple[int, ...]]
    exactness: Exactness

    @property
    def is_finest(self) -> bool:
        """True if no slice can be smaller."""
        return all(
            count >= max(1, math.ceil(loop.length / loop.multiple))
            for each in self.passes
            for loop, count in zip(each.loops, self.parts[each], strict=True)
        )


class SliceChooser:
    """Chooses cuts of ops.

    Args:
        is_exact: whether only cuts are allowed that give the bits of the whole op on this machine. Others change the
            order of a sum.
        folder: of the temporary files in which probes run ops that do not fit. Default: the system's.
    """

    def __init__(self, *, is_exact: bool, folder: str | None = None) -> None:
        self.is_exact = is_exact
        self._folder = folder
        self._store: ExactnessStore | None = None

    def choose(
        self, call: OpCall, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor],
        slice_bytes: int, budget_bytes: int, excluded: Collection[tuple[SlicePass, ...]] = (),
    ) -> Cut | None:  # fmt: skip
        """Return a cut whose slices take at most `slice_bytes`, where they can be that small; None if there is none.

        It is an exact one if any is known to be.

        Args:
            results: of the op, as they will be.
            excluded: passes of other cuts.
        """
        alternatives = find_passes(call.op, args, kwargs, with_partial=True)
        sizes = (_count_bytes(call.reads), _count_bytes(results))
        whole_bytes = {each: count_whole_bytes(each, *sizes) for each in alternatives if each not in excluded}
        alternatives = tuple(
            sorted((each for each in whole_bytes if whole_bytes[each] <= budget_bytes), key=whole_bytes.__getitem__)
        )
        parts = {each: count_parts(each, *sizes, slice_bytes) for passes in alternatives for each in passes}
        found = self._find_exact(call, args, kwargs, alternatives, parts, budget_bytes)
        if found is not None:
            return Cut(found[0], parts, found[1])
        if not alternatives:
            return None
        summing = [each for each in alternatives if any(part.sums for part in each)]
        return Cut(summing[0] if summing and not self.is_exact else alternatives[0], parts, Exactness.INEXACT)

    def judge(self, call: OpCall, slice_pass: SlicePass, count: int, budget_bytes: int) -> Exactness | None:
        """Return the answer of the probe for one loop in so many slices; None if such slices are not allowed."""
        args, kwargs = call.order(call.values)
        parts = {slice_pass: (count,)}
        found = self._find_exact(call, args, kwargs, ((slice_pass,),), parts, budget_bytes)
        if found is not None:
            return found[1]
        return None if self.is_exact else Exactness.INEXACT

    def _find_exact(
        self, call: OpCall, args: Sequence[Any], kwargs: Mapping[str, Any], alternatives: Alternatives,
        parts: Mapping[SlicePass, tuple[int, ...]], budget_bytes: int,
    ) -> tuple[tuple[SlicePass, ...], Exactness] | None:  # fmt: skip
        if self._store is None:
            self._store = ExactnessStore()
        folder = self._folder or find_temporary()
        if str(call.op) in ELEMENTWISE:
            with contextlib.suppress(*NO_ROOM, RuntimeError), memory_in_files(folder):
                find_telling(call)  # its answer is kept
        for share in PROBED:
            with contextlib.suppress(*NO_ROOM):
                if str(call.op) in ELEMENTWISE and find_telling(call) is None:
                    parts = {each: tuple(loop.length for loop in each.loops) for each in parts}  # any others, too
                return find_exact(
                    call.op, args, kwargs, alternatives, parts.__getitem__, store=self._store,
                    limit_bytes=share * budget_bytes, folder=folder,
                )  # fmt: skip
        return None


def explain(refusal: Infeasible | MemoryRefused, call: OpCall, *, is_exact: bool) -> Infeasible | MemoryRefused:
    """Return the error for an op that was refused as a whole, with the reason why it cannot run in slices."""
    if isinstance(refusal, MemoryRefused):
        return refusal
    reason = "it cannot run in slices with these arguments"
    if is_exact and find_passes(call.op, *call.order(call.values), with_partial=True):
        reason = (
            "no slices that fit are known to give the same bits on this machine; with exact=False, those are used that "
            "change the order of a sum"
        )
    refusal.add(f"{call.op} has no room as a whole, and {reason}.")
    return refusal


def _count_bytes(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [each.numel() * each.element_size() for each in tensors]
