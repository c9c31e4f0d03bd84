"""Kernel traces of the G10 artifact: `kernels.config`, which it writes for every network, batch and time table.

    Kernel ID: 4, Name: Conv2d_Forward
    Parent Layer ID:3; Name:Conv2d
    Execution Time: 16564224
    Input Tensors:
    tensor21 Is weight (global)?: 1, Size in byte: 36864, Range:16384--53248
    Output Tensors:
    tensor20 Is weight (global)?: 0, Size in byte: 1416167424, Range:9828384768--11244552192
    ____________________________________________________________________

Times are cycles at 1.2 GHz. As in that artifact, a global tensor lives for the whole step, any other from its first to
its last use; an existing output is overwritten; a kernel's workspace is one of its outputs. The file has no releases,
so both members of `LoggedRelease` mean the last use.

Source: H. Zhang, Y. E. Zhou, Y. Xue, Y. Liu, J. Huang, "G10: Enabling An Efficient Unified GPU Memory and Storage
Architecture with Smart Tensor Migrations", MICRO 2023; the format is that of its public artifact.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator

from elbowroom.errors import TraceError
from elbowroom.importers import Imported, LoggedRelease
from elbowroom.importers._log import LARGEST_LOG_BYTES, Log
from elbowroom.ir.hardware import Link
from elbowroom.ir.text_files import read_lines
from elbowroom.ir.trace import Role

CYCLES_PER_SECOND = 1.2e9

A100_LINK = Link(
    upper="device",
    lower="host",
    out_latency_seconds=4.5e-5,
    out_bytes_per_second=15.754 * 2**30,
    back_latency_seconds=4.5e-5,
    back_bytes_per_second=15.754 * 2**30,
    half_duplex=False,
    drag_seconds_per_byte=0.0,
    source="the artifact's configurations: PCI Express at 15.754 GiB/s each way, 45 us",
)

_KERNEL = re.compile(r"Kernel ID: (\d{1,18}), Name: (\S+)")
_TIME = re.compile(r"Execution Time: (-?\d{1,18})")
_TENSOR = re.compile(r"(tensor\d+) Is weight \(global\)\?: ([01]), Size in byte: (-?\d{1,18})(?:,.*)?")
_REST = re.compile(r"Parent .*|\(.*\)|")
"""Lines of a kernel that are ignored."""

RANDOM = frozenset({"Dropout_Forward"})
"""Kernels that draw random numbers."""

_Tensors = dict[str, tuple[int, bool]]
"""Bytes of each tensor, and whether it is global, by name."""


def read(
    path: str | os.PathLike[str], *, release: LoggedRelease = LoggedRelease.PROGRAM, link: Link | None = None
) -> Imported:
    """Read the step in a `kernels.config` file or the folder that contains it.

    Raises:
        UsageError: the file does not exist.
        TraceError: a line is malformed or inconsistent; the message names the line and the kernel.
    """
    path = pathlib.Path(path)
    path = path / "kernels.config" if path.is_dir() else path
    reader = _Reader(path)
    reader.run()
    return reader.log.finish(
        name=path.parent.parent.name if path.parent.name == "statistics" else path.stem,
        profile_name="as logged",
        link=A100_LINK if link is None else link,
        release=LoggedRelease.LAST_USE,
    )


class _Reader:
    """Reads the lines; a kernel is added at the horizontal line below it."""

    def __init__(self, path: pathlib.Path) -> None:
        self.log = Log()
        self._path, self._number = path, 0
        self._known: _Tensors = {}
        self._blocks: dict[str, int] = {}
        self._count = 0
        self._begin("")

    def _begin(self, name: str) -> None:
        self._name, self._cycles = name, -1
        self._inputs: _Tensors = {}
        self._outputs: _Tensors = {}
        self._side: _Tensors | None = None

    def run(self) -> None:
        """Add all global tensors, then every kernel."""
        for text in self._each_line():
            found = _TENSOR.fullmatch(text)
            if found and found[2] == "1" and found[1] not in self._blocks:
                self._blocks[found[1]] = self.log.add_resident(int(found[3]), found[1], Role.PARAMETER)
        for text in self._each_line():
            self._take(text)
        if self._name:
            raise self._error("the file is truncated within this kernel")
        if not self._count:
            raise TraceError(f"{self._path} has no kernels")
        for name, block in self._blocks.items():
            if not self._known[name][1]:
                self.log.release(block)

    def _each_line(self) -> Iterator[str]:
        for number, line in enumerate(read_lines(self._path, LARGEST_LOG_BYTES), 1):
            self._number = number
            self.log.place = f"{self._path}, line {self._number}"
            yield line.strip()

    def _take(self, text: str) -> None:
        if text.startswith("____"):
            self._end_kernel()
        elif text == "Input Tensors:":
            self._side = self._inputs
        elif text == "Output Tensors:":
            self._side = self._outputs
        elif found := _KERNEL.fullmatch(text):
            self._begin_kernel(int(found[1]), found[2])
        elif found := _TIME.fullmatch(text):
            self._cycles = int(found[1])
            if self._cycles < 0:
                raise self._error(f"it takes {self._cycles} cycles")
        elif found := _TENSOR.fullmatch(text):
            self._add_tensor(found[1], int(found[3]), found[2] == "1")
        elif not _REST.fullmatch(text):
            raise self._error(f"{text[:60]!r} is not a line of this format")

    def _begin_kernel(self, number: int, name: str) -> None:
        if self._name:
            raise self._error(f"it is truncated before kernel {number} ({name})")
        if number != self._count:
            raise self._error(f"found kernel {number} ({name}) instead of kernel {self._count}")
        self._begin(name)

    def _add_tensor(self, name: str, nbytes: int, is_global: bool) -> None:
        if self._side is None:
            raise self._error(f"{name} is neither input nor output")
        if nbytes < 0:
            raise self._error(f"{name} has {nbytes} bytes")
        known = self._known.setdefault(name, (nbytes, is_global))
        if known != (nbytes, is_global):
            raise self._error(f"{name} had {known[0]} bytes before and has {nbytes} here, or is global only once")
        self._side[name] = known

    def _end_kernel(self) -> None:
        if not self._name or self._cycles < 0 or self._side is not self._outputs:
            raise self._error("it is not complete here")
        for name, (nbytes, _) in self._inputs.items():
            if name not in self._blocks:
                self._blocks[name] = self.log.add_input(nbytes, name, Role.ACTIVATION)
        made = [name for name in self._outputs if name not in self._blocks]
        new = self.log.call(
            self._name,
            self._cycles / CYCLES_PER_SECOND,
            tuple(self._blocks[name] for name in self._inputs),
            made=tuple((self._outputs[name][0], name) for name in made),
            changed=tuple(self._blocks[name] for name in self._outputs if name in self._blocks),
            barrier="it draws random numbers" if self._name in RANDOM else "",
        )
        self._blocks.update(zip(made, new, strict=True))
        self._count += 1
        self._begin("")

    def _error(self, what: str) -> TraceError:
        kernel = f"kernel {self._count} ({self._name})" if self._name else f"after {self._count} kernels"
        return TraceError(f"{self._path}, line {self._number}: {kernel}: {what}")
