"""Measures the disk tier against sequential I/O of `dd`: python benchmarks/disk_tier.py [FOLDER]

The spill file is written and read in blocks by one thread, as steps do it, and by two; `dd` writes and reads a file of
the same size through the page cache and past it (O_DIRECT).
"""

from __future__ import annotations

import concurrent.futures
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from elbowroom.tiers.disk import SpillFile

BLOCK_BYTES, BLOCKS, ROUNDS = 16 << 20, 32, 5


def measure_spill_file(folder: str, threads: int) -> tuple[float, float]:
    """Return the seconds to write and to read all blocks by this many threads."""
    memory = np.ones(BLOCKS * BLOCK_BYTES, dtype=np.uint8)
    spill = SpillFile(folder)
    places = [(spill.reserve(BLOCK_BYTES), memory.ctypes.data + index * BLOCK_BYTES) for index in range(BLOCKS)]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:

        def run(move: Callable[[int, int, int], None]) -> float:
            begin = time.perf_counter()
            list(pool.map(lambda place: move(*place, BLOCK_BYTES), places))
            return time.perf_counter() - begin

        seconds = run(spill.write), run(spill.read)
    spill.close()
    return seconds


def measure_dd(folder: str, flag: str) -> tuple[float, float]:
    """Return the seconds that `dd` takes to write a file and to read it; `flag`: "direct" or ""."""
    size = (f"bs={BLOCK_BYTES}", f"count={BLOCKS}")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        path = pathlib.Path(made) / "file"

        def run(*arguments: str) -> float:
            begin = time.perf_counter()
            subprocess.run(["dd", *arguments, *size, "status=none"], check=True)
            return time.perf_counter() - begin

        written = run("if=/dev/zero", f"of={path}", *([f"oflag={flag}"] if flag else []))
        return written, run(f"if={path}", "of=/dev/null", *([f"iflag={flag}"] if flag else []))


def main() -> None:
    """Print medians in GB/s."""
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    gigabytes = BLOCKS * BLOCK_BYTES / 1e9
    for name, measure in (
        ("spill file, 1 thread", lambda: measure_spill_file(folder, 1)),
        ("spill file, 2 threads", lambda: measure_spill_file(folder, 2)),
        ("dd", lambda: measure_dd(folder, "")),
        ("dd, O_DIRECT", lambda: measure_dd(folder, "direct")),
    ):
        rounds = [measure() for _ in range(ROUNDS)]
        out, back = (gigabytes / statistics.median(each) for each in zip(*rounds, strict=True))
        print(f"{name:24} out {out:5.2f} GB/s, back {back:5.2f} GB/s")


if __name__ == "__main__":
    main()
