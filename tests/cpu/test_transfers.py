"""Transfers of the CPU: a thread and a spill file."""

from __future__ import annotations

import errno
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
import torch

import elbowroom.errors
from elbowroom.errors import TierFull, TransferFailed, UsageError
from elbowroom.hardware.probe import probe
from elbowroom.runtime.spill_queue import SpillJob
from elbowroom.runtime.transfers import SpillCopy, ThreadTransfers
from elbowroom.tiers.disk import SpillFile
from tests.fake_streams import Program, pattern
from tests.leaks import list_threads


def make_storage(number: int, nbytes: int) -> torch.UntypedStorage:
    return pattern(number, nbytes).untyped_storage()


def holds(storage: torch.UntypedStorage, number: int) -> bool:
    found = torch.empty(0, dtype=torch.uint8).set_(storage)
    return bool(torch.equal(found, pattern(number, storage.nbytes())))


def our_threads() -> list[str]:
    return list_threads("elbowroom-transfers")


def open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue  # the one that listed them
    return [path for path in found if "elbowroom" in path or "(deleted)" in path]


@pytest.fixture
def transfers(tmp_path: pathlib.Path):
    before = open_files()
    made = ThreadTransfers(SpillFile(tmp_path))
    yield made
    made.close()
    assert our_threads() == []
    assert open_files() == before


def fail_with(number: int):
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


# Round trips --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3_000_000])
def test_a_storage_comes_back_as_it_left(transfers: ThreadTransfers, nbytes: int) -> None:
    source = make_storage(1, nbytes)
    copy = transfers.offload(source)
    transfers.finish(copy)
    assert holds(source, 1)
    del source
    for _ in range(2):  # the copy stays valid
        back = transfers.reload(copy)
        transfers.finish(copy)
        assert holds(back, 1)
    transfers.discard(copy)
    assert (transfers.offloaded_bytes, transfers.reloaded_bytes) == (nbytes, 2 * nbytes)


def test_a_reload_never_overtakes_its_own_offload(transfers: ThreadTransfers) -> None:
    source = make_storage(2, 5_000_000)
    copy = transfers.offload(source)
    back = transfers.reload(copy)
    transfers.finish(copy)
    assert holds(back, 2)
    transfers.discard(copy)


def test_finishing_an_early_reload_waits_for_the_reload(
    transfers: ThreadTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, has_read = threading.Event(), threading.Event()
    write, read = os.pwrite, os.preadv

    def slow_write(*arguments) -> int:
        may_write.wait()
        return write(*arguments)

    def slow_read(*arguments) -> int:
        time.sleep(0.05)
        try:
            return read(*arguments)
        finally:
            has_read.set()

    monkeypatch.setattr(os, "pwrite", slow_write)
    monkeypatch.setattr(os, "preadv", slow_read)
    source = make_storage(2, 5000)
    copy = transfers.offload(source)
    back = transfers.reload(copy)
    may_write.set()
    transfers.finish(copy)
    finished_late_enough = has_read.is_set()
    has_read.wait()  # the thread must not be left writing into memory that is gone
    transfers.discard(copy)
    assert finished_late_enough
    assert holds(back, 2)


class Memory:
    """What a program needs besides transfers, on a CPU that does as it is told at once."""

    def __init__(self) -> None:
        self.violations: list[str] = []

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()

    def write(self, storage: torch.UntypedStorage, number: int) -> None:
        torch.empty(0, dtype=torch.uint8).set_(storage).copy_(pattern(number, storage.nbytes()))

    def check(self, storage: torch.UntypedStorage, number: int, what: str) -> None:
        if not holds(storage, number):
            self.violations.append(what)

    def pause(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_back_is_what_left(tmp_path: pathlib.Path, seed: int) -> None:
    spill, memory = SpillFile(tmp_path, 1 << 20), Memory()
    transfers = ThreadTransfers(spill)
    max_bytes = random.Random(seed).choice((5000, 300_000))
    Program(transfers, memory, seed, max_bytes, is_careful=True).run(150)
    assert memory.violations == []
    assert spill.is_empty
    transfers.close()
    assert our_threads() == []


def test_waiting_is_counted(transfers: ThreadTransfers, monkeypatch: pytest.MonkeyPatch) -> None:
    release, write = threading.Event(), os.pwrite

    def slow(*arguments) -> int:
        release.wait()
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", slow)
    source = make_storage(3, 10_000)
    copy = transfers.offload(source)
    threading.Timer(0.05, release.set).start()
    transfers.finish(copy)
    assert transfers.stall_seconds > 0.02
    stalled = transfers.stall_seconds
    transfers.finish(copy)
    assert transfers.stall_seconds == stalled
    transfers.discard(copy)


# Where the file is --------------------------------------------------------------------------------------------------


def test_a_folder_that_is_missing_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="spill_folder"):
        SpillFile(tmp_path / "nowhere")


def test_a_file_is_not_a_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="spill_folder"):
        SpillFile(tmp_path / "file")


def test_a_folder_that_is_not_writable_is_refused(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    # Nothing is locked for the superuser, except where the system lets nobody make a file.
    with pytest.raises(UsageError, match="spill_folder"):
        SpillFile("/proc" if os.geteuid() == 0 else folder)


def test_no_file_is_ever_seen_in_the_folder(tmp_path: pathlib.Path) -> None:
    transfers = ThreadTransfers(SpillFile(tmp_path))
    source = make_storage(4, 100_000)
    copy = transfers.offload(source)
    transfers.finish(copy)
    assert os.listdir(tmp_path) == []
    transfers.discard(copy)
    transfers.close()
    assert os.listdir(tmp_path) == []


def test_a_killed_process_leaves_nothing(tmp_path: pathlib.Path) -> None:
    # Without torch, so that it starts at once.
    script = """
import ctypes, sys, time
from elbowroom.tiers.disk import SpillFile
spill = SpillFile(sys.argv[1])
memory = ctypes.create_string_buffer(1 << 20)
spill.write(spill.reserve(1 << 20), ctypes.addressof(memory), 1 << 20)
print("written", flush=True)
time.sleep(600)
"""
    source = pathlib.Path(elbowroom.errors.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    arguments = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "written\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert os.listdir(tmp_path) == []


# Full and broken disks ----------------------------------------------------------------------------------------------


def test_a_full_spill_file_refuses_and_has_room_again(tmp_path: pathlib.Path) -> None:
    transfers = ThreadTransfers(SpillFile(tmp_path, 16384))
    source = make_storage(5, 8192)
    copies = [transfers.offload(source), transfers.offload(source)]
    with pytest.raises(TierFull, match="host_bytes=") as caught:
        transfers.offload(source)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (8192, 0)
    assert transfers.offloaded_bytes == 16384
    transfers.discard(copies.pop())
    copies.append(transfers.offload(source))
    for copy in copies:
        transfers.discard(copy)
    transfers.close()


@pytest.mark.parametrize(
    ("number", "says"), [(errno.ENOSPC, "disk space"), (errno.EDQUOT, "quota of the disk"), (errno.EFBIG, "ulimit -f")]
)
def test_a_full_disk_refuses_before_anything_is_written(
    transfers: ThreadTransfers, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    source = make_storage(6, 8192)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail_with(number))
        with pytest.raises(TierFull, match=says):
            transfers.offload(source)
    assert transfers.offloaded_bytes == 0
    copy = transfers.offload(source)  # once there is space again
    transfers.finish(copy)
    back = transfers.reload(copy)
    transfers.finish(copy)
    assert holds(back, 6)
    transfers.discard(copy)


def test_a_full_disk_is_told_of_a_folder_that_has_another_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    spill = SpillFile(folder)
    folder.rename(tmp_path / "moved")
    monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.ENOSPC))
    with pytest.raises(TierFull, match="Free some disk space") as caught:
        spill.reserve(8192)
    assert caught.value.free_bytes > 0
    spill.close()


def test_without_a_folder_for_temporary_files_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with pytest.raises(UsageError, match=r"no folder for temporary files .*TMPDIR.*spill_folder"):
        SpillFile(None)
    with pytest.raises(UsageError, match="no folder for temporary files"):
        probe("cpu")


def test_a_disk_that_cannot_grow_the_file_fails_the_transfer(
    transfers: ThreadTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.EIO))
    with pytest.raises(TransferFailed, match="cannot grow"):
        transfers.offload(make_storage(6, 8192))
    assert transfers.offloaded_bytes == 0


def test_a_write_that_fails_is_reported_on_finish_and_the_source_is_intact(
    transfers: ThreadTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_storage(7, 100_000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail_with(errno.ENOSPC))
        copy = transfers.offload(source)
        with pytest.raises(TransferFailed, match="No space left") as caught:
            transfers.finish(copy)
    assert isinstance(caught.value.__cause__, OSError)
    assert holds(source, 7)
    transfers.discard(copy)
    copy = transfers.offload(source)  # the thread goes on
    transfers.finish(copy)
    transfers.discard(copy)


def test_a_read_that_fails_is_reported_on_finish_and_can_be_tried_again(
    transfers: ThreadTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_storage(8, 100_000)
    copy = transfers.offload(source)
    transfers.finish(copy)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail_with(errno.EIO))
        held = transfers.reload(copy)
        with pytest.raises(TransferFailed, match=os.strerror(errno.EIO)):
            transfers.finish(copy)
    held = transfers.reload(copy)
    transfers.finish(copy)
    assert holds(held, 8)
    transfers.discard(copy)


@pytest.mark.parametrize("is_out", [True, False])
def test_a_job_that_cannot_run_is_reported_and_the_thread_goes_on(
    transfers: ThreadTransfers, monkeypatch: pytest.MonkeyPatch, is_out: bool
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    source = make_storage(1, 1 << 16)
    with monkeypatch.context() as patch:
        if is_out:
            patch.setattr(SpillJob, "run", fail)
        copy = transfers.offload(source)
        if not is_out:
            transfers.finish(copy)
            patch.setattr(SpillJob, "run", fail)
            transfers.reload(copy)
        with pytest.raises(TransferFailed):
            transfers.finish(copy)
    assert holds(source, 1)
    transfers.discard(copy)
    another = transfers.offload(source)
    transfers.finish(another)
    transfers.discard(another)


def test_short_writes_and_reads_are_carried_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda file, data, offset: read(file, [data[0][:700]], offset))
    transfers = ThreadTransfers(SpillFile(tmp_path))
    source = make_storage(9, 10_001)
    copy = transfers.offload(source)
    transfers.finish(copy)
    back = transfers.reload(copy)
    transfers.finish(copy)
    assert holds(back, 9)
    transfers.discard(copy)
    transfers.close()


def test_a_file_made_shorter_by_another_is_noticed(transfers: ThreadTransfers) -> None:
    source = make_storage(1, 10_000)
    copy = transfers.offload(source)
    transfers.finish(copy)
    os.ftruncate(transfers._spill._file.fileno(), 5000)
    held = transfers.reload(copy)
    with pytest.raises(TransferFailed, match="shorter"):
        transfers.finish(copy)
    assert held.nbytes() == 10_000
    transfers.discard(copy)


# The end ------------------------------------------------------------------------------------------------------------


def test_the_thread_is_there_only_while_it_is_needed(tmp_path: pathlib.Path) -> None:
    transfers = ThreadTransfers(SpillFile(tmp_path))
    assert our_threads() == []
    source = make_storage(1, 5000)
    copy = transfers.offload(source)
    assert len(our_threads()) == 1
    transfers.discard(copy)
    transfers.close()
    assert our_threads() == []
    transfers.close()  # a second time does no harm


def test_closing_waits_for_the_last_copy(tmp_path: pathlib.Path) -> None:
    spill = SpillFile(tmp_path)
    transfers = ThreadTransfers(spill)
    copies: list[SpillCopy] = []
    sources = [make_storage(number, 20_000) for number in range(2)]
    for source in sources:
        copies.append(transfers.offload(source))
    transfers.close()
    for number, copy in enumerate(copies):
        back = transfers.reload(copy)
        transfers.finish(copy)
        assert holds(back, number)
        assert len(our_threads()) == 1
        transfers.discard(copy)
    assert our_threads() == []
    with pytest.raises(ValueError, match="closed"):
        spill.write(0, back.data_ptr(), 10)
