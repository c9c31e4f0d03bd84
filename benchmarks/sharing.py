"""Real jobs on a shared CPU: three models in three processes within half of the sum of their plain peaks.

    python benchmarks/sharing.py orders [--count 20] [--output FILE]
    python benchmarks/sharing.py kills [--count 200] [--output FILE]
    python benchmarks/sharing.py outside [--count 3] [--output FILE]
    python benchmarks/sharing.py evaluating [--output FILE]

`orders`: the jobs arrive in a random order at random times. Prints whether losses and parameters have the bits of plain
PyTorch, the most bytes that the steps of all jobs held at a time (as each process's allocator counts them), and the
most that the broker counted as taken, polled from outside.

`kills`: jobs without a model hold leases and step; each is killed with SIGKILL at a random time. Prints how long its
bytes took to come back, and whether the sum of leases ever exceeded the device.

`outside`: as `orders`, with a meter that knows nothing of Elbowroom: the resident anonymous memory of the three
processes, every few milliseconds, less what each had before its model was built, until it has ended. Each has trained a
copy of the model before, so code and libraries are there already. What PyTorch and Python keep for themselves is in the
sum, and so is what planning takes between two steps. `parts`: what the largest sum consists of, in each process
(`resident_parts.py`); `leased_bytes`: what the broker counted as taken just then.

`evaluating`: a ViT that evaluates for ten seconds after half of its steps, beside a BERT that trains on. Prints the
leases of both over time, each as it changes, and whether all results have the bits of plain PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from resident_parts import read_parts, stopped
from writing import write_results

import elbowroom
from elbowroom.errors import UsageError
from elbowroom.sharing.messages import StatusReply
from elbowroom.sharing.transport.address import FOLDER_VARIABLE, find_address
from elbowroom.sharing.transport.client import ask_status
from tests.pure.test_sharing_transport import JOB
from tests.shared_job import count_most_bytes, train_plain

ROOT = pathlib.Path(__file__).parents[1]
PLAIN_MIB = {"unet": 48, "vit": 63, "bert": 77}
STEPS = 6
EVALUATING_STEPS = {"vit": 40, "bert": 100}
MIB = 1 << 20
RESIDENT_STEP = MIB // 2
"""What the largest sum consists of is looked up each time that it has grown by so much."""


@contextlib.contextmanager
def broker(mib: int, quantum: float) -> Iterator[None]:
    """Run a broker in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="er-") as folder:
        os.environ[FOLDER_VARIABLE] = f"{folder}/share"
        command = [sys.executable, "-m", "elbowroom", "share", "--memory", f"{mib}MiB", "--quantum", str(quantum)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                while try_status() is None:
                    time.sleep(0.05)
                yield
            finally:
                process.kill()


def try_status() -> StatusReply | None:
    """Return the state of the broker; None if it does not answer."""
    with contextlib.suppress(UsageError):
        return ask_status(find_address("cpu"))
    return None


class ResidentMemory:
    """Samples the resident memory of processes, less what they had at first, and keeps the largest sum."""

    def __init__(self) -> None:
        self.most_bytes = self.leased_bytes = 0
        self.samples = 0
        self.parts: dict[int, dict[str, int]] = {}
        self._base: dict[int, tuple[int, Counter[str]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> ResidentMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def add(self, pid: int) -> None:
        """Count a process from now on."""
        self._base[pid] = read_resident(pid), read_parts(pid)

    def _run(self) -> None:
        while not self._stop.wait(0.003):
            bases = dict(self._base)
            beyond = {pid: max(0, read_resident(pid) - base) for pid, (base, _) in bases.items()}
            most = sum(beyond.values())
            self.samples += 1
            if most <= self.most_bytes:
                continue
            if most > self.most_bytes + RESIDENT_STEP:
                with contextlib.suppress(OSError):  # one ends just now
                    self._note_parts([pid for pid, nbytes in beyond.items() if nbytes])
            self.most_bytes = most

    def _note_parts(self, pids: list[int]) -> None:
        with stopped(pids):
            found = {pid: read_parts(pid) for pid in pids}
            reply = try_status()
        self.parts = {}
        for pid, parts in found.items():
            parts.subtract(self._base[pid][1])
            self.parts[pid] = {kind: nbytes for kind, nbytes in parts.items() if abs(nbytes) > RESIDENT_STEP // 4}
        self.leased_bytes = 0 if reply is None else sum(job.held_bytes for job in reply.jobs)


def read_resident(pid: int) -> int:
    """Return the resident bytes of a process that are no files; 0 if it has ended."""
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text()
        return int(text.partition("RssAnon:")[2].split()[0]) << 10
    except (OSError, IndexError):
        return 0


class Watch:
    """Polls the broker from outside, and keeps the most bytes that it counted as taken."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self.polls = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            if (reply := try_status()) is not None:
                self.polls += 1
                self.most_bytes = max(self.most_bytes, sum(job.held_bytes for job in reply.jobs))


def run_order(seed: int, plain: dict[str, Any], profile: pathlib.Path) -> dict[str, Any]:
    """Run the three jobs in an order of arrival from a seed."""
    draw = random.Random(seed)
    names = draw.sample(sorted(PLAIN_MIB), len(PLAIN_MIB))
    device_mib = sum(PLAIN_MIB.values()) // 2
    begin = time.monotonic()
    with broker(device_mib, quantum=2.0), Watch() as watch:
        jobs = []
        for name in names:
            command = [sys.executable, str(ROOT / "tests" / "shared_job.py"), name, "shared", str(STEPS), str(profile)]
            jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
            time.sleep(draw.uniform(0, 3))
        found = [json.loads(job.communicate(timeout=300)[0].splitlines()[-1]) for job in jobs]
    return {
        "seed": seed, "order": names, "seconds": time.monotonic() - begin, "device_bytes": device_mib * MIB,
        "same_bits": all({key: one[key] for key in ("losses", "digest")} == plain[name]
                         for name, one in zip(names, found, strict=True)),
        "most_bytes": count_most_bytes([one["levels"] for one in found]),
        "most_leased_bytes": watch.most_bytes, "polls": watch.polls,
    }  # fmt: skip


def run_orders(count: int, run: Callable[[int, dict[str, Any], pathlib.Path], dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several orders of arrival."""
    plain = {name: train_plain(name, STEPS) for name in PLAIN_MIB}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "profile.json")
        elbowroom.save(elbowroom.probe("cpu"), path)
        for seed in range(count):
            rows.append(run(seed, plain, path))
            print(rows[-1], flush=True)
    return rows


def run_outside(seed: int, plain: dict[str, Any], profile: pathlib.Path) -> dict[str, Any]:
    """Run the three jobs in an order of arrival from a seed, and sample their resident memory."""
    draw = random.Random(seed)
    names = draw.sample(sorted(PLAIN_MIB), len(PLAIN_MIB))
    device_mib = sum(PLAIN_MIB.values()) // 2
    with broker(device_mib, quantum=2.0), ResidentMemory() as memory:
        jobs = []
        for name in names:
            command = [sys.executable, str(ROOT / "tests" / "shared_job.py"), name, "shared", str(STEPS), str(profile)]
            job = subprocess.Popen(
                [*command, "warm"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert job.stdout is not None
            job.stdout.readline()
            jobs.append(job)
        for job in jobs:
            memory.add(job.pid)
            assert job.stdin is not None
            job.stdin.write("go\n")
            job.stdin.flush()
            time.sleep(draw.uniform(0, 3))
        found = [json.loads(job.communicate(timeout=300)[0].splitlines()[-1]) for job in jobs]
    return {
        "seed": seed, "order": names, "device_bytes": device_mib * MIB, "most_resident_bytes": memory.most_bytes,
        "leased_bytes": memory.leased_bytes, "samples": memory.samples,
        "parts": {name: memory.parts.get(job.pid, {}) for name, job in zip(names, jobs, strict=True)},
        "most_bytes": count_most_bytes([one["levels"] for one in found]),
        "same_bits": all({key: one[key] for key in ("losses", "digest")} == plain[name]
                         for name, one in zip(names, found, strict=True)),
    }  # fmt: skip


def run_evaluating(plain: dict[str, Any], profile: pathlib.Path) -> dict[str, Any]:
    """Run a job that evaluates beside one that trains, and follow their leases."""
    device_mib = 100
    script, leases = str(ROOT / "tests" / "shared_job.py"), []
    with broker(device_mib, quantum=2.0):
        begin = time.monotonic()
        jobs = [
            subprocess.Popen([sys.executable, script, name, "shared", str(steps), str(profile), *extra],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for name, steps, extra in (("vit", EVALUATING_STEPS["vit"], ("evaluate",)),
                                       ("bert", EVALUATING_STEPS["bert"], ()))
        ]  # fmt: skip
        while any(job.poll() is None for job in jobs):
            reply = try_status()
            held = {} if reply is None else {job.name: [job.lease_bytes, job.held_bytes] for job in reply.jobs}
            if not leases or leases[-1]["leases"] != held:
                leases.append({"seconds": time.monotonic() - begin, "leases": held})
            time.sleep(0.05)
        lines = [[json.loads(line) for line in job.stdout or ()] for job in jobs]
    times = [line[key] - begin for line in lines[0] for key in ("evaluates", "evaluated") if key in line]
    return {
        "device_bytes": device_mib * MIB, "evaluates": times, "leases": leases,
        "budgets": [found[-1]["budgets"] for found in lines],
        "same_bits": all({key: found[-1][key] for key in ("losses", "digest")} == plain[name]
                         for name, found in zip(EVALUATING_STEPS, lines, strict=True)),
    }  # fmt: skip


def run_kills(count: int) -> list[dict[str, Any]]:
    """Kill jobs at random times, and start others in their place."""
    draw = random.Random(1)
    device_mib = 100
    rows: list[dict[str, Any]] = []
    with broker(device_mib, quantum=0.3), Watch() as watch:
        jobs: list[subprocess.Popen[bytes]] = []
        for number in range(count):
            while len(jobs) < 3:
                floor = str(draw.randint(10, 60))
                command = [sys.executable, "-c", JOB, os.environ[FOLDER_VARIABLE], f"job{number}", floor]
                jobs.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            time.sleep(draw.uniform(0, 0.6))
            victim = jobs.pop(draw.randrange(len(jobs)))
            victim.kill()
            begin = time.monotonic()
            victim.wait()
            while (reply := try_status()) is None or victim.pid in [job.pid for job in reply.jobs]:
                time.sleep(0.005)
            rows.append({"seconds": time.monotonic() - begin})
        for job in jobs:
            job.kill()
            job.wait()
    seconds = sorted(row["seconds"] for row in rows)
    return [{
        "kills": count, "median_seconds": seconds[count // 2], "longest_seconds": seconds[-1],
        "most_leased_bytes": watch.most_bytes, "device_bytes": device_mib * MIB, "polls": watch.polls,
    }]  # fmt: skip


def main() -> None:
    """Run one part, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["orders", "kills", "outside", "evaluating"])
    parser.add_argument("--count", type=int)
    parser.add_argument("--output")
    options = parser.parse_args()
    if options.part == "kills":
        rows = run_kills(options.count or 200)
        print(rows)
    elif options.part == "evaluating":
        plain = {name: train_plain(name, steps) for name, steps in EVALUATING_STEPS.items()}
        with tempfile.TemporaryDirectory() as folder:
            elbowroom.save(elbowroom.probe("cpu"), path := pathlib.Path(folder, "profile.json"))
            rows = [run_evaluating(plain, path)]
        print(rows)
    else:
        count, run = (options.count or 20, run_order) if options.part == "orders" else (options.count or 3, run_outside)
        rows = run_orders(count, run)
    write_results(options.output, rows)


if __name__ == "__main__":
    main()
