"""Runs an op in slices if it has no room as a whole.

Arguments and results that are too large stay in the tier below; each slice is read, computed and written back:

    read      |1|2|3|4|
    compute     |1|2|3|4|
    write         |1|2|3|4|
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.errors import Infeasible
from elbowroom.ir.slicing import Loop, SlicePass
from elbowroom.runtime.copies import Copy
from elbowroom.runtime.sections import Section, Sections
from elbowroom.slicing.bounds import Bounds, is_summed, iterate_slices, narrow_read, narrow_result, pack
from elbowroom.slicing.calls import make_results, run_slice
from elbowroom.slicing.op_call import OpCall, bind, find_target
from elbowroom.slicing.registry import find_passes, list_rules

logger = logging.getLogger(__name__)

SLICE = 8
"""Tensors of one slice take at most this share of the budget, at first."""

LARGE = 8
"""Results above this share of the budget stay away."""


class Tracer(Protocol):
    """Records an op of the program, which `call` runs."""

    def record_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any: ...


@dataclasses.dataclass(slots=True)
class _Results:
    """Results of an op, on the device or away.

    Attributes:
        tensors: in order.
        rewritten: the copy that an in-place op writes to, in place of its argument's; None if it writes where that is.
    """

    tensors: list[torch.Tensor]
    rewritten: Copy | None = None


class SlicedOps(TorchDispatchMode):
    """Runs ops of one room in slices.

    Args:
        sections: moves parts of storages.
        begin: called before the first result that is away.
        choose: chooses one of several ways to cut an op, given the sizes of slices; None if none of them is exact.

    Attributes:
        budget_bytes: of the room.
        tracer: records the ops of the running step; None if it is not traced.
        names: ops that ran in slices, by name, and how often.
    """

    def __init__(
        self,
        sections: Sections,
        begin: Callable[[], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sections = sections
        self._begin = begin
        self._refused = set[tuple[Any, ...]]()
        self._refusal: Infeasible | None = None
        self._table: Any = None
        self.budget_bytes = 0
        self.tracer: Tracer | None = None
        self.names: dict[str, int] = {}

    def begin_step(self, budget_bytes: int, tracer: Tracer | None, table: Any) -> None:
        """Begin a step. `table`: of the step's storages; results that are away are not managed there."""
        self.budget_bytes = budget_bytes
        self.tracer = tracer
        self._table = table

    @property
    def knows_any(self) -> bool:
        """True if ops are known that have no room as a whole."""
        return bool(self._refused)

    def wants(self, name: str, tensors: Sequence[torch.Tensor], refusal: object) -> bool:
        """Tell whether an op is to run in slices.

        Args:
            name: of the overload.
            tensors: among its arguments.
            refusal: the error with which it failed as a whole; None if it has not run yet.
        """
        key = (name, self.budget_bytes, *((tuple(each.shape), each.dtype) for each in tensors))
        if refusal is None:
            return key in self._refused
        if not isinstance(refusal, Infeasible) or name not in list_rules():
            return False
        self._refused.add(key)
        self._refusal = refusal
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def call() -> Any:
            return self._run(func, args, kwargs or {})

        return call() if self.tracer is None else self.tracer.record_op(func, args, kwargs or {}, call)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        alternatives = find_passes(func, args, kwargs)
        if not alternatives:
            raise self._refusal or Infeasible(
                needed_bytes=self.budget_bytes, budget_bytes=self.budget_bytes, op=str(func), is_whole_step=False,
                note="It cannot run in slices with these arguments.",
            )  # fmt: skip
        call = bind(func, args, kwargs)
        passes = alternatives[0]
        with self._sections.slicing:
            results = self._make_results(call, args, kwargs, passes)
            is_whole = False
            try:
                for slice_pass in passes:
                    _Pass(self, call, args, kwargs, slice_pass, results).run()
                is_whole = True
            finally:
                if results.rewritten is not None:
                    self._sections.end_rewriting(results.tensors[0], results.rewritten, is_whole=is_whole)
        self.names[str(func)] = self.names.get(str(func), 0) + 1
        return _assemble(call, results.tensors)

    def _make_results(
        self, call: OpCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], passes: Sequence[SlicePass]
    ) -> _Results:
        target = find_target(call)
        if target is not None:
            tensor = call.reads[target]
            away = self._sections.find_away(tensor) is not None
            return _Results([tensor], self._sections.begin_rewriting(tensor) if away else None)
        tensors = []
        for index, like in enumerate(make_results(call.op, args, kwargs)):
            summed = any(index in each.results and each.sums and is_summed(index, each) for each in passes)
            tensors.append(self._make(like, call.reads[0].device, is_resident=summed))
        return _Results(tensors)

    def _make(self, like: torch.Tensor, device: torch.device, *, is_resident: bool) -> torch.Tensor:
        if not is_resident and like.untyped_storage().nbytes() > self.budget_bytes // LARGE:
            self._begin()
            tensor = self._sections.make(like, device)
            if tensor is not None:
                self._table.mark_staying([tensor], device.type)
                return tensor
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


class _Pass:
    """One pass of an op over slices."""

    def __init__(
        self,
        ops: SlicedOps,
        call: OpCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        slice_pass: SlicePass,
        results: _Results,
    ) -> None:
        self._sections = ops._sections
        self._call, self._args, self._kwargs = call, args, kwargs
        self._pass = slice_pass
        self._results = results
        self._limit_bytes = max(1, ops.budget_bytes // SLICE)
        self._last: dict[int, tuple[Bounds, torch.Tensor]] = {}
        self._writing: list[Section] = []

    def run(self) -> None:
        """Compute the slices, and read each one ahead."""
        slices = list(iterate_slices(self._pass, self._count_parts()))
        reading = self._fetch(slices[0])
        for index, bounds in enumerate(slices):
            reads = self._arrive(reading, bounds)
            reading = self._fetch(slices[index + 1]) if index + 1 < len(slices) else []
            found = run_slice(self._call.op, self._args, self._kwargs, self._pass, bounds, reads)
            writing = self._store(bounds, found)
            del found, reads
            self._sections.finish(self._writing)
            self._writing = writing
        self._sections.finish(self._writing)

    def _count_parts(self) -> list[int]:
        """Return the number of slices of each loop."""
        nbytes = [0] * len(self._pass.loops)
        for index in self._pass.reads:
            self._add(nbytes, self._call.reads[index], [loop.reads[index] for loop in self._pass.loops])
        for index in self._pass.results:
            self._add(nbytes, self._results.tensors[index], [loop.writes[index] for loop in self._pass.loops])
        loops = len(self._pass.loops)
        return [_count(each, loop, loops * size, self._limit_bytes) for each, (loop, size) in
                enumerate(zip(self._pass.loops, nbytes, strict=True))]  # fmt: skip

    def _add(self, nbytes: list[int], tensor: torch.Tensor, dimensions: Sequence[int | None]) -> None:
        narrowed = [index for index, each in enumerate(dimensions) if each is not None]
        if narrowed:
            nbytes[narrowed[0]] += tensor.numel() * tensor.element_size()

    def _fetch(self, bounds: Bounds) -> list[torch.Tensor | Section]:
        """Begin to read what a slice reads."""
        found: list[torch.Tensor | Section] = []
        for index in self._pass.reads:
            last = self._last.get(index)
            if last is not None and last[0] == self._find_key(index, bounds):
                found.append(last[1])
                continue
            view = narrow_read(self._call.reads[index], index, self._pass, bounds)
            section = None if self._sections.find_away(view) is None else self._sections.read(view)
            found.append(pack(view) if section is None else section)
        return found

    def _arrive(self, reading: Sequence[torch.Tensor | Section], bounds: Bounds) -> list[torch.Tensor]:
        self._sections.finish([each for each in reading if isinstance(each, Section)])
        tensors = [each.tensor if isinstance(each, Section) else each for each in reading]
        if len(self._pass.loops) > 1:
            for index, tensor in zip(self._pass.reads, tensors, strict=True):
                self._last[index] = self._find_key(index, bounds), tensor
        return tensors

    def _find_key(self, index: int, bounds: Bounds) -> Bounds:
        """Return the bounds that tell what a slice reads of a tensor."""
        pairs = zip(self._pass.loops, bounds, strict=True)
        return tuple(each for loop, each in pairs if loop.reads[index] is not None)

    def _store(self, bounds: Bounds, found: Sequence[torch.Tensor]) -> list[Section]:
        """Store a slice's results; return those whose transfers run."""
        writing = []
        for index, tensor in zip(self._pass.results, found, strict=True):
            view = narrow_result(self._results.tensors[index], index, self._pass, bounds)
            if self._sections.find_away(view) is not None:
                section = self._sections.write(view, tensor, self._results.rewritten)
                assert section is not None
                writing.append(section)
            elif is_summed(index, self._pass) and bounds[-1][0] > 0:
                view.add_(tensor)
            else:
                view.copy_(tensor)
        return writing


def _assemble(call: OpCall, tensors: Sequence[torch.Tensor]) -> Any:
    """Return an op's results in the form of its schema: None where its output mask leaves one out."""
    returns = call.op._schema.returns
    if len(returns) == 1:
        return tensors[0]
    found = dict(zip(call.find_mask(), tensors, strict=True))
    return tuple(found.get(position) for position in range(len(returns)))


def _count(index: int, loop: Loop, nbytes: int, limit_bytes: int) -> int:
    units = max(1, math.ceil(loop.length / loop.multiple))
    return min(units, max(2 if index == 0 else 1, math.ceil(nbytes / limit_bytes)))
