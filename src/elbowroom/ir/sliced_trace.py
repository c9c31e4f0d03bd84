"""SlicedTrace: a trace in which some ops run in slices, on sections of their storages.

    trace     op                    |  one storage
    sliced    need op save need op save ...  |  a storage for each section

A section is a storage of its own, so plans, forecasts and checks need not know of slices. Each one that an op reads is
a need before it, and each one that an op makes is saved after it: it can leave in between, whether autograd has saved
the tensor or not. It ends with its last need. An in-place op makes new sections.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from elbowroom.errors import TraceError
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Plan
from elbowroom.ir.section_grid import Range, SectionGrid, find_parts
from elbowroom.ir.slicing import Bounds, OpCut, OpSlicing, SlicePass, iterate_slices
from elbowroom.ir.trace import Need, Op, Role, Save, Storage, Trace, View

MIN_SECTIONED_BYTES = 1 << 20
"""Smaller storages stay whole: each slice reads all of them."""

READS_ELEMENTS = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.item")
"""Ops without tensor results that read elements; other ops that make no storage return views."""

ON_SECTIONS = "runs on sections"
"""Barrier of the ops that read or write sections: their results come back from the tier below."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlicedTrace:
    """A trace with some of its ops in slices.

    Attributes:
        trace: the storages of the original one come first, with the same ids; those in sections have no bytes.
        sources: for each op, the index of the original's op that it is, or is a slice of.
        shares: for each op, its part of the time of the original's op.
        memory_shares: likewise of the workspace.
        sections: for each storage from `len(original.storages)` on, the storage that it is a section of.
        ticks: for each tick of the original, `end` included, the first tick of what takes its place.
    """

    trace: Trace
    sources: tuple[int, ...]
    shares: tuple[float, ...]
    memory_shares: tuple[float, ...]
    sections: tuple[int, ...]
    ticks: tuple[int, ...]

    def slice_costs(self, costs: Costs) -> Costs:
        """Return the costs of the slices, given those of the original trace."""
        seconds = (costs.op_seconds[source] * share for source, share in zip(self.sources, self.shares, strict=True))
        workspaces = (
            math.ceil(costs.workspace_bytes[source] * share)
            for source, share in zip(self.sources, self.memory_shares, strict=True)
        )
        return dataclasses.replace(costs, op_seconds=tuple(seconds), workspace_bytes=tuple(workspaces))


def slice_trace(trace: Trace, cuts: Sequence[OpCut]) -> SlicedTrace:
    """Return a trace whose ops run in slices.

    Raises:
        TraceError: a cut is not one of the ways to slice an op of this trace.

    Cost: linear in the number of slices and sections.
    """
    check_cuts(trace, cuts)
    return _Slicer(trace, cuts).run()


def apply_cuts(trace: Trace, costs: Costs, plan: Plan) -> tuple[Trace, Costs, Plan]:
    """Return the trace, the costs and the plan to which the decisions of a plan belong: without cuts, those given."""
    if not plan.cuts:
        return trace, costs, plan
    sliced = slice_trace(trace, plan.cuts)
    return sliced.trace, sliced.slice_costs(costs), dataclasses.replace(plan, cuts=())


def check_cuts(trace: Trace, cuts: Sequence[OpCut]) -> None:
    """Check that cuts are ways to slice ops of a trace.

    Raises:
        TraceError: names the first one that is not.
    """
    known = {each.tick: each for each in trace.slicing}
    last = -1
    for cut in cuts:
        place = f"cut of the op at {cut.tick}"
        if cut.tick <= last:
            raise TraceError(f"{place}: it comes after the cut of the op at {last}")
        last = cut.tick
        slicing = known.get(cut.tick)
        if slicing is None:
            raise TraceError(f"{place}: this op cannot run in slices")
        if cut.passes not in slicing.alternatives:
            raise TraceError(f"{place}: its slices are not known to be independent")
        loops = [len(each.loops) for each in cut.passes]
        if [len(parts) for parts in cut.parts] != loops or any(count < 1 for parts in cut.parts for count in parts):
            raise TraceError(f"{place}: {cut.parts} are no numbers of slices for {loops} loops")


@dataclasses.dataclass(slots=True)
class _Slice:
    """One slice of an op: the parts of its tensors, by index in `Op.reads` and `Op.writes`.

    `results`: number of results of all passes. What else the op writes, such as running statistics, each slice does.
    """

    reads: dict[int, dict[int, Range]]
    writes: dict[int, dict[int, Range]]
    share: float
    memory_share: float
    results: int


def _list_slices(op: Op, slicing: OpSlicing, cut: OpCut) -> Iterator[_Slice]:
    results = 1 + max((index for each in cut.passes for index in each.results), default=-1)
    for slice_pass, parts in zip(cut.passes, cut.parts, strict=True):
        for bounds in iterate_slices(slice_pass, parts):
            share = math.prod(
                (end - begin) / loop.length if loop.length else 1.0
                for loop, (begin, end) in zip(slice_pass.loops, bounds, strict=True)
            )
            yield _Slice(
                reads={index: _locate(op.reads[index], slicing.read_strides[index],
                                      [loop.reads[index] for loop in slice_pass.loops], slice_pass, bounds)
                       for index in slice_pass.reads if index < len(op.reads)},
                writes={index: _locate(op.writes[index], slicing.write_strides[index],
                                       [loop.writes[index] for loop in slice_pass.loops], slice_pass, bounds)
                        for index in slice_pass.results if index < len(op.writes)},
                share=share / len(cut.passes),
                memory_share=share,
                results=results,
            )  # fmt: skip


def _locate(
    view: View, strides: Sequence[int], dimensions: Sequence[int | None], slice_pass: SlicePass, bounds: Bounds
) -> dict[int, Range]:
    return find_parts(view, strides, dimensions, slice_pass.loops, bounds)


class _Slicer:
    """Builds one sliced trace, entry by entry."""

    def __init__(self, trace: Trace, cuts: Sequence[OpCut]) -> None:
        self._trace = trace
        slicing = {each.tick: each for each in trace.slicing}
        ops = {op.tick: op for op in trace.ops}
        self._slices = {cut.tick: list(_list_slices(ops[cut.tick], slicing[cut.tick], cut)) for cut in cuts}
        self._grids = self._make_grids(ops)
        self._tick = 0
        self._ticks: list[int] = []
        self._ops: list[Op] = []
        self._sources: list[int] = []
        self._shares: list[float] = []
        self._memory_shares: list[float] = []
        self._saves: list[list[int]] = []  # tick, storage, released; of whole storages, -1 - its original tick
        self._needs: list[list[int]] = []  # tick, save, released; likewise
        self._sections: list[list[int]] = []  # of: storage, nbytes, created, released
        self._current: dict[int, list[int]] = {storage: [-1] * len(grid.sizes) for storage, grid in self._grids.items()}
        self._save_of: dict[int, int] = {}  # by section
        self._versions: dict[int, int] = {home.id: 0 for home in trace.storages if home.created < 0}
        self._created: dict[int, int] = {}
        self._renamed_saves: dict[int, int] = {}  # by the original's index

    def _make_grids(self, ops: Mapping[int, Op]) -> dict[int, SectionGrid]:
        """Return the grids of the storages that slices read or write in part."""
        grids: dict[int, SectionGrid] = {}
        for tick, slices in self._slices.items():
            op = ops[tick]
            for each in slices:
                for views, parts in ((op.reads, each.reads), (op.writes, each.writes)):
                    for index, found in parts.items():
                        home = self._trace.storages[views[index].storage]
                        if not _may_be_sectioned(home):
                            continue
                        for extent, part in found.items():
                            grids.setdefault(home.id, SectionGrid(home.nbytes)).add(extent, part)
        return {storage: grid for storage, grid in grids.items() if not grid.is_whole}

    def run(self) -> SlicedTrace:
        trace = self._trace
        entries: list[Op | Save | Need] = sorted([*trace.ops, *trace.saves, *trace.needs], key=lambda entry: entry.tick)
        source = 0
        save_index = {save.tick: index for index, save in enumerate(trace.saves)}
        for entry in entries:
            self._ticks.append(self._tick)
            if isinstance(entry, Op):
                parts: list[_Slice | None] = [*self._slices.get(entry.tick, ())]
                for each in parts or [None]:
                    self._run_op(entry, source, each)
                source += 1
            elif isinstance(entry, Save):
                self._keep_save(entry, save_index[entry.tick])
            else:
                self._keep_need(entry)
        self._ticks.append(self._tick)
        return self._finish()

    def _keep_save(self, save: Save, index: int) -> None:
        if save.storage not in self._grids:
            self._renamed_saves[index] = len(self._saves)
            self._saves.append([self._tick, save.storage, -1 - save.released])
            self._tick += 1

    def _keep_need(self, need: Need) -> None:
        renamed = self._renamed_saves.get(need.save)
        if renamed is not None:
            self._needs.append([self._tick, renamed, -1 - need.released])
            self._tick += 1

    def _run_op(self, op: Op, source: int, part: _Slice | None) -> None:
        """Add an op or a slice of one, with needs of the sections that it reads and saves of those that it makes."""
        written = {view.storage for view in op.writes}
        reads, read_cells = self._find_reads(op, part, written)
        writes, made, kept = self._find_writes(op, part)
        rewritten = ((storage, cell) for storage, cell in made if self._current[storage][cell] >= 0)
        cells = dict.fromkeys((*read_cells, *rewritten))
        needs = []
        for storage, cell in cells:
            save = self._save_of.get(self._current[storage][cell])
            if save is not None:
                needs.append(len(self._needs))
                self._needs.append([self._tick, save, 0])
                self._tick += 1
        reads += [self._view_section(self._current[storage][cell]) for storage, cell in cells]
        tick = self._tick
        self._tick += 1
        for each in needs:
            self._needs[each][2] = tick + 1
            self._saves[self._needs[each][1]][2] = tick + 1  # unless another op reads it later
        for storage, cell in made:
            self._replace(storage, cell, tick)
        writes += [self._view_section(self._current[storage][cell]) for storage, cell in made]
        barrier = op.barrier or (ON_SECTIONS if part is not None or cells or made else "")
        self._ops.append(dataclasses.replace(
            op, tick=tick, reads=tuple(reads), writes=tuple(writes), barrier=barrier,
            flops=op.flops if part is None else int(op.flops * part.share),
        ))  # fmt: skip
        self._sources.append(source)
        self._shares.append(1.0 if part is None else part.share)
        self._memory_shares.append(1.0 if part is None else part.memory_share)
        for storage in kept:
            self._created.setdefault(storage, tick)
        for storage, cell in made:
            self._save_section(self._current[storage][cell])

    def _find_reads(self, op: Op, part: _Slice | None, written: set[int]) -> tuple[list[View], list[tuple[int, int]]]:
        """Return the views of whole storages that an op reads, and the sections."""
        views: list[View] = []
        cells: list[tuple[int, int]] = []
        returns_view = not op.writes and not op.name.startswith(READS_ELEMENTS)
        for index, view in enumerate(op.reads):
            if part is not None and index not in part.reads and view.storage not in written:
                continue  # only its shape is used
            grid = self._grids.get(view.storage)
            if grid is None:
                views.append(dataclasses.replace(view, version=self._versions[view.storage]))
            elif not returns_view:
                found = {} if part is None else part.reads.get(index, {})
                cells += [(view.storage, cell) for cell in grid.find(found)]
        return views, cells

    def _find_writes(self, op: Op, part: _Slice | None) -> tuple[list[View], list[tuple[int, int]], list[int]]:
        """Return the views of whole storages that an op writes, the sections that it makes, and the whole storages."""
        views: list[View] = []
        cells: list[tuple[int, int]] = []
        whole: list[int] = []
        results = range(len(op.writes)) if part is None else part.writes
        for index, view in enumerate(op.writes):
            grid = self._grids.get(view.storage)
            is_result = index in results or (part is not None and index >= part.results)
            if not is_result and self._trace.storages[view.storage].created == op.tick:
                continue  # another pass computes it
            if grid is None:
                if view.storage not in whole:
                    self._versions[view.storage] = self._versions.get(view.storage, -1) + 1
                    whole.append(view.storage)
                views.append(dataclasses.replace(view, version=self._versions[view.storage]))
            else:
                found = {} if part is None else part.writes.get(index, {})
                cells += [(view.storage, cell) for cell in grid.find(found)]
        return views, list(dict.fromkeys(cells)), whole

    def _replace(self, storage: int, cell: int, tick: int) -> None:
        """Make a section, in place of a former one if there is any."""
        self._current[storage][cell] = len(self._sections)
        self._sections.append([storage, self._grids[storage].sizes[cell], tick, 0])

    def _save_section(self, section: int) -> None:
        self._save_of[section] = len(self._saves)
        self._saves.append([self._tick, section, self._tick + 1])
        self._sections[section][3] = self._tick
        self._tick += 1

    def _view_section(self, section: int) -> View:
        nbytes = self._sections[section][1]
        return View(storage=len(self._trace.storages) + section, version=0, dtype="uint8", shape=(nbytes,))

    # -- the result ---------------------------------------------------------------------------------------------------

    def _finish(self) -> SlicedTrace:
        trace, count = self._trace, len(self._trace.storages)
        section_saves = set(self._save_of.values())
        saves = []
        for index, (tick, storage, released) in enumerate(self._saves):
            end = released if released >= 0 else self._ticks[-1 - released]
            is_section = index in section_saves
            saves.append(Save(tick=tick, storage=storage + count if is_section else storage, released=end))
        needs = tuple(
            Need(tick=tick, save=save, released=released if released >= 0 else self._ticks[-1 - released])
            for tick, save, released in self._needs
        )
        return SlicedTrace(
            trace=Trace(
                name=trace.name,
                device=trace.device,
                ops=tuple(self._ops),
                storages=(*map(self._finish_storage, trace.storages), *self._list_section_storages()),
                saves=tuple(saves),
                needs=needs,
                end=self._tick,
                presences=tuple(
                    dataclasses.replace(each, begin=self._ticks[each.begin], end=self._ticks[each.end])
                    for each in trace.presences
                ),
            ),
            sources=tuple(self._sources),
            shares=tuple(self._shares),
            memory_shares=tuple(self._memory_shares),
            sections=tuple(section[0] for section in self._sections),
            ticks=tuple(self._ticks),
        )

    def _finish_storage(self, home: Storage) -> Storage:
        if home.id in self._grids:
            return dataclasses.replace(home, nbytes=0, created=-1, released=0)
        created = -1 if home.created < 0 else self._created[home.id]
        return dataclasses.replace(home, created=created, released=max(self._ticks[home.released], created))

    def _list_section_storages(self) -> Iterable[Storage]:
        count = len(self._trace.storages)
        for index, (storage, nbytes, created, released) in enumerate(self._sections):
            home = self._trace.storages[storage]
            yield dataclasses.replace(home, id=count + index, nbytes=nbytes, created=created, released=released)


def _may_be_sectioned(home: Storage) -> bool:
    return home.created >= 0 and home.role in (Role.ACTIVATION, Role.TEMPORARY) and home.nbytes >= MIN_SECTIONED_BYTES
