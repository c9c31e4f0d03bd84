"""Evicting and replaying online: within the budget, always from the right contents, and as the DTR prototype does it.

With ELBOWROOM_DTR_LOGS (a folder of the DTR prototype's logs) what that prototype's own simulator makes of them is
reproduced.
"""

from __future__ import annotations

import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as some

from benchmarks import dtr_simulator
from benchmarks.dtr_simulator import Ending, Score, run_online
from elbowroom.errors import TraceError
from elbowroom.importers import Imported, read_log
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Role, Trace
from elbowroom.simulator.simulate import simulate
from tests.generators import Program, jobs, keep_everything, make_costs
from tests.pure.test_importers import call, constant, logs, release, write


def plain_peak(trace: Trace, costs: Costs) -> int:
    return simulate(trace, costs, keep_everything(costs)).peak_bytes


class Checked(dtr_simulator._Run):
    """Keeps what is in every storage, and holds each replay to what its op read and made the first time."""

    contents: dict[int, object]
    seen: dict[int, tuple[object, ...]]

    def _execute(self, op: int) -> None:
        if not hasattr(self, "contents"):
            self.contents = {home.id: "there" for home in self._trace.storages if home.created < 0}
            self.seen = {}
        read = tuple(self.contents[storage] for storage in self._facts.reads[op])
        assert self.seen.setdefault(op, read) == read
        super()._execute(op)
        for view in self._trace.ops[op].writes:
            self.contents[view.storage] = (op, view.version)

    def _evict(self, storage: int) -> None:
        assert not self._locks[storage]
        self.contents.pop(storage)
        super()._evict(storage)


@given(job=jobs())
def test_with_room_for_all_it_is_the_plain_step(job: tuple[Trace, Costs]) -> None:
    trace, costs = job
    peak = plain_peak(trace, costs)
    outcome = run_online(trace, costs, peak)
    assert outcome.ending is Ending.FINISHED and outcome.op == len(trace.ops)
    assert outcome.peak_bytes == peak
    assert outcome.compute_seconds == pytest.approx(sum(costs.op_seconds))
    assert outcome.evictions == 0 and outcome.recompute_seconds == 0


@given(job=jobs(), share=some.floats(0.1, 1), score=some.sampled_from(Score))
def test_replays_find_what_their_op_read(job: tuple[Trace, Costs], share: float, score: Score) -> None:
    trace, costs = job
    check_run(trace, costs, share, score)


@given(parts=logs(), share=some.floats(0.1, 1), score=some.sampled_from(Score))
def test_replays_of_imported_steps_find_what_their_op_read(
    parts: list, share: float, score: Score, tmp_path_factory: pytest.TempPathFactory
) -> None:
    imported = read_log("dtr", write(tmp_path_factory.mktemp("log"), *parts))
    check_run(imported.trace, imported.costs, share, score)


def check_run(trace: Trace, costs: Costs, share: float, score: Score) -> None:
    budget = int(plain_peak(trace, costs) * share)
    outcome = Checked(trace, costs, budget, score, 50 * sum(costs.op_seconds)).finish()
    assert outcome == run_online(trace, costs, budget, score=score, most_recompute=50)
    if outcome.ending is Ending.FINISHED:
        assert outcome.peak_bytes <= max(budget, sum(home.nbytes for home in trace.storages if home.created < 0))
        assert outcome.compute_seconds == pytest.approx(sum(costs.op_seconds))
    if outcome.recompute_seconds > 0:
        assert outcome.evictions > 0


# -- what must stay ---------------------------------------------------------------------------------------------------


def make_step(spoil: str) -> Trace:
    """x is made from w by way of v, and used at the end; a large block in between needs its room, or that of y."""
    program = Program()
    w = program.resident(10, Role.PARAMETER)
    v = program.op("make_v", [w], 1, barrier="it draws" if spoil == "early death" else "")
    x = program.op("make_x", [v], 100, barrier="it draws" if spoil == "barrier" else "")
    if spoil == "later write":
        program.op_in_place("change_v", [v], v)
    else:
        program.release(storage=v)
    y = program.op("make_y", [w], 100)
    large = program.op("make_large", [w], 100)
    program.release(storage=large)
    program.op("use", [x, y], 1)
    return program.finish(spoil)


@pytest.mark.parametrize("spoil", ["barrier", "later write", "early death"])
def test_what_cannot_be_replayed_stays(spoil: str) -> None:
    trace = make_step(spoil)
    costs = make_costs(trace, op_seconds=[1e-3, 1e-3, *[5e-3] * (len(trace.ops) - 2)])
    for score in Score:
        outcome = Checked(trace, costs, 212, score, 1.0).finish()
        assert outcome.ending is Ending.FINISHED
        assert outcome.recompute_seconds == 5e-3  # y was dearer, and went all the same
    free = make_step("")
    outcome = run_online(free, make_costs(free, op_seconds=[1e-3, 1e-3, *[5e-3] * 3]), 212, score=Score.LRU)
    assert outcome.recompute_seconds == pytest.approx(2e-3)


def test_workspace_needs_room_too() -> None:
    trace = make_step("")
    costs = make_costs(trace, workspace_bytes=50)
    peak = plain_peak(trace, costs)
    assert run_online(trace, costs, peak).peak_bytes == peak
    assert run_online(trace, costs, peak).evictions == 0
    assert run_online(trace, costs, peak - 1).evictions > 0


def test_what_a_replay_makes_a_second_time_is_not_kept_twice(tmp_path: pathlib.Path) -> None:
    imported = step(
        tmp_path,
        call("two", ["w"], {"a": 100, "b": 50}, 70), IDLE, call("more", ["w"], {"z": 200}, 10), release("z"),
        call("use", ["a"], {"r": 0}), call("yet more", ["w"], {"y": 150}, 10), release("y"),
        call("both", ["a", "b"], {"s": 0}), release("a", "b", "i", "r", "s"),
    )  # fmt: skip
    outcome = run_online(imported.trace, imported.costs, 300, score=Score.LOCAL)
    assert (outcome.ending, outcome.evictions) == (Ending.FINISHED, 1)
    assert round(outcome.recompute_seconds * 1e9) == 70


# -- who goes ---------------------------------------------------------------------------------------------------------

IDLE = call("idle", ["w"], {"i": 0}, 500)


def step(folder: pathlib.Path, *parts: list) -> Imported:
    return read_log("dtr", write(folder, constant("w", 0), *parts))


def replayed(imported: Imported, budget: int, score: Score) -> int:
    """Nanoseconds of replays."""
    outcome = run_online(imported.trace, imported.costs, budget, score=score)
    assert outcome.ending is Ending.FINISHED
    return round(outcome.recompute_seconds * 1e9)


def test_lru_evicts_what_was_used_longest_ago_and_local_what_is_cheap(tmp_path: pathlib.Path) -> None:
    imported = step(
        tmp_path,
        call("dear", ["w"], {"y": 100}, 1000), call("cheap", ["w"], {"x": 100}, 10), IDLE,
        call("more", ["w"], {"z": 100}, 10), release("x", "z"), call("use", ["y"], {"r": 0}), release("y", "i"),
    )  # fmt: skip
    assert replayed(imported, 200, Score.LRU) == 1000
    assert replayed(imported, 200, Score.LOCAL) == 0
    assert replayed(imported, 200, Score.EQ) == 0
    assert replayed(imported, 300, Score.LRU) == 0


def test_eq_counts_what_would_have_to_be_replayed_with_it(tmp_path: pathlib.Path) -> None:
    imported = step(
        tmp_path,
        call("dear", ["w"], {"a": 100}, 1000), call("cheap", ["a"], {"x": 100}, 10), release("a"),
        call("other", ["w"], {"y": 100}, 100), IDLE, call("more", ["w"], {"z": 100}, 10), release("y", "z", "i"),
        call("use", ["x"], {"r": 0}), release("x"),
    )  # fmt: skip
    assert replayed(imported, 200, Score.LOCAL) == 1010  # x was cheap, but what it is made from was gone
    assert replayed(imported, 200, Score.EQ) == 0


def test_results_are_there_at_the_end(tmp_path: pathlib.Path) -> None:
    imported = step(
        tmp_path, call("a", ["w"], {"g": 100}, 70), IDLE, call("b", ["w"], {"x": 100}, 10), release("x"),
    )  # fmt: skip
    assert replayed(imported, 100, Score.LRU) == 70


def test_out_of_memory_and_giving_up(tmp_path: pathlib.Path) -> None:
    imported = step(tmp_path, call("a", ["w"], {"x": 100}, 70), call("b", ["x"], {"y": 100}, 10))
    outcome = run_online(imported.trace, imported.costs, 150)
    assert outcome.ending is Ending.OUT_OF_MEMORY and outcome.op == 1
    turns = [call(f"use{index}", ["xy"[index % 2]], {f"r{index}": 0}, 1) for index in range(9)]
    imported = step(tmp_path, call("a", ["w"], {"x": 100}, 70), call("b", ["w"], {"y": 100}, 70), *turns, release("x"))
    outcome = run_online(imported.trace, imported.costs, 100)
    assert outcome.ending is Ending.GAVE_UP and outcome.recompute_seconds * 1e9 > 70 + 70 + 9
    assert run_online(imported.trace, imported.costs, 100, most_recompute=9).ending is Ending.FINISHED


def test_costs_of_another_trace(tmp_path: pathlib.Path) -> None:
    imported = step(tmp_path, call("a", ["w"], {"x": 1}))
    other = step(tmp_path, call("a", ["w"], {"x": 1}), call("b", ["w"], {"y": 1}))
    with pytest.raises(TraceError, match="costs of 2 ops do not fit a trace of 1"):
        run_online(imported.trace, other.costs, 1)


# -- the real logs ----------------------------------------------------------------------------------------------------

PROTOTYPE: dict[str, tuple[int, dict[tuple[float, Score], float | Ending]]] = {
    "resnet32": (10061179152, {
        (0.7, Score.EQ): 1.0462645, (0.5, Score.EQ): 1.1067847, (0.4, Score.EQ): 1.1403871, (0.3, Score.EQ): 1.1786307,
        (0.5, Score.LOCAL): 1.1965260, (0.4, Score.LOCAL): Ending.GAVE_UP,
    }),
    "unet": (8415764640, {
        (0.7, Score.EQ): 1.0845849, (0.5, Score.EQ): 1.1587468, (0.4, Score.EQ): Ending.OUT_OF_MEMORY,
        (0.5, Score.LOCAL): 1.8468525, (0.3, Score.LOCAL): Ending.GAVE_UP,
    }),
    "inceptionv4": (11245348984, {
        (0.7, Score.EQ): 1.0441521, (0.5, Score.EQ): 1.0918954, (0.4, Score.EQ): 1.1379775, (0.3, Score.EQ): 1.2435203,
        (0.5, Score.LOCAL): 1.3340895, (0.3, Score.LOCAL): Ending.GAVE_UP,
    }),
    "tv_densenet121": (11020749360, {
        (0.7, Score.EQ): 1.1035574, (0.5, Score.EQ): 1.1763468, (0.4, Score.EQ): 1.2928011, (0.3, Score.EQ): 1.4257876,
        (0.5, Score.LOCAL): 1.3346372,
    }),
    "transformer": (9864405000, {
        (0.7, Score.EQ): 1.0313807, (0.5, Score.EQ): 1.0583950, (0.4, Score.EQ): 1.0914202, (0.3, Score.EQ): 1.1237552,
        (0.3, Score.LOCAL): 1.5049182,
    }),
}  # fmt: skip
"""By log: bytes of which the budget is a share, and what the prototype's simulator (eager eviction, at most twice the
time) made of that budget when it was run: seconds over the plain ones, or how it failed."""


def test_the_prototypes_simulator_is_reproduced_on_its_own_logs() -> None:
    folder = os.environ.get("ELBOWROOM_DTR_LOGS")
    if not folder:
        pytest.skip("ELBOWROOM_DTR_LOGS names no folder")
    for name, (whole, expected) in PROTOTYPE.items():
        imported = read_log("dtr", next(pathlib.Path(folder).rglob(f"{name}-*.log")))
        seconds = sum(imported.costs.op_seconds)
        for (share, score), wanted in expected.items():
            outcome = run_online(imported.trace, imported.costs, int(whole * share), score=score)
            case = (name, share, score)
            if isinstance(wanted, Ending):
                assert (case, outcome.ending) == (case, wanted)
            else:
                assert (case, 1 + outcome.recompute_seconds / seconds) == (case, pytest.approx(wanted, rel=4e-3))
