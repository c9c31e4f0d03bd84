"""Sliced ops where it is hard: lazy conjugates, aliases, failures in between, other threads and processes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.room import Room
from elbowroom.runtime import slice_pass
from elbowroom.slicing import vector_ends
from elbowroom.slicing.bits import equal_bits
from elbowroom.slicing.calls import run_whole
from elbowroom.slicing.op_call import bind
from elbowroom.slicing.probe import probe_passes
from elbowroom.slicing.registry import find_passes
from tests.state_jobs import MIN_BYTES, get_pager

aten = torch.ops.aten
BUDGET = 2 << 20


@contextlib.contextmanager
def fit_anything(profile: HardwareProfile, budget_bytes: int = BUDGET, **options: Any) -> Iterator[Room]:
    """Open a room for code that has no model worth the name."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"mode": "dynamic", "profile": profile, "min_offload_bytes": MIN_BYTES} | options
    with elbowroom.fit(model, [optimizer], budget_bytes, **options) as room:
        yield room


def count_slices(room: Room) -> int:
    return sum(room._metering.sliced.counts.values())


def make_random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def check(profile: HardwareProfile, run: Callable[[], tuple[torch.Tensor, ...]], budget_bytes: int = BUDGET) -> None:
    """Run a program plainly and in a room, in which some op has to run in slices: the same bits."""
    expected = [each.detach().clone() for each in run()]
    with fit_anything(profile, budget_bytes) as room:
        with room.step():
            found = run()
        assert count_slices(room), "nothing ran in slices"
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), index


def test_a_search_for_vector_ends_that_fails_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have had no memory; taken for "no difference", it would allow slices with other bits."""
    call = bind(aten.sigmoid.default, (make_random(77778, 32),), {})
    monkeypatch.setattr(vector_ends, "_found", {})
    with monkeypatch.context() as patch:
        patch.setattr(vector_ends, "_run", Mock(side_effect=[None, RuntimeError("can't allocate memory")]))
        with pytest.raises(RuntimeError, match="allocate"):
            vector_ends.find_telling(call)
    assert vector_ends.find_telling(call) is not None


def make_away(rows: int = 1024, columns: int = 1024) -> torch.Tensor:
    """Return a tensor whose bytes are away: the result of an op that ran in slices."""
    return make_random(rows, 1) * make_random(1, columns, seed=1)


def test_slices_that_end_within_a_vector(profile: HardwareProfile) -> None:
    """Slices of an odd number of rows, divided between two threads, where the kernel computes other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        some = make_random(77778, 32)
        check(profile, lambda: (torch.sigmoid(some),), 8 << 20)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("op", "shapes", "dtype", "dimension", "parts", "share"),
    [
        (aten.sigmoid, [(4, 65537)], torch.float32, 0, 4, 1.0),  # four elements of other bits, in one draw of seven
        (aten.silu, [(8, 65537)], torch.float32, 0, 8, 1.0),
        (aten.sigmoid, [(50, 25, 36)], torch.float64, 1, 25, 0.3),  # a smaller op without the gaps in memory
        (aten.mm, [(562, 1442), (1442, 4)], torch.bfloat16, 1, 4, 1.0),  # sums are rounded to few bits
    ],
    ids=str,
)
def test_a_probe_is_not_lucky(
    op: Any, shapes: Any, dtype: torch.dtype, dimension: int, parts: int, share: float
) -> None:
    """The whole op has other bits, but on few elements or for few values."""

    def draw(seed: int) -> list[torch.Tensor]:
        made = [make_random(*shape, seed=seed).to(dtype) for shape in shapes]
        return [each[..., ::2] if share < 1 else each for each in made]

    passes = next(each for each in find_passes(op.default, draw(0), {}) if each[0].loops[0].writes[0] == dimension)
    limit_bytes = 1 << 40 if share == 1 else int(share * sum(each.nbytes for each in draw(0)))
    if probe_passes(op.default, draw(0), {}, passes, parts, limit_bytes=limit_bytes).is_exact:
        for seed in range(40):
            reads = draw(seed)
            (found,) = run_whole(op.default, reads, {}, passes, parts)
            assert equal_bits(found, op.default(*reads)), seed


def test_an_update_of_what_is_on_its_way_back(profile: HardwareProfile) -> None:
    """A storage is being brought back when an op in slices writes to its copy."""
    factor = make_random(1024, 1, seed=2)
    expected = make_away().mul_(factor).mul_(factor)
    with fit_anything(profile, 9 << 20) as room, room.step():
        ballast = torch.zeros(7 << 20, dtype=torch.uint8)
        made = make_away().mul_(factor)
        assert count_slices(room) == 2
        storage = made.untyped_storage()
        del ballast
        get_pager(room).begin_reload(storage)
        assert get_pager(room).is_away(storage)
        made.mul_(factor)
        assert count_slices(room) == 3
    assert torch.equal(made, expected)


def test_an_op_that_begins_again_does_not_write_twice(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a while there is no room for the rest of an op that writes in place."""
    factor = make_random(1, 1024, seed=2)
    plain = make_away()[:-1]
    once = plain.clone().mul_(factor)
    calls = [0]
    run = slice_pass.run_slice

    def refuse(*args: Any) -> Any:
        calls[0] += 1
        if 3 <= calls[0] < 20:
            raise Infeasible(needed_bytes=1, budget_bytes=1, op="mul_", is_whole_step=False)
        return run(*args)

    with fit_anything(profile) as room:
        with room.step():
            made = make_away()[:-1]
            monkeypatch.setattr(slice_pass, "run_slice", refuse)
            with contextlib.suppress(Infeasible):
                made.mul_(factor)
        assert calls[0] >= 3
    assert ((made == once) | (made == plain)).all()


def test_the_copies_of_results_that_are_gone_are_given_up(profile: HardwareProfile) -> None:
    """A step makes many results that are away, one after the other."""
    with fit_anything(profile) as room:
        with room.step():
            for _ in range(40):
                make_away()
            blocks = room._transfers._queue.copies
        assert count_slices(room) >= 40
        assert blocks < 20


def test_fork_while_another_thread_runs_an_op_in_slices(profile: HardwareProfile) -> None:
    with fit_anything(profile) as room:
        lock = get_pager(room).storages.slicing
        holds, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                holds.set()
                may_end.wait(1)

        thread = threading.Thread(target=hold)
        thread.start()
        holds.wait()
        child = os.fork()
        if not child:
            os._exit(0 if lock.acquire(timeout=2) else 1)
        may_end.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_address_that_the_program_knows(profile: HardwareProfile) -> None:
    """Code that was told the address of an argument goes on to use it."""
    with fit_anything(profile, 5 << 20) as room, room.step():
        batch, other = make_random(1024, 512), make_random(1024, 512)
        assert room._modes.sliced_ops._large.page_out([other])
        address = batch.data_ptr()
        assert not room._modes.sliced_ops._large.page_out([batch])
        assert not get_pager(room).is_away(batch.untyped_storage())
        assert batch.data_ptr() == address


def test_dlpack_and_numpy(profile: HardwareProfile) -> None:
    with fit_anything(profile, 5 << 20) as room, room.step():
        one, other = make_random(1024, 512), make_random(1024, 512)
        seen, capsule = one.numpy(), torch.utils.dlpack.to_dlpack(other)
        expected = seen.copy()
        kept = [one + other for _ in range(5)]
        shared = torch.utils.dlpack.from_dlpack(capsule)
        assert (seen == expected).all() and shared.data_ptr() == other.data_ptr()
        assert count_slices(room)
        del kept


def test_one_thread_restores_while_another_asks_for_memory(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making room takes the lock of the step, whose holder may bring something back just then."""
    expected = make_away()
    with fit_anything(profile, 9 << 20) as room, room.step():
        ballast = torch.zeros(8 << 20, dtype=torch.uint8)
        one, other = make_away(), make_away()
        assert count_slices(room) == 2
        del ballast
        storages = get_pager(room).storages
        reload = storages._reload
        begun, may_end = threading.Event(), threading.Event()
        in_time: list[bool] = []
        seen: list[torch.Tensor] = []

        def ask(record: Any, copy: Any) -> Any:
            if threading.current_thread() is thread:
                begun.set()
                in_time.append(may_end.wait(5))
            return reload(record, copy)

        monkeypatch.setattr(storages, "_reload", ask)
        thread = threading.Thread(target=lambda: seen.append(one[0].clone()))
        thread.start()
        assert begun.wait(5)
        assert other[0, 0] == expected[0, 0]
        may_end.set()
        thread.join()
        assert in_time == [True]
    assert torch.equal(seen[0], expected[0])
