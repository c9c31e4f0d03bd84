"""Ops in slices that wait and run together: the bits of plain PyTorch, whatever comes in between."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.errors import Infeasible, TransferFailed
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.room import Room
from elbowroom.runtime import stretch
from elbowroom.runtime.stretch import SlicedStretch
from tests.cpu.test_sliced_attacks import count_slices, fit_anything, make_random
from tests.cpu.test_sliced_ops import JOBS
from tests.fake_card import use_fake_card
from tests.state_jobs import assert_same, fit, get_pager, list_tensors, run_plain, run_within

pytestmark = pytest.mark.usefixtures("two_threads")

ROWS = 768
BUDGET = 5 << 20
"""Below what an op on tensors of 3 MiB takes."""


@pytest.fixture
def stretches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Names of the ops that ran together, for each stretch that ran to its end."""
    found: list[tuple[str, ...]] = []
    run = SlicedStretch.run

    def note(self: SlicedStretch) -> None:
        names = tuple(op.call.op._schema.name.removeprefix("aten::") for op in self.ops)
        run(self)
        found.append(names)

    monkeypatch.setattr(SlicedStretch, "run", note)
    return found


def make_rows(seed: int = 0) -> torch.Tensor:
    return make_random(ROWS, 1024, seed=seed)


@contextlib.contextmanager
def fit_known(profile: HardwareProfile, *ops: Callable[[torch.Tensor], Any], **options: Any) -> Iterator[Room]:
    """Open a room in which these ops have run in slices before: from then on they may wait."""
    with fit_anything(profile, BUDGET, **options) as room:
        with room.step():
            for op in ops:
                op(make_rows())
        assert count_slices(room) >= len(ops)
        yield room


@pytest.mark.parametrize("name", ["convolutions", "logits", "many logits"])
def test_jobs(name: str, profile: HardwareProfile, stretches: list[tuple[str, ...]]) -> None:
    make, budget_bytes = JOBS[name]
    found = run_within(make, profile, budget_bytes, 5, elsewhere_bytes=1 << 20, mode="dynamic")
    assert_same(run_plain(make, 5), found)
    assert any(len(each) > 1 for each in stretches), stretches


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_a_job_on_a_card(
    schedule: str, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, stretches: list[tuple[str, ...]]
) -> None:
    """Copies run as late as events allow, and backward passes in another thread."""
    make, budget_bytes = JOBS["logits"]
    plain = run_plain(make, 5)
    use_fake_card(monkeypatch, schedule)
    job = make()
    with fit(job, profile, budget_bytes) as room:
        for index in range(5):
            with room.step():
                job.step(index)
    found = list_tensors(job)
    assert all(torch.equal(plain[each], tensor) for each, tensor in found.items())
    assert any(len(each) > 1 for each in stretches), stretches


def test_what_lies_between_never_exists_as_a_whole(profile: HardwareProfile) -> None:
    """Logits, their log-softmax and the loss: what is read and written in a step, from the step before on."""
    make, budget_bytes = JOBS["many logits"]
    job = make()
    logits_bytes = 8 * 128 * 8192 * 4
    with fit(job, profile, budget_bytes) as room:
        moved = []
        for index in range(3):
            with room.step():
                job.step(index)
            metrics = room.metrics()
            moved.append(metrics["offloaded_bytes"] + metrics["reloaded_bytes"])
    assert moved[2] < moved[0] - 3 * logits_bytes


@pytest.mark.parametrize("is_held", [True, False])
def test_a_result_is_written_if_others_hold_it(profile: HardwareProfile, is_held: bool) -> None:
    rows = make_rows()
    expected = rows[:, :1].sin()
    with fit_known(profile, torch.sin, torch.exp) as room:
        with room.step():
            between = rows.sin()
            storage = between.untyped_storage() if is_held else None
            before = room._transfers.offloaded_bytes
            made = between.exp()
            del between
            assert made[0, 0] == expected[0, 0].exp()
            written_bytes = room._transfers.offloaded_bytes - before
        assert written_bytes == (2 if is_held else 1) * rows.nbytes
        if storage is not None:
            held = torch.empty(0).set_(storage, 0, rows.shape)  # type: ignore[call-overload]
            assert torch.equal(held[:, :1], expected)


def _write_in_place(rows: torch.Tensor) -> None:
    rows.add_(1)


def _swap_data(rows: torch.Tensor) -> None:
    rows.data = torch.zeros(ROWS, 1024)


def _write_in_a_thread(rows: torch.Tensor) -> None:
    thread = threading.Thread(target=rows[3:].zero_)
    thread.start()
    thread.join()


def _write_to_the_storage(rows: torch.Tensor) -> None:
    rows.untyped_storage().fill_(0)


def _take_the_array(rows: torch.Tensor) -> None:
    rows.numpy()[5] = 0


def _fail(rows: torch.Tensor) -> None:
    with contextlib.suppress(RuntimeError):
        rows.view(-1, 7)


def _change_threads(rows: torch.Tensor) -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "interfere",
    [_write_in_place, _swap_data, _write_in_a_thread, _write_to_the_storage, _take_the_array, _fail, _change_threads],
)
def test_what_the_program_does_between_changes_nothing(
    profile: HardwareProfile, interfere: Callable[[torch.Tensor], None], stretches: list[tuple[str, ...]]
) -> None:
    """To the argument of an op that waits."""
    threads = torch.get_num_threads()
    try:
        rows = make_rows()
        waiting = rows.sin()
        interfere(rows)
        expected = [waiting, waiting.exp(), rows]
        rows = make_rows()
        torch.set_num_threads(threads)
        with fit_known(profile, torch.sin, torch.exp) as room, room.step():
            waiting = rows.sin()
            assert room._modes.sliced_ops.has_waiting
            interfere(rows)
            found = [waiting, waiting.exp(), rows]
        assert ("sin", "exp") in stretches or ("sin",) in stretches
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "an op": lambda made: made.sum(),
    "an element": lambda made: made[5, 7].item(),
    "printing": str,
    "numpy": lambda made: made.numpy().copy(),
    "a list": lambda made: made[0].tolist(),
    "the storage": lambda made: made.untyped_storage()[12],
    "an op in place": lambda made: made.add_(1).clone(),
    "a view": lambda made: made.t()[3:4].clone(),
    "its bytes": lambda made: made.view(torch.uint8)[1].clone(),
    "another thread": lambda made: _run_in_thread(lambda: made[1].clone()),
    "an op in slices that reads other rows": lambda made: (made[1:] * made[:-1])[2].clone(),
    "an op in slices on its bytes": lambda made: made.view(torch.int32).bitwise_not()[2].clone(),
}


def _run_in_thread(read: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("is_in_step", [True, False])
def test_reads_of_what_waits(profile: HardwareProfile, how: str, is_in_step: bool) -> None:
    read = READS[how]
    expected = read(make_rows().sin())
    with fit_known(profile, torch.sin) as room:
        with room.step():
            made = make_rows().sin()
            assert room._modes.sliced_ops.has_waiting
            if is_in_step:
                found = read(made)
        assert not room._modes.sliced_ops.has_waiting
        if not is_in_step:
            found = read(made)
    assert str(found) == str(expected)


def test_nothing_is_read_ahead_before_it_is_written(profile: HardwareProfile) -> None:
    rows = make_rows()
    expected = rows[:, :1].sin()
    with fit_anything(profile, 9 << 20) as room:
        with room.step():
            ballast = torch.zeros(5 << 20, dtype=torch.uint8)
            rows.sin()
            assert count_slices(room)
        del ballast
        with room.step():
            made = rows.sin()
            assert room._modes.sliced_ops.has_waiting
            get_pager(room).begin_reload(made.untyped_storage())
            assert torch.equal(made[:, :1], expected)


def test_errors_come_where_indices_are_used(profile: HardwareProfile) -> None:
    table = torch.zeros(10, 3072)
    picks = torch.arange(ROWS) % 10

    def embed(rows: torch.Tensor) -> torch.Tensor:
        return functional.embedding(picks + (rows is table), table)

    with fit_known(profile, embed) as room, room.step(), pytest.raises(IndexError):
        embed(table)


def test_nothing_waits_that_reads_an_array(profile: HardwareProfile) -> None:
    """It may be written to without an op."""
    array = make_rows().numpy()
    with fit_known(profile, torch.sin) as room, room.step():
        made = torch.from_numpy(array).sin()
        assert not room._modes.sliced_ops.has_waiting
        array[:] = 0
    assert torch.equal(made, make_rows().sin())


def test_dispatch_modes_see_no_slices(profile: HardwareProfile, stretches: list[tuple[str, ...]]) -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with fit_known(profile, torch.sin, torch.exp) as room, room.step():
        made = make_rows().sin()
        with Mode():
            made = made.exp()
            made[0].sum()
    assert ("sin", "exp") in stretches
    assert seen == ["aten.exp.default", "aten.select.int", "aten.sum.default"]


@pytest.mark.parametrize("is_lasting", [True, False])
def test_no_room_for_a_stretch(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, stretches: list[tuple[str, ...]], is_lasting: bool
) -> None:
    """Its ops run one by one, and from then on apart."""
    rows = make_rows()
    expected = rows.sin().exp()
    run_slice, calls = stretch.run_slice, [0]

    def refuse(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2 or is_lasting:
            raise Infeasible(needed_bytes=1, budget_bytes=1, op="exp", is_whole_step=False)
        return run_slice(*args)

    with fit_known(profile, torch.sin, torch.exp) as room:
        monkeypatch.setattr(stretch, "run_slice", refuse)
        for _ in range(2):
            with room.step():
                found = rows.sin().exp()
            assert torch.equal(found, expected)
    assert ("sin", "exp") not in stretches and calls[0] >= 2


def test_a_failed_write_leaves_nothing_wrong(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes with the first use of a result, and with each later one until the disk works again."""
    rows = make_rows()
    expected = rows.sin()
    with fit_known(profile, torch.sin) as room, room.step():
        made = rows.sin()
        write = SlicedStretch.run

        def fail(self: SlicedStretch) -> None:
            write(self)
            raise TransferFailed("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(SlicedStretch, "run", fail)
            for _ in range(2):
                with pytest.raises(TransferFailed):
                    made.sum()
        assert torch.equal(made[3], expected[3])


def test_results_that_nobody_uses(profile: HardwareProfile, stretches: list[tuple[str, ...]]) -> None:
    with fit_known(profile, torch.sin) as room, room.step():
        stretches.clear()
        made = make_rows().sin()
        del made
        make_rows().sum()
        assert not stretches
        assert not get_pager(room).sections.list_made() and not room._modes.sliced_ops.has_waiting
