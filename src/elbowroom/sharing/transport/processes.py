"""Processes that hold device memory: whether they live, and what others hold on a card."""

from __future__ import annotations

import pathlib
import subprocess


def find_start(pid: int) -> int | None:
    """Return when a process began, which tells it from a later one of its number; None if it is gone or not visible.

    In clock ticks since the system started, since a time of day changes with the clock.
    """
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    fields = text.rpartition(")")[2].split()  # from the third field on: a name may have spaces and parentheses
    return None if fields[0] in "ZX" else int(fields[19])


def count_outside(device: str, known: set[int]) -> int:
    """Return the bytes that processes outside of `known` hold on a card, as the driver says. 0 on a CPU.

    Give a card by its UUID: the driver's tool may number cards in another way than CUDA does. Processes in other
    containers have no usable number and are left out.
    """
    if device == "cpu":
        return 0
    command = ["nvidia-smi", "-i", device.removeprefix("cuda:"), "--query-compute-apps=pid,used_memory"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(nbytes for pid, nbytes in read_apps(done.stdout) if pid not in known)


def read_apps(text: str) -> list[tuple[int, int]]:
    """Return (process, bytes) for each line "pid, MiB" of the driver's list."""
    found = []
    for line in text.splitlines():
        pid, _, amount = line.partition(",")
        if pid.strip().isdigit() and amount.strip().isdigit():
            found.append((int(pid), int(amount) << 20))
    return found
