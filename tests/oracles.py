"""Slow and obvious ways to find what fast code finds. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.ir.actions import Action, Offload, Recompute, Reload, Wait
from elbowroom.ir.buffers import Buffer, overlap
from elbowroom.ir.costs import Costs
from elbowroom.ir.events import StorageFreed, StorageNeeded, StorageSaved
from elbowroom.ir.trace import Trace, find_movable
from elbowroom.residency.machine import Machine
from elbowroom.simulator.replay import list_events


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
    contents = _find_contents(trace)
    movable = find_movable(trace)
    device: dict[int, object] = {}  # what autograd's claim on each storage holds
    below: dict[int, object] = {}
    leaving: set[int] = set()
    arriving: set[int] = set()
    saved: dict[int, object] = {}
    done: list[Action] = []
    for event in list_events(trace):
        storage, tick = event.storage, event.tick
        if isinstance(event, StorageSaved) and storage not in saved:
            saved[storage] = device[storage] = contents[storage, _version_before(trace, storage, tick)]
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
            held[leaf] = contents[leaf, _version_before(trace, leaf, tick)]
    ops = {op.tick: op for op in trace.ops}
    for op_tick in segment.ops:
        op = ops[op_tick]
        assert not op.barrier
        read = tuple(held[view.storage] for view in op.reads)
        for index, view in enumerate(op.writes):
            held[view.storage] = hash((op.name, read, index))
    for output in action.outputs:
        assert output not in device
        device[output] = held[output]


def _find_contents(trace: Trace) -> dict[tuple[int, int], object]:
    """What every version of every storage holds in the plain step."""
    contents: dict[tuple[int, int], object] = {
        (home.id, 0): hash(("resident", home.id)) for home in trace.storages if home.created < 0
    }
    for op in trace.ops:
        read = tuple(contents[view.storage, view.version] for view in op.reads)
        for index, view in enumerate(op.writes):
            contents[view.storage, view.version] = hash((op.name, read, index))
    return contents


def _version_before(trace: Trace, storage: int, tick: int) -> int:
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
