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
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.errors import Infeasible
from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.hooks.storage_ids import get_plain_storage
from elbowroom.ir.slicing import Loop, SlicePass
from elbowroom.runtime.copies import Copy
from elbowroom.runtime.sections import Section, Sections, find_packed_strides
from elbowroom.slicing.bounds import Bounds, is_summed, iterate_slices, narrow_read, narrow_result, pack
from elbowroom.slicing.calls import make_results, run_slice
from elbowroom.slicing.op_call import OpCall, bind, find_target
from elbowroom.slicing.registry import find_passes, list_rules

logger = logging.getLogger(__name__)

SLICE = 8
"""Tensors of one slice take at most this share of the budget, at first."""

LARGE = 8
"""Results above this share of the budget stay away."""


BLOCK = 16
"""Channels of a block of a weight's gradient, at first: kernels pad fewer to a vector, at the same cost."""


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
        self._refusal = refusal.with_traceback(None)  # its frames hold tensors
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

    def page_out(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Move out large arguments of an op, which are read in sections from then on. Return True if any has left."""
        freed_bytes = 0
        for tensor in tensors:
            storage = get_plain_storage(tensor)
            if storage is None or storage.nbytes() <= self.budget_bytes // LARGE or self._sections.find_away(tensor):
                continue
            saved = self._table.find(storage)
            if saved is not None and saved.record.id >= 0 and saved.copy is None:
                continue  # the step manages it, and may be about to copy it
            if is_shared(storage):
                continue
            if saved is None or saved.record.id < 0:
                self._table.mark_staying([tensor], tensor.device.type)
            self._begin()
            freed_bytes += self._sections.page_out(storage)
        return freed_bytes > 0

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
        self._ops = ops
        self._sections = ops._sections
        self._call, self._args, self._kwargs = call, args, kwargs
        self._pass = slice_pass
        self._results = results
        self._target = find_target(call)
        self._limit_bytes = max(1, ops.budget_bytes // SLICE)
        self._last: dict[int, tuple[Bounds, torch.Tensor]] = {}
        self._reading: list[torch.Tensor | Section] = []
        self._ahead: Bounds | None = None  # the slice that is being read
        self._reads_ahead = True
        self._writing: list[Section] = []

    def run(self) -> None:
        """Compute the slices, and read each one ahead while there is room."""
        slices = list(iterate_slices(self._pass, self._count_parts()))
        for index, bounds in enumerate(slices):
            following = slices[index + 1] if index + 1 < len(slices) and self._reads_ahead else None
            if self._try(bounds, following) is not None:
                self._compute_alone(bounds)
        self._settle()

    def _compute_alone(self, bounds: Bounds) -> None:
        """Compute one slice without reading ahead, and with its arguments moved out; in halves if that does not help.

        Raises:
            Infeasible: there is no room for the smallest slice.
        """
        self._reads_ahead = False
        self._ops.page_out(self._call.reads)
        refusal = self._try(bounds, None)
        if refusal is None:
            self._settle()
            return
        halves = self._halve(bounds)
        if not halves:
            raise refusal
        for half in halves:
            self._compute_alone(half)

    def _try(self, bounds: Bounds, following: Bounds | None) -> Infeasible | None:
        """Compute one slice, and begin to read the following one. If there is no room, return the error."""
        try:
            self._compute(bounds, following)
            return None
        except Infeasible as error:
            refusal = error
        traceback.clear_frames(refusal.__traceback__)  # they hold the slice's tensors
        self._settle()
        return refusal.with_traceback(None)

    def _compute(self, bounds: Bounds, following: Bounds | None) -> None:
        reading = self._reading if self._ahead == bounds else self._fetch(bounds)
        reads = self._arrive(reading, bounds)
        self._reading, self._ahead = [], None
        if following is not None:
            self._reading, self._ahead = self._fetch(following), following
        found = run_slice(self._call.op, self._args, self._kwargs, self._pass, bounds, reads)
        self._store(bounds, found)

    def _settle(self) -> None:
        """Finish all transfers, and drop what was read ahead."""
        self._sections.finish([each for each in self._reading if isinstance(each, Section)])
        self._reading, self._ahead = [], None
        self._last.clear()
        writing, self._writing = self._writing, []
        self._sections.finish(writing)

    def _halve(self, bounds: Bounds) -> list[Bounds]:
        """Return two slices in place of one, along the loop with the most units left; none if they are single ones."""
        units = [-(-(end - begin) // loop.multiple) for loop, (begin, end) in zip(self._pass.loops, bounds, strict=True)]
        if not units or max(units) < 2:
            return []
        place = units.index(max(units))
        begin, end = bounds[place]
        middle = begin + units[place] // 2 * self._pass.loops[place].multiple
        return [(*bounds[:place], half, *bounds[place + 1 :]) for half in ((begin, middle), (middle, end))]

    def _count_parts(self) -> list[int]:
        """Return the number of slices of each loop."""
        nbytes = [0] * len(self._pass.loops)
        for index in self._pass.reads:
            self._add(nbytes, self._call.reads[index], [loop.reads[index] for loop in self._pass.loops])
        for index in self._pass.results:
            self._add(nbytes, self._results.tensors[index], [loop.writes[index] for loop in self._pass.loops])
        loops = len(self._pass.loops)
        least = BLOCK if loops > 1 else 1
        return [
            _count(each, loop, least, loops * size, self._limit_bytes)
            for each, (loop, size) in enumerate(zip(self._pass.loops, nbytes, strict=True))
        ]

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
            found.append(self._pack(view, index) if section is None else section)
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

    def _pack(self, view: torch.Tensor, index: int) -> torch.Tensor:
        is_packed = view.stride() == find_packed_strides(view)
        return view if is_packed and index != self._target else pack(view)

    def _store(self, bounds: Bounds, found: Sequence[torch.Tensor]) -> None:
        """Store a slice's results; transfers of the slice before have to be over."""
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
        former, self._writing = self._writing, writing
        self._sections.finish(former)


def _assemble(call: OpCall, tensors: Sequence[torch.Tensor]) -> Any:
    """Return an op's results in the form of its schema: None where its output mask leaves one out."""
    returns = call.op._schema.returns
    if len(returns) == 1:
        return tensors[0]
    found = dict(zip(call.find_mask(), tensors, strict=True))
    return tuple(found.get(position) for position in range(len(returns)))


def _count(index: int, loop: Loop, least: int, nbytes: int, limit_bytes: int) -> int:
    """Return the number of slices of a loop, of at least `least` elements if that leaves more than one."""
    units = max(1, loop.length // max(least, loop.multiple))
    return min(units, max(2 if index == 0 else 1, math.ceil(nbytes / limit_bytes)))
