"""Chooses how an op is cut into slices, and how large these are."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from elbowroom._folders import find_temporary
from elbowroom.errors import NO_ROOM, Infeasible, MemoryRefused
from elbowroom.ir.slicing import SlicePass, count_parts, count_whole_bytes
from elbowroom.slicing.exactness_store import Exactness, ExactnessStore
from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.probe import memory_in_files, probe_each
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
        is_larger: whether slices are larger than they were to be, as smaller ones are not exact.
    """

    passes: tuple[SlicePass, ...]
    parts: Mapping[SlicePass, tuple[int, ...]]
    exactness: Exactness
    is_larger: bool = False

    def is_finest(self, slice_pass: SlicePass) -> bool:
        """Return True if no slice of a pass can be smaller."""
        return _are_finest(slice_pass, self.parts[slice_pass])


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
        self, call: OpCall, results: Sequence[torch.Tensor], sizes: Sequence[int], budget_bytes: int, *,
        former: Cut | None = None, excluded: Collection[tuple[SlicePass, ...]] = (),
        halvings: Mapping[SlicePass, int] = MappingProxyType({}),
    ) -> Cut | None:  # fmt: skip
        """Return a cut; None if there is none that is allowed. It is an exact one if any is known to be.

        Args:
            results: of the op, as they will be.
            sizes: bytes of a slice, where it can be that small, in the order in which they are tried. Inexact slices
                have the first size.
            former: cut with which the op has run, chosen again if it is exact.
            excluded: passes of other cuts.
            halvings: how many times smaller, as a power of 2, the slices of a pass are to be.
        """
        args, kwargs = call.order(call.values)
        found = find_passes(call.op, args, kwargs, with_partial=True)
        nbytes = (_count_bytes(call.reads), _count_bytes(results))
        whole_bytes = {each: count_whole_bytes(each, *nbytes) for each in found if each not in excluded}
        alternatives = tuple(
            sorted((each for each in whole_bytes if whole_bytes[each] <= budget_bytes), key=whole_bytes.__getitem__)
        )
        if former is not None and former.passes in alternatives and former.exactness.is_exact:
            answers = self._probe(call, former.passes, former.parts, budget_bytes)
            if len(answers) == len(former.passes):
                return dataclasses.replace(former, exactness=_find_weakest(answers.values()))
        every = dict.fromkeys(each for passes in alternatives for each in passes)
        tried = sizes if self.is_exact else sizes[:1]
        parts = [
            {each: count_parts(each, *nbytes, max(1, size >> halvings.get(each, 0))) for each in every}
            for size in tried
        ]
        exact = self._find_exact(call, alternatives, parts, budget_bytes)
        if exact is not None or self.is_exact or not alternatives:
            return exact
        summing = [each for each in alternatives if any(part.sums for part in each)]
        return Cut(summing[0] if summing else alternatives[0], parts[0], Exactness.INEXACT)

    def judge(self, call: OpCall, slice_pass: SlicePass, count: int, budget_bytes: int) -> Exactness | None:
        """Return the answer of the probe for one loop in so many slices; None if such slices are not allowed."""
        found = self._probe(call, (slice_pass,), {slice_pass: (count,)}, budget_bytes).get(slice_pass)
        return found if found or self.is_exact else Exactness.INEXACT

    def _find_exact(
        self, call: OpCall, alternatives: Alternatives, sizes: Sequence[Mapping[SlicePass, tuple[int, ...]]],
        budget_bytes: int,
    ) -> Cut | None:  # fmt: skip
        """Return the first of several ways to cut an op that is exact. Each pass has slices of its own size.

        Ways that sum over slices are left out: they change the order of a sum.

        Args:
            sizes: number of slices of each loop, by pass, in the order in which they are tried.
        """
        found: dict[SlicePass, tuple[tuple[int, ...], Exactness]] = {}
        tried = set[tuple[SlicePass, tuple[int, ...]]]()
        for parts in sizes:
            for passes in alternatives:
                if any(each.sums for each in passes):
                    continue
                left = [each for each in passes if each not in found and (each, parts[each]) not in tried]
                tried.update((each, parts[each]) for each in left)
                for each, answer in self._probe(call, left, parts, budget_bytes).items():
                    found[each] = (parts[each], answer)
                if all(each in found for each in passes):
                    chosen = {each: found[each][0] for each in passes}
                    is_larger = any(math.prod(chosen[each]) < math.prod(sizes[0][each]) for each in passes)
                    return Cut(passes, chosen, _find_weakest(found[each][1] for each in passes), is_larger)
        return None

    def _probe(
        self, call: OpCall, passes: Sequence[SlicePass], parts: Mapping[SlicePass, tuple[int, ...]], budget_bytes: int
    ) -> dict[SlicePass, Exactness]:
        """Return the answers for the passes that are exact."""
        if not passes:
            return {}
        if self._store is None:
            self._store = ExactnessStore()
        folder = self._folder if self._folder is not None and os.path.isdir(self._folder) else find_temporary()
        if str(call.op) in ELEMENTWISE:
            with contextlib.suppress(*NO_ROOM, RuntimeError), memory_in_files(folder):
                find_telling(call)  # its answer is kept

        def probe(share: float) -> dict[SlicePass, Exactness]:
            asked = parts
            if str(call.op) in ELEMENTWISE and find_telling(call) is None:
                asked = {each: tuple(loop.length for loop in each.loops) for each in passes}  # any others, too
            found = probe_each(
                call, passes, asked.__getitem__, store=self._store, limit_bytes=share * budget_bytes, folder=folder
            )
            return {each: answer for each, answer in found.items() if answer.is_exact}

        for share in PROBED:
            with contextlib.suppress(*NO_ROOM):
                return probe(share)
        with contextlib.suppress(*NO_ROOM, RuntimeError), memory_in_files(folder):
            return probe(PROBED[0])  # little is free, of whatever budget
        return {}


def _are_finest(slice_pass: SlicePass, parts: Sequence[int]) -> bool:
    return all(
        count >= max(1, math.ceil(loop.length / loop.multiple))
        for loop, count in zip(slice_pass.loops, parts, strict=True)
    )


def _find_weakest(answers: Iterable[Exactness]) -> Exactness:
    return max(answers, key=list(Exactness).index)


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
