"""Slow and obvious ways to find what fast code finds. No torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence

from elbowroom.ir.actions import Action, Offload, Recompute, Reload, Wait
from elbowroom.ir.buffers import Buffer, overlap
from elbowroom.ir.costs import Costs
from elbowroom.ir.events import StorageFreed, StorageNeeded, StorageSaved
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import Problem
from elbowroom.residency.machine import Machine
from elbowroom.simulator.planned import list_events


def count_live_bytes(trace: Trace, costs: Costs) -> list[int]:
    """Bytes on the device during each entry when nothing moves: look at every storage and every holder, every tick."""

    def is_held(storage: int, tick: int) -> bool:
        home = trace.storages[storage]
        return (
            home.created <= tick < home.released
            or any(save.storage == storage and save.tick <= tick < save.released for save in trace.saves)
            or any(
                trace.saves[need.save].storage == storage and need.tick <= tick < need.released for need in trace.needs
            )
        )

    align = costs.alignment_bytes
    workspace = {op.tick: nbytes for op, nbytes in zip(trace.ops, costs.workspace_bytes, strict=True)}
    return [
        workspace.get(tick, 0)
        + sum(-(-home.nbytes // align) * align for home in trace.storages if is_held(home.id, tick))
        for tick in range(trace.end)
    ]


def follow(trace: Trace, machine: Machine) -> list[Action]:
    """Carry a machine's actions out on symbols instead of bytes, and see that every need finds what was saved.

    A symbol stands for what an op made of what it read. So a replay of the wrong ops, from the wrong contents, a use
    of bytes still under way and a release of the last copy all show.

    Raises:
        AssertionError: an action could not be carried out, or gives the wrong contents.
    """
    contents = find_contents(trace)
    movable = trace.movable
    device: dict[int, object] = {}  # what autograd's claim on each storage holds
    below: dict[int, object] = {}
    leaving: set[int] = set()
    arriving: set[int] = set()
    saved: dict[int, object] = {}
    done: list[Action] = []
    for event in list_events(trace):
        storage, tick = event.storage, event.tick
        if isinstance(event, StorageSaved) and storage not in saved:
            saved[storage] = device[storage] = contents[storage, version_before(trace, storage, tick)]
        given: object = None
        for action in machine.feed(event):
            done.append(action)
            if isinstance(action, Recompute):
                assert not arriving & set(machine._segments[action.segment].leaves)
                _replay(trace, machine, action, contents, tick, device)
                continue
            moved = action.storage
            assert moved in saved, f"{action} of what is not saved, or is already free"
            if isinstance(action, Wait):
                assert moved in leaving | arriving, f"{action} has nothing to wait for"
                leaving.discard(moved)
                arriving.discard(moved)
                continue
            assert moved not in leaving | arriving, f"{action} while it is being moved"
            if isinstance(action, Offload):
                below[moved] = device[moved]
                leaving.add(moved)
            elif isinstance(action, Reload):
                assert moved not in device, f"{action} of what is there"
                device[moved] = below[moved]
                arriving.add(moved)
            else:
                held = device.pop(moved)
                if moved == storage:
                    given = held  # autograd is handed it before it goes
        if isinstance(event, StorageNeeded):
            if given is None:
                assert storage in device and storage not in arriving, f"storage {storage} is not there at tick {tick}"
                given = device[storage]
            if storage in movable:
                assert given == saved[storage], f"storage {storage} has the wrong contents at tick {tick}"
        elif isinstance(event, StorageFreed):
            assert storage not in device and storage not in leaving | arriving
            below.pop(storage, None)
            del saved[storage]
    assert not saved
    return done


def _replay(
    trace: Trace,
    machine: Machine,
    action: Recompute,
    contents: dict[tuple[int, int], object],
    tick: int,
    device: dict[int, object],
) -> None:
    segment = machine._segments[action.segment]
    held: dict[int, object] = {}
    for leaf in segment.leaves:
        home = trace.storages[leaf]
        if leaf in device:
            held[leaf] = device[leaf]
        else:
            assert home.created < tick < home.released, f"leaf {leaf} is not there at tick {tick}"
            held[leaf] = contents[leaf, version_before(trace, leaf, tick)]
    held = run_ops(trace, segment.ops, held)
    for output in action.outputs:
        assert output not in device
        device[output] = held[output]


def run_ops(trace: Trace, ticks: Collection[int], held: Mapping[int, object]) -> dict[int, object]:
    """What storages hold, as symbols, once the ops at these ticks have run; `held`: before them."""
    found = dict(held)
    for op in trace.ops:
        if op.tick in ticks:
            assert not op.barrier
            read = tuple(found[view.storage] for view in op.reads)
            for index, view in enumerate(op.writes):
                found[view.storage] = hash((op.name, read, index))
    return found


def find_contents(trace: Trace) -> dict[tuple[int, int], object]:
    """What every version of every storage holds in the plain step."""
    contents: dict[tuple[int, int], object] = {
        (home.id, 0): hash(("resident", home.id)) for home in trace.storages if home.created < 0
    }
    for op in trace.ops:
        read = tuple(contents[view.storage, view.version] for view in op.reads)
        for index, view in enumerate(op.writes):
            contents[view.storage, view.version] = hash((op.name, read, index))
    return contents


def version_before(trace: Trace, storage: int, tick: int) -> int:
    """The version of a storage that an entry at `tick` finds."""
    written = [view.version for op in trace.ops if op.tick < tick for view in op.writes if view.storage == storage]
    return written[-1] if written else 0


def find_widest(buffers: Sequence[Buffer]) -> int:
    """Most bytes of buffers that are there at one time: look at every time."""
    times = {time for buffer in buffers for time in (buffer.lower, buffer.upper)}

    def is_there(buffer: Buffer, time: int) -> bool:
        if buffer.lower < buffer.upper:
            return buffer.lower <= time < buffer.upper
        return time >= buffer.lower or time < buffer.upper

    return max((sum(each.nbytes for each in buffers if is_there(each, time)) for time in times), default=0)


def find_smallest_arena(buffers: Sequence[Buffer]) -> int:
    """The smallest arena there is: try every order, each buffer at the lowest offset above those it overlaps.

    Some best layout is a pile like that: take one, and let every buffer sink, the lowest first. Pinned ones stay, and
    the others go below them or above.
    """
    best = 1 << 62

    def place(left: tuple[Buffer, ...], placed: tuple[tuple[Buffer, int], ...], arena: int) -> None:
        nonlocal best
        if arena >= best:
            return
        if not left:
            best = arena
            return
        for index, buffer in enumerate(left):
            rest = left[:index] + left[index + 1 :]
            near = sorted((at, at + other.nbytes) for other, at in placed if overlap(buffer, other))
            for low in sorted({0, *(end for _, end in near)}):
                offset = -(-low // buffer.alignment) * buffer.alignment
                if all(offset + buffer.nbytes <= begin or end <= offset for begin, end in near):
                    place(rest, (*placed, (buffer, offset)), max(arena, offset + buffer.nbytes))
                    break

    pinned = tuple((buffer, buffer.offset) for buffer in buffers if buffer.offset is not None)
    end = max((offset + buffer.nbytes for buffer, offset in pinned), default=0)
    place(tuple(buffer for buffer in buffers if buffer.offset is None), pinned, end)
    return best


@functools.cache
def count_extra_forwards(stages: int, slots: int) -> int:
    """Stages of a chain of equal ones that are run again at the least, where so many inputs of stages can be held.

    The chain's own input takes one of the slots. What the running stage reads and makes, and gradients, take none.

    Source: A. Griewank, A. Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26, 2000.
    """
    return _count_forwards(stages, slots) - (stages - 1)


@functools.cache
def _count_forwards(stages: int, slots: int) -> int:
    """Forward runs before every stage has been reversed; a stage that is reversed is not counted for that."""
    if stages == 1:
        return 0
    if slots == 1:
        return stages * (stages - 1) // 2
    return min(
        ahead + _count_forwards(stages - ahead, slots - 1) + _count_forwards(ahead, slots) for ahead in range(1, stages)
    )


class ChainOracle:
    """How many ops a chain of equal layers replays at the least.

    Activation k is made of k - 1 by one op, and 0 is there. Backward wants the last, the one before it, and so on. What
    is not held when it is wanted is replayed from the nearest below, and any made on the way may be held from then on.

    Source: A. Griewank, A. Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26, 2000, for
    the recursion. Ours: the room at each tick is what the plain step leaves of the budget there.

    Cost: to the fourth power of the layers.
    """

    def __init__(self, problem: Problem) -> None:
        gaps = sorted(problem.drafter.gaps.values(), key=lambda gap: -gap.closes)
        self.count = len(gaps)
        self._opens, self._wants = [-1, *(gap.opens for gap in gaps)], [-1, *(gap.closes for gap in gaps)]
        self._unit = int(problem.drafter.replay.rounded[gaps[0].storage])
        self._live, self._budget_bytes = problem.plain.live_bytes, problem.budget_bytes
        ends = [len(self._live), *self._wants[1:]]
        self._at_want = [0] + [self._count_room(self._wants[k], self._wants[k] + 1) for k in range(1, self.count + 1)]
        self._until_next = [0] + [self._count_room(self._wants[k], ends[k - 1]) for k in range(1, self.count + 1)]
        self._before = self._count_room(0, self._wants[-1])

    def _count_room(self, begin: int, end: int) -> int:
        """How many activations that are not in use may be held at all of these ticks."""
        idle = [sum(self._opens[k] < tick < self._wants[k] for k in range(1, self.count + 1)) for tick in range(end)]
        others = max(self._live[tick] - self._unit * idle[tick] for tick in range(begin, end))
        return (self._budget_bytes - others) // self._unit

    @functools.cache  # noqa: B019
    def count_replays(self, low: int = 0, held: int = 0) -> float:
        """In the whole step, if the forward pass has held so many up to `low`, and holds others after that."""
        if held > self._before:
            return math.inf
        further = (
            self.count_replays(k, held + 1) + self._serve(k, held) + self._replay_all(low, k - 1, held)
            for k in range(low + 1, self.count + 1)
        )
        return min([self._replay_all(low, self.count, held), *further])

    def _serve(self, wanted: int, held: int) -> float:
        """For what is there, if there is room for it and those held below it."""
        return 0.0 if held <= self._until_next[wanted] else math.inf

    @functools.cache  # noqa: B019
    def _replay_all(self, low: int, high: int, held: int) -> float:
        """For the wants from `high` to above `low`, which is there; none between is."""
        return 0.0 if high <= low else high - low + self._hold(low, high, held)

    @functools.cache  # noqa: B019
    def _hold(self, low: int, high: int, held: int) -> float:
        """After the replay of `high` itself, which is under way and holds nothing above `low` so far."""
        between = 0 if high - low == 1 else 1  # what `high` is made of
        fits = held + between <= self._at_want[high]
        last = self._serve(high, held) + self._replay_all(low, high - 1, held) if fits else math.inf
        further = (
            self._hold(k, high, held + 1) + self._serve(k, held) + self._replay_all(low, k - 1, held)
            for k in range(low + 1, high)
        )
        return min([last, *further])
