"""Compiles every numba loop before it is needed, by planning synthetic steps with the strategies that have loops.

    fit         starts a process that compiles the loops, unless they are on disk
    step 0, 1   run meanwhile, and are captured
    first plan  waits for the process, and loads the loops from disk

A compiling thread would hold the GIL, which the program's own ops need; hence a process. No torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator

from elbowroom import _numba_loops
from elbowroom.ir.buffers import Buffer
from elbowroom.ir.costs import Costs
from elbowroom.ir.digest import digest
from elbowroom.ir.hardware import Link
from elbowroom.ir.trace import Need, Op, Role, Save, Storage, Trace, View
from elbowroom.layout.lay_out import lay_out
from elbowroom.planner.problem import plan, pose
from elbowroom.progress import Advance, announcing, drawing_on

MANY, FEW = 12, 4
"""Layers of the synthetic steps: with MANY the choices are searched, with FEW they are enumerated."""

BLOCK_BYTES, BUFFERS = 1 << 20, 60

LONGEST_WAIT_SECONDS = 300.0
"""Timeout for the compiling process; after that the loops are compiled when they are called."""

ALL = "from elbowroom.compilation import compile_loops as run; run(lambda what, share: print(share, what, flush=True))"
LAYOUTS = "from elbowroom.compilation import compile_layouts as run; run()"
"""Code of the processes that compile all loops, or those of `layout` alone. The first prints its progress."""

ENOUGH = 0.6
"""Share of the stages after which all loops of strategy "auto" are on disk."""


def compile_loops(advance: Advance) -> None:
    """Compile the loops that are not on disk, which takes up to a minute, and mark the cache as complete.

    If another process is compiling, wait for it and use its results.

    Args:
        advance: receives the current stage and the share of stages done.
    """
    small, large = _make_step(FEW), _make_step(MANY)
    with _numba_loops.locking_cache(), _compiling_layouts() as layouts:
        stages: dict[str, Callable[[], object]] = {
            "a search through choices": functools.partial(_plan, *large, "auto"),
            "all choices of a small step": functools.partial(_plan, *small, "auto"),
            "layouts": layouts,
            "the search for the best": functools.partial(_plan, *small, "exact"),
            "the search by particles": functools.partial(_plan, *small, "home_pso"),
        }
        for done, (what, work) in enumerate(stages.items()):
            advance(what, done / len(stages))
            with drawing_on(None):
                work()
        _numba_loops.note_complete()


def compile_layouts() -> None:
    """Compile the loops that lay out buffers."""
    lay_out(_make_buffers())


@contextlib.contextmanager
def _compiling_layouts() -> Iterator[Callable[[], None]]:
    """Compile the loops of `layout` in another process, if possible. Yields a function that waits for them."""
    beside = None if _numba_loops.is_complete() else _start(LAYOUTS)

    def finish() -> None:
        if beside is not None:
            beside.wait()
        compile_layouts()  # loads them from disk, if the process succeeded

    try:
        yield finish
    finally:
        if beside is not None:
            beside.kill()
            beside.communicate()


class LoopCompiler:
    """Compiles the loops in a child process, unless they are on disk.

    The child ends with this object or with the interpreter; what it has compiled until then stays on disk. Processes
    forked from this one neither wait for the child nor end it.

    Args:
        starts: False to start no process, because no step will be planned.
    """

    def __init__(self, *, starts: bool = True) -> None:
        self._process = _start(ALL, start_new_session=True) if starts and not _numba_loops.is_complete() else None
        self._owner = os.getpid()
        self._share = 0.0
        if self._process is not None:
            weakref.finalize(self, _stop, self._process, self._owner)

    @property
    def is_pending(self) -> bool:
        """True while the child runs. It may slow down steps meanwhile."""
        return self._process is not None and self._process.poll() is None

    def wait(self, *, share: float = 1.0) -> None:
        """Return when the loops are on disk, or when the child has failed; calling the loops then compiles them.

        Args:
            share: share of the stages to wait for.
        """
        process = self._process
        if process is None or os.getpid() != self._owner or share <= self._share:
            return
        with announcing("compiling loops", _numba_loops.say_how()) as advance:
            for self._share, what in _read_stages(process):
                advance(what, self._share)
                if share <= self._share:
                    return
        self.stop()

    def stop(self) -> None:
        """End the child, if it still runs."""
        process, self._process = self._process, None
        if process is not None:
            _stop(process, self._owner)


def _read_stages(process: subprocess.Popen[bytes]) -> Iterator[tuple[float, str]]:
    """Yield the stages that a process reports, until it ends or the timeout expires."""
    assert process.stdout is not None
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        line = process.stdout.readline().decode()
        if not line:
            process.wait()
            return
        share, _, what = line.strip().partition(" ")
        yield float(share), what


def _start(code: str, *, start_new_session: bool = False) -> subprocess.Popen[bytes] | None:
    """Start a Python process; None if that fails, or if the machine code could not be kept.

    Args:
        start_new_session: keeps Ctrl-C in the terminal from reaching the process.
    """
    if not _numba_loops.can_be_kept() or "python" not in os.path.basename(sys.executable or ""):
        return None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    quiet = subprocess.DEVNULL
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code], env=environment, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet,
            bufsize=0, start_new_session=start_new_session,
        )  # fmt: skip
    except OSError:  # no more processes, or no memory for one
        return None


def _stop(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process and its children, if this process is `owner`, which started it."""
    if os.getpid() == owner and process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


# -- synthetic steps --------------------------------------------------------------------------------------------------


def _make_step(layers: int) -> tuple[Trace, Costs]:
    """Return the trace and the costs of a chain of layers, each of which saves its result."""
    ops: list[Op] = []
    storages = [_make_storage(0, Role.INPUT, -1, 4 * layers)]
    saves: list[Save] = []
    needs: list[Need] = []

    def run(reads: tuple[int, ...], tick: int, role: Role, released: int) -> None:
        views = [View(storage=each, version=0, dtype="float32", shape=(BLOCK_BYTES // 4,)) for each in reads]
        made = View(storage=len(storages), version=0, dtype="float32", shape=(BLOCK_BYTES // 4,))
        storages.append(_make_storage(made.storage, role, tick, released))
        ops.append(Op(tick=tick, name="layer", reads=tuple(views), writes=(made,), flops=0, barrier=""))

    for layer in range(layers):
        run((layer,), 2 * layer, Role.ACTIVATION, 2 * layer + 3)
        saves.append(Save(tick=2 * layer + 1, storage=layer + 1, released=4 * layers - 2 * layer))
    for position, layer in enumerate(reversed(range(layers))):
        tick = 2 * (layers + position)
        needs.append(Need(tick=tick, save=layer, released=tick + 2))
        gradient = (len(storages) - 1,) if position else ()
        run((*gradient, layer + 1), tick + 1, Role.TEMPORARY, min(tick + 4, 4 * layers))
    trace = Trace(
        name=f"{layers} layers", device="cpu", ops=tuple(ops), storages=tuple(storages), saves=tuple(saves),
        needs=tuple(needs), end=4 * layers,
    )  # fmt: skip
    return trace, _make_costs(trace)


def _make_storage(index: int, role: Role, created: int, released: int) -> Storage:
    return Storage(id=index, nbytes=BLOCK_BYTES, role=role, created=created, released=released, label="layer")


def _make_costs(trace: Trace) -> Costs:
    link = Link(
        upper="device", lower="below", out_latency_seconds=1e-5, out_bytes_per_second=1e9, back_latency_seconds=1e-5,
        back_bytes_per_second=1e9, half_duplex=False, drag_seconds_per_byte=0.0, source="made up",
    )  # fmt: skip
    return Costs(
        trace_digest=digest(trace), profile_name="made up", op_seconds=(1e-3,) * len(trace.ops),
        workspace_bytes=(0,) * len(trace.ops), link=link, alignment_bytes=512, hook_seconds=1e-6,
        overhead_seconds=0.0, measured=False,
    )  # fmt: skip


def _plan(trace: Trace, costs: Costs, strategy: str) -> None:
    problem = pose(trace, costs, 1)
    plan(trace, costs, (problem.floor.peak_bytes + problem.plain.peak_bytes) // 2, strategy=strategy)


def _make_buffers() -> tuple[Buffer, ...]:
    """Return buffers that need a search: no fixed placement order is optimal for them."""
    draw = random.Random(1)
    begins = [draw.randrange(BUFFERS) for _ in range(BUFFERS)]
    return tuple(
        Buffer(id=index, lower=begin, upper=begin + draw.randint(1, BUFFERS // 3), nbytes=draw.randint(1, 1 << 20))
        for index, begin in enumerate(begins)
    )
