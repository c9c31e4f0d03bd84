"""ExactnessStore: answers of probes, kept in a file for later runs on this machine."""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import json
import os
import pathlib
import platform
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

import torch

from elbowroom._folders import check_private, find_cache, make_cache
from elbowroom.errors import UsageError
from elbowroom.ir.slicing import SlicePass
from elbowroom.slicing.numbers import describe_number
from elbowroom.slicing.op_call import OpCall

MOST_BYTES = 1 << 24
"""Larger files are ignored."""

FORMAT = "elbowroom exactness 8"
"""First entry of the file. Change it when rules or probes change, so that older answers are ignored."""


class Exactness(enum.Enum):
    """Answer of a probe, the strongest first."""

    PROVEN = "proven"
    PROVEN_ON_SMALLER_BATCH = "proven on a smaller batch"
    TOO_LARGE = "too large to probe"
    INEXACT = "inexact"

    @property
    def is_exact(self) -> bool:
        """Tell whether slices gave the same bits wherever they were compared."""
        return self in (Exactness.PROVEN, Exactness.PROVEN_ON_SMALLER_BATCH)


class ExactnessStore:
    """Answers by key (see `describe_pass`).

    The file may be deleted at any time. One that is corrupt, or to which other users can write, is ignored; where none
    can be written, answers are kept for this process only.
    """

    def __init__(self, folder: pathlib.Path | None = None) -> None:
        """Read the answers in a folder. Default: the cache folder."""
        self._path = (find_cache() if folder is None else folder) / "exactness.json"
        self._lock = threading.Lock()
        self._answers = self._read()

    def find(self, key: str) -> Exactness | None:
        """Return an answer, or None if it is not known."""
        return self._answers.get(key)

    def add(self, key: str, answer: Exactness) -> None:
        """Keep an answer, together with those that other processes wrote meanwhile."""
        with self._lock:
            self._answers = {**self._read(), **self._answers, key: answer}
            with contextlib.suppress(OSError, UsageError):
                self._write()

    def _read(self) -> dict[str, Exactness]:
        try:
            check_private(self._path)
            if self._path.stat().st_size > MOST_BYTES:
                return {}
            document = json.loads(self._path.read_bytes())
            if document["format"] != FORMAT:
                return {}
            return {str(key): Exactness(answer) for key, answer in document["answers"].items()}
        except (OSError, UsageError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}

    def _write(self) -> None:
        make_cache(self._path.parent)
        answers = {key: answer.value for key, answer in self._answers.items()}
        data = json.dumps({"format": FORMAT, "answers": answers}, indent=0).encode()
        handle, part = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(part, self._path)
        except BaseException:
            os.unlink(part)
            raise


def describe_pass(call: OpCall, slice_pass: SlicePass, parts: Sequence[int]) -> str:
    """Return the key of a probe: a digest of all that decides which kernels run, on what shapes."""
    values = {name: _describe_value(call, value) for name, value in call.values.items()}
    facts = [_describe_machine(), _describe_device(call.reads[0].device), _describe_settings(), str(call.op)]
    facts += [list(call.misalignments)] if call.misalignments else []
    text = json.dumps([*facts, values, repr(slice_pass), list(parts)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _describe_value(call: OpCall, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), str(value.device.type), list(map(int, value.shape)), list(map(int, value.stride()))]
    if isinstance(value, (list, tuple)):
        return [_describe_value(call, each) for each in value]
    if isinstance(value, float):
        return describe_number(call, value)
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)


@functools.cache
def _describe_machine() -> list[str]:
    """Return facts on which the choice of CPU kernels depends: blocking also depends on the sizes of caches."""
    model = ""
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line for line in lines if line.startswith("model name")), "")
    build = [torch.__version__, torch.__config__.show()]
    return [*build, torch.backends.cpu.get_cpu_capability(), platform.machine(), platform.processor(), model]


@functools.cache
def _describe_device(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return [device.type]
    return [torch.cuda.get_device_name(device), str(torch.version.cuda), str(torch.backends.cudnn.version())]


def _describe_settings() -> list[Any]:
    settings = [
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_flush_denormal() if hasattr(torch, "get_flush_denormal") else None,
    ]
    if torch.version.cuda:
        cudnn = torch.backends.cudnn
        settings += [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32]
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
    return [*settings, *(os.environ.get(name) for name in names)]
