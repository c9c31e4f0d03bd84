"""Op times that were measured before: when they are believed, smoothed and stored. No torch."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pathlib

import pytest

from elbowroom.cost import op_time_store, op_times
from elbowroom.cost.op_time_store import OpTimeStore
from elbowroom.cost.prediction_check import PredictionCheck, is_off
from elbowroom.cost.price import price
from elbowroom.cost.recordings import leave_out_replays, smooth_recordings
from elbowroom.ir import files
from elbowroom.ir.costs import Measurements
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.op_times import OpTime, OpTimes
from elbowroom.ir.plan import Plan, Segment
from elbowroom.ir.trace import Trace
from tests.generators import make_chain

SIZES = (4096, 8192, 12288, 16384)


@pytest.fixture
def store(tmp_path: pathlib.Path) -> OpTimeStore:
    return OpTimeStore("some CPU, 2 threads", tmp_path)


def test_measured_times_replace_the_rooflines_if_plausible(profile: HardwareProfile) -> None:
    trace: Trace = make_chain(SIZES)
    before = price(trace, profile)
    first, second, *rest = dict.fromkeys(map(op_times.make_key, trace.ops))
    factor = op_times.MOST_TIMES_THE_ROOFLINE
    seconds = {op_times.make_key(op): each for op, each in zip(trace.ops, before.op_seconds, strict=True)}
    past = {first: 3 * seconds[first], second: 2 * factor * seconds[second]}
    past |= {key: seconds[key] / (2 * factor) for key in rest[:1]} | {"aten.unknown ab": 1.0}
    after = price(trace, profile, past=past)
    for op, old, new in zip(trace.ops, before.op_seconds, after.op_seconds, strict=True):
        assert new == (3 * old if op_times.make_key(op) == first else old)
    assert not after.measured and after.workspace_bytes == before.workspace_bytes


def test_an_op_is_known_by_name_shapes_and_dtypes() -> None:
    op = next(op for op in make_chain(SIZES).ops if op.reads and op.writes)
    view = op.reads[0]
    others = [
        dataclasses.replace(op, name=op.name + "x"),
        dataclasses.replace(op, reads=(dataclasses.replace(view, shape=(*view.shape, 1)), *op.reads[1:])),
        dataclasses.replace(op, reads=(dataclasses.replace(view, dtype="bfloat16"), *op.reads[1:])),
        dataclasses.replace(op, reads=(*op.reads, *op.writes), writes=()),
    ]
    assert len({op_times.make_key(each) for each in [op, *others]}) == 5
    elsewhere = dataclasses.replace(view, storage=view.storage + 7, version=view.version + 1)
    same = dataclasses.replace(op, tick=op.tick + 9, reads=(elsewhere, *op.reads[1:]), module="h.1")
    assert op_times.make_key(same) == op_times.make_key(op)


def test_times_are_smoothed_over_steps_and_runs(store: OpTimeStore) -> None:
    for seconds in (1.0, 3.0):
        store.add({"a": seconds})
    assert store.load() == {"a": 2.0}  # at first the mean, then exponential
    for _ in range(30):
        store.add({"a": 10.0})
    store.add({"a": 0.0001, "b": 5.0})
    assert store.load() == {"a": pytest.approx(7.0, rel=1e-2), "b": 5.0}


def test_the_store_is_bounded(store: OpTimeStore, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(op_times, "MOST_KINDS", 3)
    monkeypatch.setattr(op_time_store, "MOST_FILES", 2)
    for key in "abcade":
        store.add({key: 1.0})
    assert list(store.load()) == ["a", "d", "e"]
    for other in range(3):
        OpTimeStore(f"machine {other}", tmp_path).add({"a": 1.0})
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize("text", ["", "{", "\0" * 100, '{"format":"elbowroom.plan","version":1,"value":{}}'])
def test_a_damaged_file_counts_as_empty_and_is_replaced(store: OpTimeStore, text: str) -> None:
    store.path.write_text(text)
    assert store.load() == {}
    store.add({"a": 1.0})
    assert store.load() == {"a": 1.0}


def test_what_does_not_belong_is_ignored(store: OpTimeStore, tmp_path: pathlib.Path) -> None:
    time = OpTime(key="a", seconds=1.0, steps=1)
    files.save(OpTimes(machine="another", times=(time,)), store.path)
    assert store.load() == {}
    times = (time, OpTime(key="b", seconds=0.0, steps=1))
    files.save(OpTimes(machine="some CPU, 2 threads", times=times), store.path)
    assert store.load() == {"a": 1.0}
    assert OpTimeStore("some CPU, 4 threads", tmp_path).load() == {}


def test_a_folder_that_cannot_be_written_loses_the_times_only(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    lost = OpTimeStore("machine", tmp_path / "file" / "folder")
    lost.add({"a": 1.0})
    assert lost.load() == {}


def _add(folder: pathlib.Path, number: int) -> None:
    store = OpTimeStore("machine", folder)
    for index in range(10):
        store.add({f"{number} {index}": 1.0, "common": 1.0})


def test_processes_take_turns(tmp_path: pathlib.Path) -> None:
    """No process loses another's times, and a reader never sees half a file."""
    spawning = multiprocessing.get_context("fork")
    processes = [spawning.Process(target=_add, args=(tmp_path, number)) for number in range(4)]
    for process in processes:
        process.start()
    store = OpTimeStore("machine", tmp_path)
    while any(process.is_alive() for process in processes):
        assert not store.path.exists() or files.load(OpTimes, store.path).times
    for process in processes:
        process.join()
    assert len(store.load()) == 41
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ""}


def test_only_repeated_differences_count_and_ever_fewer_of_them() -> None:
    check = PredictionCheck()
    assert not is_off(1.3, 1.0) and is_off(1.5, 1.0) and is_off(0.7, 1.0) and not is_off(0.8, 1.0)
    assert not is_off(0.7, 1.0, only_slower=True) and not is_off(0.002, 0.001)
    assert [check.fails(seconds, 1.0) for seconds in (2.0, 1.0, 2.0, 1.0, 1.1)] == [False] * 5
    assert [check.fails(2.0, 1.0) for _ in range(2)] == [False, True]
    noisy = [check.fails(2.0, 1.0) for _ in range(1000)]
    assert sum(noisy) == 7, "4, 8, 16, ... steps in a row"


def test_measuring_again_waits_until_it_takes_no_longer_than_what_was_off() -> None:
    check = PredictionCheck()
    fails = [check.fails(seconds, 1.0, cost_seconds=10.0) for seconds in (2.0,) * 5 + (1.0,) + (2.0,) * 30]
    assert [index for index, each in enumerate(fails) if each] == [10, 30], "ten and twenty seconds off"


def test_recordings_are_smoothed_without_replays() -> None:
    trace = make_chain(SIZES)
    ticks = [op.tick for op in trace.ops[:2]]
    recordings = [
        Measurements(op_seconds=(seconds,) * len(trace.ops), workspace_bytes=(9,) * len(trace.ops),
                     step_seconds=100 * seconds, stall_seconds=seconds)
        for seconds in (1.0, 2.0, 6.0)
    ]  # fmt: skip
    smoothed = smooth_recordings(recordings, (5,) * len(trace.ops))
    assert smoothed.op_seconds == pytest.approx((3.0,) * len(trace.ops))
    assert (smoothed.step_seconds, smoothed.workspace_bytes[0]) == (pytest.approx(300.0), 5)
    plan = Plan(
        trace_digest="", strategy="", budget_bytes=1, decisions=(),
        segments=(Segment(ops=tuple(ticks), outputs=(), leaves=()),) * 2,
    )  # fmt: skip
    assert leave_out_replays(trace, plan, smoothed).step_seconds == pytest.approx(300.0 - 4 * 3.0)
