"""Fixtures of all tests: nothing may leak; and a made-up machine, so that nothing is probed."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from elbowroom.ir.hardware import HardwareProfile, Link, Rate, Tier

_ROOM_MARK = "_elbowroom_room"


@pytest.fixture(scope="session")
def profile() -> HardwareProfile:
    """A machine of two slow cores with a fast disk."""
    return make_profile()


def make_profile() -> HardwareProfile:
    """The profile of a machine of two slow cores with a fast disk."""
    from elbowroom.ops.cpu_isa import find_isa  # with torch, which many tests do without

    kinds = (("matmul", 1e11), ("convolution", 1e11), ("attention", 1e11), ("elementwise", 2e10))
    rates = tuple(
        Rate(kind=kind, dtype=dtype, per_second=per_second, source="made up")
        for kind, per_second in kinds
        for dtype in ("float32", "bfloat16", "float64")
    )
    link = Link(
        upper="ram", lower="disk", out_latency_seconds=1e-5, out_bytes_per_second=5e9, back_latency_seconds=1e-5,
        back_bytes_per_second=5e9, half_duplex=False, drag_seconds_per_byte=1e-10, source="made up"
    )  # fmt: skip
    return HardwareProfile(
        name="paper machine", device="cpu", isa=find_isa(), rates=rates,
        tiers=(Tier(name="ram", capacity_bytes=1 << 35), Tier(name="disk", capacity_bytes=1 << 38)),
        links=(link,), op_latency_seconds=1e-6, hook_seconds=1e-6, alignment_bytes=64,
    )  # fmt: skip


def list_threads(prefix: str = "elbowroom-") -> list[str]:
    """Names of the threads of Elbowroom that run.

    Python also lists, for good, a thread that died for want of memory before it began.
    """
    running = [thread.name for thread in threading.enumerate() if thread.is_alive()]
    return [name for name in running if name.startswith(prefix)]


class Leaks:
    """What Elbowroom may leave behind in a process, seen from outside of it."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []

    def watch_model(self, model: Any) -> None:
        """Look at the marks of this model too."""
        self._models.append(weakref.ref(model))

    def find(self) -> dict[str, list[str]]:
        """Everything that is there now, by kind."""
        found = {
            "threads": list_threads(),
            "spill files": list_nameless_files(),
        }
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "_C"):
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
            found["saved-tensor hooks"] = [] if hooks is None else [repr(hooks)]
            dispatch = sys.modules.get("torch.utils._python_dispatch")
            modes = dispatch._get_current_dispatch_mode_stack() if dispatch is not None else []
            found["dispatch modes"] = [type(mode).__name__ for mode in modes]
            found["watchers"] = ["some"] if torch._C._is_key_in_tls("elbowroom") and _has_watchers() else []
            found["callbacks"] = [] if _is_record_function_enabled(torch) else ["switched off"]
            found["profilers"] = ["one"] if torch._C._autograd._profiler_enabled() else []
        marked = [model for reference in self._models if (model := reference()) is not None]
        found["model marks"] = [type(model).__name__ for model in marked if _ROOM_MARK in model.__dict__]
        return found


def _has_watchers() -> bool:
    """Tell whether this thread has watchers. PyTorch 2.11 keeps their place when they are gone."""
    from elbowroom.native import library

    return bool(library.load().get_watchers())


def _is_record_function_enabled(torch: Any) -> bool:
    libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
    function = ctypes.CDLL(os.path.join(libraries, "libtorch_cpu.so"))["_ZN2at23isRecordFunctionEnabledEv"]
    function.restype = ctypes.c_bool
    return bool(function())


def list_nameless_files() -> list[str]:
    """The open files of this process that have no name (any more), as spill files have none."""
    found = []
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # it was the listing itself
        if target.endswith(" (deleted)") and not target.startswith(("/dev/shm/", "/memfd:")):
            found.append(f"{descriptor}: {target}")
    return found


@pytest.fixture(autouse=True)
def nothing_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leaks]:
    """Fails a test that leaves threads, spill files, hooks, modes, a profiler or marks on models behind."""
    leaks = Leaks()
    if "elbowroom.room" in sys.modules:
        room = sys.modules["elbowroom.room"].Room
        made = room.__init__

        def make(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            leaks.watch_model(model)
            made(self, model, *args, **kwargs)

        monkeypatch.setattr(room, "__init__", make)
    before = leaks.find()
    yield leaks
    if _added(before, leaks.find()):
        gc.collect()  # graphs that wait for the collector are no leaks
    added = _added(before, leaks.find())
    assert not added, f"the test leaves behind: {added}"


def _added(before: dict[str, list[str]], after: dict[str, list[str]]) -> dict[str, list[str]]:
    new = {kind: [item for item in items if item not in before.get(kind, ())] for kind, items in after.items()}
    return {kind: items for kind, items in new.items() if items}
