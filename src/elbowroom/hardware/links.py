"""Measures the bandwidth and latency between neighbouring tiers, and the slowdown of compute during transfers.

Bytes are moved as in the runtime: by pinned copies on a separate stream between device and host, and by `os.pwrite` /
`os.preadv` on the storage's own memory between memory and a spill file.
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
    """Check that a folder can hold the file for measuring the link.

    Raises:
        UsageError: it does not exist, is not a folder, is not writable, or is nearly full.
    """
    if not os.path.isdir(folder):
        raise UsageError(f"the spill folder {folder!r} does not exist; create it, or pass another as spill_folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to the spill folder {folder!r} ({error.strerror or error}); pass another as spill_folder"
        ) from error
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 2 * BLOCKS * block_bytes:
        raise UsageError(
            f"the spill folder {folder!r} has {format_bytes(free_bytes)} free, but measuring takes "
            f"{format_bytes(2 * BLOCKS * block_bytes)}; free some space, or pass another as spill_folder"
        )


def name_file_system(folder: str) -> str:
    """Return the type of a folder's file system ("ext4", "tmpfs", ...), or "unknown file system"."""
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
    """Measure the link from memory to a spill file in `folder`.

    Args:
        upper: name of the tier above the disk.
        block_bytes: size of the blocks to move; measuring takes six times that in memory.
        fresh_blocks: whether reloading allocates new memory (CPU: `torch.empty`) or fills an existing buffer (CUDA).
        compute: compute that runs during transfers, to measure its slowdown.

    Raises:
        UsageError: the disk filled up while measuring.
    """
    with _spill_file(folder) as file, _disk_errors(folder):
        blocks = [_faulted_in(block_bytes) for _ in range(BLOCKS)]

        def write_all() -> None:
            for index, block in enumerate(blocks):
                _write(file, block, index * block_bytes)

        def read_all() -> None:
            # Hold all blocks until the pass ends: otherwise the allocator would reuse the same memory.
            held = [_new_block(block_bytes) if fresh_blocks else block for block in blocks]
            for index, block in enumerate(held):
                _read(file, block, index * block_bytes)

        # The first pass makes the file grow. A training step rewrites the same blocks.
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
        half_duplex=True,  # one thread moves both ways
        drag_seconds_per_byte=drag,
        source=(
            f"measured with blocks of {format_bytes(block_bytes)} in a spill file on {name_file_system(folder)}, "
            "page cache included: slower where memory is too short for the page cache"
        ),
    )


def measure_device_link(device: torch.device, block_bytes: int, compute: Callable[[], None]) -> Link:
    """Measure the link from a CUDA device to pinned host memory."""
    with torch.cuda.device(device):
        outward, inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        on_device = [torch.zeros(block_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        on_host = [torch.zeros(block_bytes, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
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
    """Return the median time until all copies, begun together on their streams, have ended."""
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
    # The first two warm up.
    return max(statistics.median(times[2:]), 1e-9)


def measure_drag(move: Callable[[], int], compute: Callable[[], None], device: torch.device) -> float:
    """Measure the compute seconds lost per byte that moves at the same time.

    Args:
        move: moves some bytes, waits for them and returns their number; called repeatedly on a thread.
        compute: fixed work of about a tenth of a second for the calling thread.
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
        # Compare with the mean of the runs before and after, so that slow drift of the machine cancels out.
        alone_before, alone = alone, timed()
        if nbytes > 0:
            found.append((beside - (alone_before + alone) / 2) / nbytes)
    return max(statistics.median(found), 0.0) if found else 0.0


@contextlib.contextmanager
def _mover(move: Callable[[], int]) -> Iterator[Callable[[], int]]:
    """Move bytes on a thread while the context is open. Yields a function that returns the bytes moved so far."""
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
    """Return a function that moves a few MiB for `measure_drag`, alternately out and back, as a step does."""
    # Small moves, so that the count of moved bytes is precise for the measured time.
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
            raise TierError(f"the spill file ends at byte {offset + done}: another process has truncated it")
        done += count


@contextlib.contextmanager
def _spill_file(folder: str) -> Iterator[int]:
    """Open a file without a name, which the system deletes however the process ends."""
    with tempfile.TemporaryFile(dir=folder, prefix="elbowroom-probe-", buffering=0) as file:
        yield file.fileno()


@contextlib.contextmanager
def _disk_errors(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UsageError(
                f"the spill folder {folder!r} filled up while measuring; free some space, or pass another as "
                "spill_folder"
            ) from error
        raise
