"""Transfers after a fork, and after an exception that came at a bad moment."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import elbowroom
from elbowroom import _threads
from elbowroom._threads import can_start_threads
from elbowroom.errors import TransferFailed
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.planner.searching.cores import run_all
from elbowroom.runtime.copies import Record, Records
from elbowroom.runtime.spill_queue import SpillCopy, SpillQueue
from elbowroom.runtime.stream_transfers import StreamTransfers
from elbowroom.runtime.transfers import ThreadTransfers
from elbowroom.tiers.disk import SpillFile
from elbowroom.tiers.pinned import HostSlabs
from tests.fake_streams import FakeStreams, pattern
from tests.leaks import list_nameless_files

ROOT = pathlib.Path(__file__).parents[2]


def make_storage(number: int, nbytes: int = 20_000) -> torch.UntypedStorage:
    return pattern(number, nbytes).untyped_storage()


def holds(storage: torch.UntypedStorage, number: int) -> bool:
    found = torch.empty(0, dtype=torch.uint8).set_(storage)
    return bool(torch.equal(found, pattern(number, storage.nbytes())))


def list_spill_files(folder: pathlib.Path) -> list[str]:
    """Those of this folder that are open."""
    return [name for name in list_nameless_files() if str(folder) in name]


def in_child(run: Callable[[], None]) -> None:
    """Run in a forked process, which must end well within a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork beside threads is what is tested
        pid = os.fork()
    if pid == 0:
        try:
            threading.Timer(60, os._exit, (2,)).start()
            run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_process_has_a_spill_file_of_its_own(tmp_path: pathlib.Path) -> None:
    transfers = ThreadTransfers(SpillFile(tmp_path))
    source = make_storage(1)
    copy = transfers.offload(source)
    transfers.finish(copy)

    def child() -> None:
        other = make_storage(2)
        mine = transfers.offload(other)  # the parent's block is at the same offset of the parent's file
        transfers.finish(mine)
        back = transfers.reload(mine)
        transfers.finish(mine)
        assert holds(back, 2)
        for refused in (transfers.reload, transfers.finish):
            with pytest.raises(TransferFailed, match="forked"):
                refused(copy)
        transfers.discard(copy)
        transfers.discard(mine)
        transfers.close()
        assert list_spill_files(tmp_path) == []

    in_child(child)
    back = transfers.reload(copy)
    transfers.finish(copy)
    assert holds(back, 1)
    transfers.discard(copy)
    transfers.close()


def test_a_closed_spill_file_takes_no_disk_though_a_forked_process_holds_it(tmp_path: pathlib.Path) -> None:
    spill = SpillFile(tmp_path)
    spill.reserve(1 << 20)
    held = os.dup(spill._file.fileno())
    in_child(spill.close)
    assert os.fstat(held).st_size == 1 << 20
    spill.close()
    assert os.fstat(held).st_size == 0
    os.close(held)


def test_a_forked_process_cannot_use_the_device_and_leaves_its_memory_alone() -> None:
    streams = FakeStreams()
    transfers = StreamTransfers(streams, HostSlabs(1 << 16, 1 << 14, pinning=streams))
    storage = streams.allocate(4000)
    copy = transfers.offload(storage)

    def child() -> None:
        for refused in (lambda: transfers.offload(storage), lambda: transfers.reload(copy)):
            with pytest.raises(TransferFailed, match="forked"):
                refused()
        transfers.discard(copy)
        transfers.close()
        assert streams.pinned != {}  # for the driver it is the parent's

    in_child(child)
    transfers.finish(copy)
    transfers.discard(copy)
    transfers.close()
    assert streams.pinned == {}


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, None], ids=["refused", "no memory", "dies at once"])
def test_transfers_without_a_thread(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    """If memory is short, a thread may die before it has run any of Python's code. `Thread.start` does not notice."""

    def refuse(self: threading.Thread) -> None:
        if error is not None:
            raise error("can't start new thread")

    monkeypatch.setattr(_threads, "START_SECONDS", 0.01)
    transfers, source = ThreadTransfers(SpillFile(tmp_path)), make_storage(3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "_bootstrap" if error is None else "start", refuse)
        copy = transfers.offload(source)
        transfers.finish(copy)
        back = transfers.reload(copy)
        transfers.finish(copy)
        assert holds(back, 3)
        patch.setattr(SpillFile, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            transfers.offload(source)
        assert not can_start_threads()
        assert run_all([lambda: 1, lambda: 2]) == [1, 2]
        vars(threading)["_limbo"].clear()  # of threads that will never begin
    transfers.finish(copy)
    transfers._queue._starts_from = 0.0
    other = transfers.offload(source)  # where there may be threads again
    transfers.finish(other)
    assert transfers._queue._thread is not None
    for each in (copy, other):
        transfers.discard(each)
    gc.collect()  # the interrupted copy may be part of a cycle
    transfers.close()
    assert list_spill_files(tmp_path) == []


def test_a_signal_handler_in_the_middle_of_a_transfer(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may transfer other copies, and is refused the one that is under way, whose bytes are not there yet."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    transfers = ThreadTransfers(SpillFile(tmp_path))
    read, found, errors = SpillFile.read, [], []

    def interrupted(spill: SpillFile, *args: Any) -> None:
        monkeypatch.setattr(SpillFile, "read", read)
        for copy in (other, copy_under_way):
            try:
                found.append(transfers.reload(copy))
                transfers.finish(copy)
            except TransferFailed as error:
                errors.append(str(error))
        read(spill, *args)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    copy_under_way = transfers.offload(make_storage(3))
    other = transfers.offload(make_storage(4))
    monkeypatch.setattr(SpillFile, "read", interrupted)
    back = transfers.reload(copy_under_way)
    transfers.finish(copy_under_way)
    assert holds(back, 3) and holds(found[0], 4)
    assert [each for each in errors if "signal handler" in each] == errors != []
    found.clear()
    for each in (copy_under_way, other):
        transfers.discard(each)
    transfers.close()


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_in_a_submission_neither_hangs_nor_leaks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    transfers, source = ThreadTransfers(SpillFile(tmp_path)), make_storage(4)
    kept = transfers.offload(source)
    submit = SpillQueue.submit

    def interrupted(*args: object) -> None:
        if moment == "after":
            submit(*args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SpillQueue, "submit", interrupted)
        for begin in (lambda: transfers.offload(source), lambda: transfers.reload(kept)):
            with pytest.raises(KeyboardInterrupt):
                begin()
    back = transfers.reload(kept)
    transfers.finish(kept)
    assert holds(back, 4)
    transfers.discard(kept)
    thread = transfers._queue._thread
    transfers.close()
    gc.collect()
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive() and list_spill_files(tmp_path) == []


def test_what_ctrl_c_left_halfway_is_mended_before_anything_else_changes() -> None:
    calls: list[str] = []
    dead: list[Record] = []
    records = Records(lambda kept: calls.append("restore"), dead.append)

    def interrupted() -> None:
        raise KeyboardInterrupt

    copy = SpillCopy(10, SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        records.reserve(copy, interrupted)
    del copy
    gc.collect()
    for record in dead:  # as the thread does
        records.free(record, lambda _: calls.append("give"))
    other = SpillCopy(10, SimpleNamespace())  # type: ignore[arg-type]
    records.reserve(other, lambda: calls.append("take"))
    assert calls == ["restore", "take"]


def test_ctrl_c_while_waiting_for_the_thread_does_not_stop_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a lock of Python's own has been taken and its `with` is not entered yet."""
    transfers, source = ThreadTransfers(SpillFile(tmp_path)), make_storage(5)
    may_write, write = threading.Event(), SpillFile.write
    monkeypatch.setattr(SpillFile, "write", lambda *args: may_write.wait(30) and write(*args))
    copy = transfers.offload(source)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is threading.Condition.__enter__.__code__ and event == "return":
            sys.settrace(None)
            may_write.set()
            raise KeyboardInterrupt
        return trace

    timer = threading.Timer(0.2, may_write.set)
    timer.start()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            transfers.finish(copy)
    finally:
        sys.settrace(None)
    timer.join()
    other = transfers.offload(source)
    assert other.last is not None
    deadline = time.monotonic() + 10
    while not other.last.is_done and time.monotonic() < deadline:
        time.sleep(0.01)
    assert other.last.is_done, "the thread waits for a lock that nobody will release"
    transfers.discard(copy)
    transfers.discard(other)
    transfers.close()


def test_closing_closes_the_file_though_an_error_has_ended_the_thread(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers, source = ThreadTransfers(SpillFile(tmp_path)), make_storage(6)
    copy = transfers.offload(source)
    transfers.finish(copy)
    thread = transfers._queue._thread
    assert thread is not None

    def end(queue: SpillQueue) -> bool:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        patch.setattr(SpillQueue, "_take", end)
        transfers._queue._jobs.put(None)
        thread.join(10)
    transfers.discard(copy)
    transfers.close()
    assert list_spill_files(tmp_path) == []


def test_a_disk_that_cannot_shorten_the_file_leaves_none_open(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "ftruncate", fail)
    spill = SpillFile(tmp_path)
    offset = spill.reserve(5000)
    spill.free(offset, 5000)
    for _ in range(2):
        spill.prepare(0, gives_back=True)
    assert spill.file_bytes >= 5000
    spill.close()
    assert list_spill_files(tmp_path) == []


def test_a_copy_that_nobody_discards_is_freed_with_the_transfers_on_streams() -> None:
    streams = FakeStreams()
    transfers = StreamTransfers(streams, HostSlabs(1 << 16, 1 << 14, pinning=streams))
    copy = transfers.offload(streams.allocate(4000))
    transfers.close()
    assert streams.pinned != {}
    del copy
    assert streams.pinned == {} and streams.violations == []


def test_exceptions_at_many_lines_leave_nothing_wrong(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    """A part of what benchmarks/faults.py does."""
    elbowroom.save(profile, tmp_path / "profile.json")
    for way, stride in (("streams", 211), ("offload", 997)):
        command = [
            sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--work", "--ways", way,
            "--errors", "KeyboardInterrupt", "--stride", str(stride), "--first", "5", "--seconds", "60",
            "--profile", str(tmp_path / "profile.json"), "--folder", str(tmp_path), "--most", "12",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert len([each for each in found if each["place"]]) > 5
        assert [each for each in found if each["wrong"]] == []


class Large(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that a worker makes from more than the budget of the room."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        weight = torch.ones(64, requires_grad=True)
        for _ in range(8):
            torch.zeros(1 << 20).add_(1)
        (weight * weight).sum().backward()
        assert weight.grad is not None
        return weight.grad * index


@pytest.mark.parametrize("mode", ["dynamic", "auto"])
def test_a_worker_that_is_forked_inside_a_step_is_left_alone(mode: str, profile: HardwareProfile) -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)))
    options: dict[str, object] = {"mode": mode, "min_offload_bytes": 1, "profile": profile}
    loader = torch.utils.data.DataLoader(Large(), num_workers=1, multiprocessing_context="fork", timeout=60)
    with warnings.catch_warnings(), elbowroom.fit(model, [], 900_000, **options) as room:
        warnings.simplefilter("ignore")  # a fork beside threads is what is tested
        for _ in range(5):
            with room.step():
                loss = model(torch.ones(512, 64)).sum()
                found = [float(batch.sum()) for batch in loader]
                loss.backward()
            assert found == [0.0, 128.0, 256.0, 384.0]
