"""Does anything hang, leak or train wrong after an exception? One is raised at each line of what moves bytes, in turn.

    python benchmarks/faults.py [--ways offload recompute dynamic streams]
        [--errors KeyboardInterrupt MemoryError OSError] [--stride 1] [--most CASES] [--profile FILE.json]
        [--seconds 30] [--check]

A case is three steps of a small training job, or a random program on made-up streams. At the n-th line that the main
thread runs in the watched files, an exception is raised, once; n goes from 1 to the end in strides. An OSError is
raised instead of the n-th call of the system for the spill file, in whichever thread makes it. Afterwards two more
steps are trained beside plain PyTorch, whose bits they must have, the room is detached, and no thread, spill file,
saved-tensor hook, dispatch mode, pinned byte or mark may be left. A case that takes longer than --seconds hangs: it is
counted, and the run goes on behind it. --check makes any of it an exit code of 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import errno
import faulthandler
import gc
import json
import linecache
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import elbowroom
from elbowroom.errors import Infeasible, TierError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.runtime.stream_transfers import StreamTransfers
from elbowroom.tiers import disk, pinned
from elbowroom.tiers.disk import SpillFile
from elbowroom.tiers.pinned import HostSlabs

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.fake_streams import FakeStreams, Program  # noqa: E402
from tests.leaks import Leaks  # noqa: E402

WATCHED = (
    *("runtime/transfers.py", "runtime/spill_queue.py", "runtime/copies.py", "runtime/stream_transfers.py"),
    *("runtime/stream_copies.py", "runtime/staging.py", "runtime/action_executor.py", "runtime/step_runner.py"),
    *("runtime/saved_storage.py", "runtime/write_guard.py", "runtime/ending_step.py", "hooks/dispatch_keys.py"),
    *("tiers/disk.py", "tiers/pinned.py", "layout/free_list.py"),
)
WAYS = ("offload", "recompute", "dynamic", "streams")
ERRORS: dict[str, type[BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt, "MemoryError": MemoryError, "OSError": OSError
}  # fmt: skip
BUDGETS = {"recompute": 720_000}
"""Bytes, where a way needs more than the others."""

SYSTEM_CALLS = ("pwrite", "preadv", "posix_fallocate", "ftruncate", "fstat")
GRACE_SECONDS = 2.0
"""What a thread that was told to end may take for it."""


class Strike:
    """Raises an error at the n-th line of the watched files that this thread runs. A context."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        source = pathlib.Path(elbowroom.__file__).parent
        self._files = {str(source / name) for name in WATCHED}
        self._left, self._error = number, error
        self.place = ""

    def __enter__(self) -> Strike:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        name, caller = frame.f_code.co_filename, frame.f_back
        while caller is not None and caller.f_code.co_filename.endswith("free_list.py"):
            caller = caller.f_back
        # The made-up device has a free list too, which is not to be struck.
        is_device = caller is not None and caller.f_code.co_filename.endswith("fake_streams.py")
        is_ours = name in self._files and not (is_device and name.endswith("free_list.py"))
        return self._line if is_ours and not self.place else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not self.place and not self._is_with(frame):
            self._left -= 1
            if self._left <= 0:
                self.place = f"{pathlib.Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise self._error
        return self._line

    @staticmethod
    def _is_with(frame: FrameType) -> bool:
        """Whether the line may be the end of a `with`, between its block and the call of `__exit__`.

        A signal is not looked at there: an exception that comes from tracing would leave a lock locked.
        """
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


class DiskStrike:
    """Raises an OSError instead of the n-th call of the system for the spill file, in any thread. A context."""

    def __init__(self, number: int) -> None:
        self._left, self.place = number, ""
        self._patches = [mock.patch.object(disk.os, name, self._make(name)) for name in SYSTEM_CALLS]

    def _make(self, name: str) -> Any:
        call = getattr(os, name)

        def strike(*args: Any) -> Any:
            if sys._getframe(1).f_code.co_filename == disk.__file__ and not self.place:
                self._left -= 1
                if self._left <= 0:
                    self.place = f"disk.py:{sys._getframe(1).f_lineno}"
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*args)

        return strike

    def __enter__(self) -> DiskStrike:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for patch in self._patches:
            patch.stop()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small job."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> torch.Tensor:
    """One step; its loss."""
    batch = torch.randn(256, 64, generator=torch.Generator().manual_seed(index))
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def train_in_room(way: str, strike: Strike | DiskStrike, profile: HardwareProfile, leaks: Leaks) -> list[str]:
    """What goes wrong in a job whose steps an exception strikes."""
    plain, plain_optimizer = make()  # before the room, which counts what is allocated from then on
    model, optimizer = make()
    leaks.watch_model(model)
    wrong = []
    options: dict[str, Any] = {"strategy": "recompute_all" if way == "recompute" else "offload_all"}
    if way == "dynamic":
        options = {"mode": "dynamic", "policy": "lru"}
    room = elbowroom.fit(
        model, optimizer, BUDGETS.get(way, 620_000), profile=profile, min_offload_bytes=1, **options
    )  # fmt: skip
    with strike:
        try:
            for index in range(3):
                with room.step():
                    train(model, optimizer, index)
        except (KeyboardInterrupt, MemoryError):
            pass
        except Exception as error:
            # What cannot leave may be too much for the budget.
            if not (isinstance(strike, DiskStrike) and isinstance(error, (TierError, Infeasible))):
                wrong.append(f"{type(error).__name__}: {str(error)[:80]}")
    optimizer.zero_grad()
    plain.load_state_dict(model.state_dict())
    plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for index in range(3, 5):
        try:
            with room.step():
                loss = train(model, optimizer, index)
            if not torch.equal(loss, train(plain, plain_optimizer, index)):
                wrong.append("other bits")
        except Exception as error:
            wrong.append(f"{type(error).__name__} in a later step: {str(error)[:80]}")
            break
    room.detach()
    return wrong


def run_on_streams(strike: Strike | DiskStrike, folder: str) -> list[str]:
    """What goes wrong in a random program that an exception strikes."""
    streams = FakeStreams(7)
    # The host's memory, which on a CPU is the device's as well, is not to count as the room's.
    pinned._new_memory = lambda nbytes: torch.from_numpy(np.empty(nbytes, dtype=np.uint8))
    transfers = StreamTransfers(streams, HostSlabs(24 << 10, 8 << 10, pinning=streams), SpillFile(folder), 3000)
    program = Program(transfers, streams, 7)
    with strike, contextlib.suppress(KeyboardInterrupt, MemoryError):
        program.run(60)
    Program(transfers, streams, 8).run(30)
    del program
    gc.collect()
    transfers.close()
    gc.collect()
    streams.drain()
    wrong = list(streams.violations)
    if streams.pinned or streams.live_bytes:
        wrong.append(f"{len(streams.pinned)} pinned slabs and {streams.live_bytes} bytes of the device left")
    return wrong


def run_case(way: str, number: int, error: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one case found: the place that was struck, none where the end was passed, and what went wrong."""
    strike = DiskStrike(number) if error == "OSError" else Strike(number, ERRORS[error])
    leaks = Leaks()
    before = leaks.find()
    if way == "streams":
        wrong = run_on_streams(strike, options.folder)
    else:
        wrong = train_in_room(way, strike, options.hardware, leaks)
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        gc.collect()
        left = [f"{kind}: {item}" for kind, items in leaks.find().items() for item in items if item not in before[kind]]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    # What is left would be found again after each case to come.
    return {"number": number, "place": strike.place, "wrong": [*wrong, *(f"left {item}" for item in left)]}


def work(options: argparse.Namespace) -> None:
    """Run cases until one passes the end, and print each; a case that hangs ends the process."""
    sys.unraisablehook = lambda _: None  # an error in `__del__`
    threading.excepthook = lambda _: None
    torch.set_num_threads(1)
    options.hardware = elbowroom.load(HardwareProfile, options.profile)
    way, error = options.ways[0], options.errors[0]
    gc.collect()
    gc.freeze()  # PyTorch's own objects need not be looked at in each case
    for number in range(options.first, 1 << 60, options.stride):
        faulthandler.dump_traceback_later(options.seconds, exit=True)
        found = run_case(way, number, error, options)
        print(json.dumps(found), flush=True)
        if not found["place"] or (options.most is not None and number >= options.first + options.most * options.stride):
            return


def campaign(way: str, error: str, options: argparse.Namespace) -> dict[str, Any]:
    """All cases of one way and one error, in processes of their own."""
    result: dict[str, Any] = {"way": way, "error": error, "cases": 0, "hung": 0, "wrong": Counter()}
    first, is_over = 1, False
    while not is_over:
        command = [
            sys.executable, __file__, "--work", "--ways", way, "--errors", error, "--first", str(first),
            "--stride", str(options.stride), "--profile", options.profile, "--seconds", str(options.seconds),
            "--folder", options.folder,
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                found = json.loads(line)
                first = found["number"] + options.stride
                is_over = not found["place"] or (options.most is not None and result["cases"] + 1 >= options.most)
                result["cases"] += bool(found["place"])
                result["wrong"].update(f"{found['place']} {what}" for what in found["wrong"])
                if is_over:
                    process.kill()
                    break
            said = process.stderr.read()
        if not is_over:  # it hung, or died
            if "Timeout (0:" not in said:
                raise RuntimeError(f"a worker died: {said[-2000:]}")
            result["hung"] += 1
            result["wrong"][f"case {first} hung: {said[-1500:]}"] += 1
            first += options.stride
    return result


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--errors", nargs="+", choices=sorted(ERRORS), default=["KeyboardInterrupt"])
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--most", type=int, help="cases of each kind")
    parser.add_argument("--profile", help="of this machine; measured if left out")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of spill files")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if options.profile is None:
            options.profile = str(pathlib.Path(folder) / "profile.json")
            elbowroom.save(elbowroom.probe(), options.profile)
        is_well = True
        for way in options.ways:
            for error in options.errors:
                found = campaign(way, error, options)
                print(f"{way}, {error}: {found['cases']} cases, {found['hung']} hung, {len(found['wrong'])} went wrong")
                for what, times in sorted(found["wrong"].items()):
                    print(f"    {times} x {what}")
                is_well &= not found["wrong"]
    return 0 if is_well or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
