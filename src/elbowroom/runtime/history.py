"""What every op of a step did, and from it the way to any storage that autograd has saved.

    x --matmul--> t --gelu--> y (saved)         the way to y: matmul, gelu, from x, if x is saved or there anyway

A run knows the storages that it read, and a storage the runs that wrote to it; what nothing leads back to any more is
forgotten by itself. Each storage has a version, the number of writes since it was made, and a way starts only from
what is as it was when the run read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from elbowroom.hooks.estimates import Estimate
from elbowroom.hooks.identity import is_shared
from elbowroom.hooks.replayable import find_statistics, find_written
from elbowroom.hooks.settings import Settings
from elbowroom.runtime.calls import Call, Recording, Slot, iterate_slots
from elbowroom.runtime.residence import Residence

MOST_RUNS = 64
"""On a way: what takes more is not computed again, so that the room and the time that it takes are bounded."""


Results = tuple[Any, ...]
"""What a run made or wrote to: weak references to residences, each followed by its bytes. One flat tuple, since every
object that a step keeps makes the garbage collector slower."""


class Run(NamedTuple):
    """One op that ran: as a `Call`, but for its results.

    Attributes:
        place: counts the ops of a step.
        estimate: what it takes.
    """

    place: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Results
    written: Results
    settings: Settings
    estimate: Estimate

    def count_inner(self) -> int:
        """Bytes that it allocates inside itself at most. Where nothing told how large its results would be, the
        estimate has them among these."""
        estimate = self.estimate
        unforeseen = max(0, sum(self.results[1::2]) - estimate.result_bytes)
        return max(0, estimate.inner_bytes - unforeseen)

    def keep(self) -> Call:
        """As a call, which keeps what it made."""
        results, written = _keep(self.results), _keep(self.written)
        scratch = {position for position, _ in find_written(self.func) if position < len(self.args)}
        scratch.update(find_statistics(self.func, self.args))
        return Call(self.func, self.args, self.kwargs, results, written, tuple(sorted(scratch)), self.settings)


class Way(NamedTuple):
    """How a storage is computed again.

    Attributes:
        seconds: its runs took so long.
        versions: of the leaves and the sources.
    """

    recording: Recording
    seconds: float
    versions: tuple[int, ...]

    def is_open(self) -> bool:
        """Whether all leaves are still saved, and all that is read is as it was."""
        return all(leaf.views for leaf in self.recording.leaves) and self.versions == _list_versions(self.recording)


def find_way(target: Residence) -> Way | None:
    """The way to a storage; None if there is none.

    Cost: linear in its runs.
    """
    runs: dict[int, Run] = {}
    stack, seen = [target], {target}
    while stack:
        residence = stack.pop()
        if residence.made_by is None:
            return None
        for run in (residence.made_by, *residence.changed_by):
            if run.place in runs:
                continue
            if len(runs) == MOST_RUNS:
                return None
            runs[run.place] = run
            for slot in iterate_slots((run.args, run.kwargs)):
                read = slot.residence
                if slot.kept is not None and slot.is_read and (slot.seen != read.version or is_shared(slot.kept)):
                    return None  # the program has written to it since, or may do so unseen
                if slot.kept is not None or read in seen or _is_leaf(read, slot):
                    continue
                seen.add(read)
                stack.append(read)
    recording = Recording({place: run.keep() for place, run in runs.items()}, target)
    inner_bytes = {place: run.count_inner() for place, run in runs.items()}
    recording.nbytes = count_bytes(recording.calls, (target,), inner_bytes)
    seconds = sum(runs[place].estimate.pace.seconds for place in recording.calls)
    return Way(recording, seconds, _list_versions(recording))


def _list_versions(recording: Recording) -> tuple[int, ...]:
    return tuple(read.version for read in (*recording.leaves, *recording.sources))


def _is_leaf(residence: Residence, slot: Slot) -> bool:
    return residence.id >= 0 and bool(residence.views) and residence.version == slot.seen


def _keep(results: Results) -> tuple[Residence, ...]:
    """With their residences, or such in their place that nobody asks for."""
    pairs = zip(results[::2], results[1::2], strict=True)
    return tuple(find() or Residence(nbytes) for find, nbytes in pairs)


def count_replay(missing: Sequence[Residence], round_up: Callable[[int], int]) -> int:
    """Most that it takes to compute some dropped storages again, all at once. `round_up`: to what a block takes."""
    recordings = [each.recording for each in missing if each.recording is not None]
    counts = [each.nbytes for each in recordings if each.nbytes is not None]
    if len(counts) == len(missing):
        return sum(map(round_up, counts))
    # Dropped as planned: what several are computed from is computed once.
    calls = {tick: call for each in recordings for tick, call in each.calls.items()}
    return round_up(count_bytes(dict(sorted(calls.items())), missing, {}))


def count_bytes(calls: Mapping[int, Call], targets: Collection[Residence], inner_bytes: Mapping[int, int]) -> int:
    """Most that a replay allocates at once: each result until its last use, and the targets to the end.

    `inner_bytes`: what a call allocates inside itself, where that is known.
    """
    last = {residence: position for position, call in calls.items() for residence in call.list_used()}
    live: set[Residence] = set()
    most = 0
    for position, call in calls.items():
        live.update(call.results)
        most = max(most, sum(each.nbytes for each in live) + inner_bytes.get(position, 0))
        live -= {each for each in live if last[each] == position and each not in targets}
    return most
