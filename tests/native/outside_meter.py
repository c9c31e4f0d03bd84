"""Compiles the meter that wraps PyTorch's allocator, and runs programs beside it."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import subprocess
import sys
import tempfile

import torch

import elbowroom
from elbowroom.ir.hardware import HardwareProfile

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


def build(folder: pathlib.Path) -> pathlib.Path:
    """Compile the meter into a folder. Returns the library.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    parts, library = pathlib.Path(torch.__file__).parent, folder / "meter.so"
    flags = ["-std=c++20", "-O1", "-DNDEBUG", "-shared", "-fPIC", f"-I{parts / 'include'}", f"-L{parts / 'lib'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    source = HERE / "outside_meter.cpp"
    subprocess.run(["c++", *flags, abi, "-o", str(library), str(source), "-lc10"], check=True)
    return library


@functools.cache
def register_meter() -> ctypes.CDLL:
    """Compile the meter and put it before the allocator of this process, for good. Call it before the first room."""
    with tempfile.TemporaryDirectory() as folder:
        meter = ctypes.CDLL(str(build(pathlib.Path(folder))))
    meter.reset_peak.restype = meter.read_peak.restype = ctypes.c_int64
    meter.register_meter()
    return meter


def check_program(program: str, order: str, folder: pathlib.Path, profile: HardwareProfile) -> None:
    """Run a program in a process of its own, and assert that it ends well.

    Args:
        program: gets the paths of the meter and of a profile, and the order.
        order: in which the meter and the room's allocator are registered.
    """
    path = folder / "profile.json"
    elbowroom.save(profile, path)
    command = [sys.executable, "-c", program, str(build(folder)), str(path), order]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
