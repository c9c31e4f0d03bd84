"""Ops in slices that wait, where it is hard: doors to what they read, modes, settings, other threads, failures."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.errors import Infeasible, TierError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.room import Room
from elbowroom.runtime import stretch
from elbowroom.runtime.paged_storages import PagedStorages
from elbowroom.runtime.sections import Sections
from elbowroom.runtime.stretch import SlicedStretch
from tests.cpu.test_sliced_attacks import BUDGET, fit_anything, make_random
from tests.fake_card import use_fake_card
from tests.state_jobs import get_pager

Program = Callable[[], tuple[torch.Tensor, ...]]


class Runs(list[int]):
    """Numbers of ops of the stretches that ran."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs()
    run = SlicedStretch.run

    def count_and_run(self: SlicedStretch) -> None:
        found.append(len(self.ops))
        run(self)

    monkeypatch.setattr(SlicedStretch, "run", count_and_run)
    return found


def make_arguments(rows: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    return make_random(rows, 1), make_random(1, 1024, seed=1)


def copy_all(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [each.detach().clone() for each in tensors]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), place


@contextlib.contextmanager
def waiting(profile: HardwareProfile, budget_bytes: int = BUDGET) -> Iterator[Room]:
    """Open a step in which the product of `make_arguments` is known to need slices, so that it waits."""
    with fit_anything(profile, budget_bytes) as room:
        with room.step():
            ballast = torch.empty(budget_bytes - (1 << 20), dtype=torch.uint8)
            torch.mul(*make_arguments())
            del ballast
        with room.step():
            yield room


def check(profile: HardwareProfile, run: Program, budget_bytes: int = BUDGET) -> None:
    """Run a program plainly and in several steps of a room: the same bits."""
    expected = copy_all(run())
    with fit_anything(profile, budget_bytes) as room:
        for _ in range(3):
            with room.step():
                found = run()
            assert_same(list(found), expected)
            del found
        assert max(record.peak_bytes or 0 for record in room.journal().steps) <= budget_bytes


def test_the_end_of_a_step_runs_what_waits(profile: HardwareProfile, runs: Runs) -> None:
    """Counting who holds a result is an op, too, before which nothing has to run."""

    def run() -> tuple[torch.Tensor, ...]:
        one, other = make_arguments()
        return (one * other,)

    check(profile, run)
    assert runs == [1, 1]


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "numpy": lambda each: each.numpy().fill(7),
    "memoryview": lambda each: memoryview(each.numpy().reshape(-1)).__setitem__(0, 3.0),
    "dlpack": lambda each: torch.from_dlpack(each).fill_(3),
    "apply_": lambda each: each.apply_(lambda _: 3),
    "address": lambda each: ctypes.memset(each.data_ptr(), 0, 400),
    "storage": lambda each: each.untyped_storage().resize_(0),
    "data": lambda each: setattr(each, "data", torch.zeros(3)),
    "set_": lambda each: each.set_(),
    "shared": lambda each: each.share_memory_().fill_(2),
    "thread": lambda each: run_in_thread(lambda: each.add_(1)),
}


def run_in_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("write", list(WRITES.values()), ids=list(WRITES))
def test_an_argument_changes_while_its_op_waits(
    write: Callable[[torch.Tensor], object], profile: HardwareProfile, runs: Runs
) -> None:
    expected = torch.mul(*make_arguments())
    with waiting(profile):
        one, other = make_arguments()
        made = one * other
        assert not runs
        write(one)
    assert runs == [1]
    assert torch.equal(made, expected)


def test_an_argument_whose_address_the_program_knows(profile: HardwareProfile) -> None:
    expected = torch.mul(*make_arguments())
    with waiting(profile):
        one, other = make_arguments()
        address = one.data_ptr()
        made = one * other
        ctypes.memset(address, 0, 400)
    assert torch.equal(made, expected)


def test_stretches_that_run_one_by_one(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for all of them together."""

    def refuse(self: SlicedStretch) -> None:
        raise Infeasible(needed_bytes=1, budget_bytes=1, op="stretch", is_whole_step=False)

    def run() -> tuple[torch.Tensor, ...]:
        one, other = make_arguments()
        made = one * other
        return made, made.tanh(), made.abs_().exp()

    monkeypatch.setattr(SlicedStretch, "run", refuse)
    check(profile, run)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_an_argument_leaves_for_good_while_a_stretch_runs(
    is_elsewhere: bool, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room to bring it back while the others are there, so the ops run one by one."""
    expected = torch.mul(*make_arguments())
    refused: list[object] = []
    run_slice = stretch.run_slice

    def refuse(_: object, record: object) -> None:
        refused.append(record)
        monkeypatch.undo()
        raise Infeasible(needed_bytes=1, budget_bytes=1, op="restore", is_whole_step=False)

    with waiting(profile) as room:
        one, other = make_arguments()

        def page_out_and_run(*args: Any) -> Any:
            if not refused:
                assert get_pager(room).sections.page_out(one.untyped_storage(), None)
            return run_slice(*args)

        made = one * other
        monkeypatch.setattr(stretch, "run_slice", page_out_and_run)
        monkeypatch.setattr(PagedStorages, "restore", refuse)
        if is_elsewhere:
            run_in_thread(lambda: other.add_(1))
        else:
            other.add_(1)
    assert refused
    assert torch.equal(made, expected)


class Keeping(TorchDispatchMode):
    """Sees ops, and holds their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        self.kept.append(func(*args, **(kwargs or {})))
        return self.kept[-1]


def test_modes_see_no_ops_that_waited(profile: HardwareProfile, runs: Runs) -> None:
    """A mode that holds all results is entered while an op waits, which an access without an op has run."""
    expected = torch.mul(*make_arguments())
    with waiting(profile, 4 << 20):
        one, other = make_arguments()
        made = one * other
        assert not runs
        with Keeping() as mode:
            made.data_ptr()
        assert not mode.ops
        assert runs == [1]
    assert torch.equal(made, expected)


def fail(*_: Any, **__: Any) -> Any:
    raise TierError("the disk fails")


def test_a_disk_fails_while_ops_that_wait_run(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op that comes next fails, and so does each access, until the disk works again."""
    one, other = make_arguments()
    expected = [one * other, one + 1]
    with waiting(profile, 4 << 20):
        made = one * other
        with monkeypatch.context() as patch:
            patch.setattr(Sections, "write", fail)
            with pytest.raises(TierError):
                one.add_(1)
            with pytest.raises(TierError):
                made.data_ptr()
        one.add_(1)
        assert_same([made, one], expected)


@pytest.mark.filterwarnings("ignore:Elbowroom cannot bring state back")
def test_a_disk_fails_while_another_thread_writes_to_an_argument(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread's op cannot be stopped. What waits can never be computed, until nobody needs it."""
    one, other = make_arguments()
    expected = one + 1
    with waiting(profile, 4 << 20):
        made = one * other
        with monkeypatch.context() as patch:
            patch.setattr(Sections, "write", fail)
            run_in_thread(lambda: one.add_(1))
        for use in (torch.sum, torch.Tensor.data_ptr, lambda _: one.add_(1), lambda _: other * 2):
            with pytest.raises(TierError, match=r"results of aten\.mul\.Tensor are lost"):
                use(made)
        del made
        again = one * other
    assert_same([one, again], [expected, expected * other])


def test_an_op_with_statistics_runs_in_slices_though_it_fitted_before(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for it until its argument, which was away, has come back."""
    budget_bytes = 12 << 20

    def norm(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, mean, variance, training=True)

    one, other = make_random(512, 1), make_random(1, 2048, seed=1)
    statistics, found_statistics = [torch.zeros(2048), torch.ones(2048)], [torch.zeros(2048), torch.ones(2048)]
    expected = norm(one * other, *statistics)
    use_fake_card(monkeypatch, "late")
    with fit_anything(profile, budget_bytes) as room:
        with room.step():  # learns what both take
            norm(one * other, torch.zeros(2048), torch.ones(2048))
        with room.step():
            ballast = torch.empty(budget_bytes - (1 << 20), dtype=torch.uint8)
            torch.mul(one, other)  # is known to need slices from now on
            del ballast
        with room.step():
            made = one * other
            ballast = torch.empty(5 << 20, dtype=torch.uint8)
            found = norm(made, *found_statistics)
            del ballast
            assert torch.equal(found, expected)
    assert_same(found_statistics, statistics)


def divide(mask: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return mask / 3
    finally:
        torch.set_default_dtype(torch.float32)


def divide_by_one_thread(mask: torch.Tensor) -> torch.Tensor:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return divide(mask)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("run", [divide, divide_by_one_thread])
def test_settings_change_while_an_op_waits(
    run: Callable[[torch.Tensor], torch.Tensor], profile: HardwareProfile, runs: Runs
) -> None:
    """They run with the settings with which they were called."""
    mask = make_random(512, 1024) > 0
    check(profile, lambda: (run(mask),))
    assert runs
