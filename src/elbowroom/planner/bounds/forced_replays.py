"""Ops that every replay needs, whatever the rest of the plan does.

A replayed op reads each argument from the device, or from an earlier op of the same replay. Replays run at needs. If
nothing holds an argument at any later need, in the version that was read, it must be recomputed every time: the op that
produced it is replayed as often as the op that reads it. An op whose chain ends in a barrier, or in a storage that
existed before the step and has changed, cannot be replayed at all.

This is weaker than `replays.closure`, which considers one tick: a bound must hold for every tick.
"""

from __future__ import annotations

import bisect
import dataclasses

from elbowroom.ir.trace import Trace, View


@dataclasses.dataclass(frozen=True, slots=True)
class ForcedReplays:
    """Lower bounds on replays; indexed by op unless stated otherwise.

    Attributes:
        maker: by storage, the op that last wrote it; -1 if it existed before the step.
        can_replay: whether some plan may replay it.
        takes: the ops that every replay of it also replays, without those that they take in turn.
        may_find: the storages that it reads and that some replay of it may find on the device.
    """

    maker: tuple[int, ...]
    can_replay: tuple[bool, ...]
    takes: tuple[tuple[int, ...], ...]
    may_find: tuple[tuple[int, ...], ...]


def find_forced_replays(trace: Trace) -> ForcedReplays:
    """Compute the forced replays of a trace in one pass over its ops.

    Cost: linear in the reads, times the logarithm of the needs.
    """
    finder = _Finder(trace)
    can_replay: list[bool] = []
    takes: list[tuple[int, ...]] = []
    may_find: list[tuple[int, ...]] = []
    for op in trace.ops:
        found = {view.storage for view in op.reads if finder.may_be_present(view, op.tick)}
        makers = {finder.writer_of(view) for view in op.reads if not finder.may_be_present(view, op.tick)}
        can_replay.append(not op.barrier and all(maker >= 0 and can_replay[maker] for maker in makers))
        takes.append(tuple(sorted(makers)) if can_replay[-1] else ())
        may_find.append(tuple(sorted(found)))
    return ForcedReplays(
        maker=tuple(writes[-1].op if writes else -1 for writes in trace.writes),
        can_replay=tuple(can_replay),
        takes=tuple(takes),
        may_find=tuple(may_find),
    )


class _Finder:
    def __init__(self, trace: Trace) -> None:
        self._needs = [need.tick for need in trace.needs]
        self._writes = trace.writes
        self._holds = [[(home.created, home.released)] for home in trace.storages]
        for save in trace.saves:
            self._holds[save.storage].append((save.tick, save.released))

    def writer_of(self, view: View) -> int:
        """Return the op that wrote this version; -1 if it existed before the step."""
        return next((write.op for write in self._writes[view.storage] if write.version == view.version), -1)

    def may_be_present(self, view: View, read: int) -> bool:
        """Return whether something holds this version at any need after tick `read`."""
        since, until = -1, self._needs[-1] if self._needs else -1
        for tick, version, _ in self._writes[view.storage]:
            if version == view.version:
                since = tick
            elif version > view.version:
                until = min(until, tick)
        return any(
            self._is_need_within(max(since, begin, read), min(until, end - 1))
            for begin, end in self._holds[view.storage]
        )

    def _is_need_within(self, after: int, until: int) -> bool:
        index = bisect.bisect_right(self._needs, after)
        return index < len(self._needs) and self._needs[index] <= until
