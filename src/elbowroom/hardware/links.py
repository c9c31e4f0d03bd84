"""Measures how fast bytes move between neighbouring tiers, and how much compute slows down meanwhile.

Bytes are moved as the runtime moves them: pinned copies on a stream of their own between device and host, and
`os.pwrite` / `os.preadv` on the storage's own memory between memory and a spill file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import torch

from elbowroom.errors import TierError, UsageError
from elbowroom.hardware.timing import wait_for
from elbowroom.ir.hardware import Link
from elbowroom.units import format_bytes

SMALL_BYTES = 4 << 10
BLOCKS = 3


def check_spill_folder(folder: str, block_bytes: int) -> None:
    """Make sure that the folder can hold the file that the link is measured with.

    Raises:
        UsageError: it does not exist, is no folder, is not writable, or is nearly full.
    """
    if not os.path.isdir(folder):
        raise UsageError(f"the spill folder {folder!r} is not there; make it, or name another one in spill_folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write into the spill folder {folder!r} ({error.strerror or error}); name another in spill_folder"
        ) from error
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 2 * BLOCKS * block_bytes:
        raise UsageError(
            f"the spill folder {folder!r} has {format_bytes(free_bytes)} free and measuring takes "
            f"{format_bytes(2 * BLOCKS * block_bytes)}; make room, or name another one in spill_folder"
        )


def name_file_system(folder: str) -> str:
    """The kind of file system a folder lies on ("ext4", "tmpfs", ...), or "unknown file system"."""
    target = os.path.realpath(folder)
    best = ""
    found = "unknown file system"
    for partition in psutil.disk_partitions(all=True):
        inside = os.path.commonpath([partition.mountpoint, target]) == partition.mountpoint
        if inside and len(partition.mountpoint) >= len(best):
            best, found = partition.mountpoint, partition.fstype or found
    return found


def measure_disk_link(
    upper: str,
    folder: str,
    *,
    block_bytes: int,
    fresh_blocks: bool,
    compute: Callable[[], None],
    device: torch.device,
) -> Link:
    """The link from memory to a spill file in `folder`.

    Args:
        upper: name of the tier above the disk.
        block_bytes: size of each of the blocks that are moved; takes six times that in memory.
        fresh_blocks: whether reloading allocates new memory (CPU: `torch.empty`) or fills a standing buffer (CUDA).
        compute: a piece of the step's work, to see how much moving slows it down.

    Raises:
        UsageError: the disk filled up while measuring.
    """
    with _spill_file(folder) as file, _disk_errors(folder):
        blocks = [_faulted_in(block_bytes) for _ in range(BLOCKS)]

        def write_all() -> None:
            for index, block in enumerate(blocks):
                _write(file, block, index * block_bytes)

        def read_all() -> None:
            # All of them are held until the pass ends: otherwise the allocator hands out the same memory again.
            held = [_new_block(block_bytes) if fresh_blocks else block for block in blocks]
            for index, block in enumerate(held):
                _read(file, block, index * block_bytes)

        # The first pass makes the file grow. A training step writes the same places again and again.
        write_all()
        out_seconds, back_seconds = _median_of(write_all, 5), _median_of(read_all, 5)
        small = _faulted_in(SMALL_BYTES)
        out_small = _median_of(lambda: _write(file, small, 0), 50)
        back_small = _median_of(lambda: _read(file, _new_block(SMALL_BYTES) if fresh_blocks else small, 0), 50)
        drag = measure_drag(_alternate(file, blocks[0], fresh_blocks), compute, device)
    total = BLOCKS * block_bytes
    return Link(
        upper=upper,
        lower="disk",
        out_latency_seconds=_latency(out_small, total / out_seconds),
        out_bytes_per_second=total / out_seconds,
        back_latency_seconds=_latency(back_small, total / back_seconds),
        back_bytes_per_second=total / back_seconds,
        half_duplex=True,  # one thread moves both ways, whatever the disk could do
        drag_seconds_per_byte=drag,
        source=(
            f"measured with blocks of {format_bytes(block_bytes)} in a spill file on {name_file_system(folder)}, "
            "page cache included: slower where memory is too short for the page cache"
        ),
    )


def measure_device_link(device: torch.device, block_bytes: int, compute: Callable[[], None]) -> Link:
    """The link from a CUDA device to pinned host memory. Needs CUDA."""
    with torch.cuda.device(device):
        outward, inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        on_device = [torch.zeros(block_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        on_host = [torch.zeros(block_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        # The buffers were filled on the current stream.
        torch.cuda.synchronize(device)
        out_copies = [(outward, on_device[0], on_host[0])]
        back_copies = [(inward, on_host[1], on_device[1])]
        out_seconds, back_seconds = _copy_seconds(out_copies, device), _copy_seconds(back_copies, device)
        both_seconds = _copy_seconds(out_copies + back_copies, device)
        small_out = _copy_seconds([(outward, on_device[0][:SMALL_BYTES], on_host[0][:SMALL_BYTES])], device)
        small_back = _copy_seconds([(inward, on_host[1][:SMALL_BYTES], on_device[1][:SMALL_BYTES])], device)

        def move() -> int:
            with torch.cuda.stream(outward):
                on_host[0].copy_(on_device[0], non_blocking=True)
            outward.synchronize()
            return block_bytes

        drag = measure_drag(move, compute, device)
    return Link(
        upper="device",
        lower="host",
        out_latency_seconds=_latency(small_out, block_bytes / out_seconds),
        out_bytes_per_second=block_bytes / out_seconds,
        back_latency_seconds=_latency(small_back, block_bytes / back_seconds),
        back_bytes_per_second=block_bytes / back_seconds,
        half_duplex=_shares_a_lane(out_seconds, back_seconds, both_seconds),
        drag_seconds_per_byte=drag,
        source=f"measured with pinned copies of {format_bytes(block_bytes)}",
    )


Copy = tuple["torch.cuda.Stream", torch.Tensor, torch.Tensor]
"""A stream, a source and a destination."""


def _copy_seconds(copies: list[Copy], device: torch.device) -> float:
    """Median time until all copies, begun together on their streams, have ended."""
    times = []
    for _ in range(12):
        torch.cuda.synchronize(device)
        begun = torch.cuda.Event(enable_timing=True)
        begun.record()
        ended = []
        for stream, source, destination in copies:
            stream.wait_event(begun)
            with torch.cuda.stream(stream):
                destination.copy_(source, non_blocking=True)
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                ended.append(event)
        torch.cuda.synchronize(device)
        times.append(max(float(begun.elapsed_time(event)) for event in ended) / 1e3)
    # The first ones warm up.
    return max(statistics.median(times[2:]), 1e-9)


def measure_drag(move: Callable[[], int], compute: Callable[[], None], device: torch.device) -> float:
    """Compute seconds lost per byte moved meanwhile.

    Args:
        move: moves some bytes, waits for them and says how many; called over and over on a thread.
        compute: a fixed piece of work on the calling thread, about a tenth of a second long.
    """

    def timed() -> float:
        begun = time.perf_counter()
        compute()
        wait_for(device)
        return time.perf_counter() - begun

    timed()
    found, alone = [], timed()
    for _ in range(6):
        with _mover(move) as moved:
            before = moved()
            beside = timed()
            nbytes = moved() - before
        # Against the mean of the runs before and after, so that a slow drift of the machine cancels.
        alone_before, alone = alone, timed()
        if nbytes > 0:
            found.append((beside - (alone_before + alone) / 2) / nbytes)
    return max(statistics.median(found), 0.0) if found else 0.0


@contextlib.contextmanager
def _mover(move: Callable[[], int]) -> Iterator[Callable[[], int]]:
    """Move bytes on a thread until the block ends; gives a call that says how many have been moved."""
    stop = threading.Event()
    started = threading.Event()
    total = [0]
    errors = []

    def run() -> None:
        try:
            while not stop.is_set():
                total[0] += move()
                started.set()
        except Exception as error:
            errors.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="elbowroom-probe", daemon=True)
    thread.start()
    try:
        started.wait()
        yield lambda: total[0]
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


def _alternate(file: int, block: torch.Tensor, fresh_blocks: bool) -> Callable[[], int]:
    """A move of a few MiB for `measure_drag`: out and back in turn, as a step does."""
    # Small enough that the count of moved bytes is fine compared with the time it is taken over.
    block_bytes, turn = block.numel(), [0]
    nbytes = min(8 << 20, block_bytes)

    def move() -> int:
        turn[0] += 1
        offset = (turn[0] // 2 % BLOCKS) * block_bytes
        if turn[0] % 2:
            _write(file, block[:nbytes], offset)
        else:
            _read(file, _new_block(nbytes) if fresh_blocks else block[:nbytes], offset)
        return nbytes

    return move


def _shares_a_lane(out_seconds: float, back_seconds: float, both_seconds: float) -> bool:
    """Tell whether moving both ways at once takes closer to the sum of the two times than to the longer one."""
    return both_seconds > (max(out_seconds, back_seconds) + out_seconds + back_seconds) / 2


def _latency(small_seconds: float, bytes_per_second: float) -> float:
    """Return the seconds of a small transfer beyond those of its bytes."""
    return max(small_seconds - SMALL_BYTES / bytes_per_second, 0.0)


def _median_of(call: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return max(statistics.median(times), 1e-9)


def _new_block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _faulted_in(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu").fill_(1)


def _memory_of(block: torch.Tensor) -> memoryview:
    array = (ctypes.c_char * block.numel()).from_address(block.data_ptr())
    return memoryview(array).cast("B")


def _write(file: int, block: torch.Tensor, offset: int) -> None:
    memory, done = _memory_of(block), 0
    while done < len(memory):
        done += os.pwrite(file, memory[done:], offset + done)


def _read(file: int, block: torch.Tensor, offset: int) -> None:
    memory, done = _memory_of(block), 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], offset + done)
        if count == 0:
            raise TierError(f"the spill file ended at byte {offset + done}: somebody else made it shorter")
        done += count


@contextlib.contextmanager
def _spill_file(folder: str) -> Iterator[int]:
    """A file without a name: it is gone when it is closed, however the process ends."""
    with tempfile.TemporaryFile(dir=folder, prefix="elbowroom-probe-", buffering=0) as file:
        yield file.fileno()


@contextlib.contextmanager
def _disk_errors(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UsageError(
                f"the spill folder {folder!r} filled up while measuring; make room, or name another in spill_folder"
            ) from error
        raise
