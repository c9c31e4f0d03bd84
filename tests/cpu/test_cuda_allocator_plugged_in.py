"""The arena's library in programs of its own: under sanitizers, called from C++, plugged in, and how it is compiled."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from elbowroom.cuda_allocator.build import build_library, find_compiler
from elbowroom.cuda_allocator.library import Memory
from elbowroom.cuda_allocator.use import find_arena, find_runtime, use_planned_allocator
from elbowroom.errors import UsageError
from tests.native import HERE, compile_driver, compile_shared, need_compiler

TESTS = HERE.parent


def drive(driver: pathlib.Path, *arguments: int) -> dict[str, Any]:
    """What the driver has counted, with nothing wrong."""
    done = subprocess.run([driver, *map(str, arguments)], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr or "failed to mmap" in done.stderr.lower():
        pytest.skip(f"the sanitizer does not run on this kernel: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["wrong"] == found["left"] == found["reserved_bytes"] == 0
    return found


# One million requests, each block marked and looked at: steps with plans alone, and beside threads that disturb them.


def test_random_requests_with_addresses_checked(tmp_path: pathlib.Path) -> None:
    driver = compile_driver(tmp_path / "driver", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    alone = drive(driver, 900_000, 1, 1, 1 << 36)
    assert alone["requests"] >= 900_000 and alone["hits"] > 0.85 * alone["requests"]
    assert min(alone[each] for each in ("missed", "blocked", "apart")) > 1000
    beside = drive(driver, 80_000, 4, 2, 1 << 29)
    assert beside["hits"] > 0 and beside["unknown"] > 0
    for threads, capacity_bytes in ((4, 1 << 26), (1, 1 << 22)):
        full = drive(driver, 20_000, threads, 3, capacity_bytes)
        assert full["refused"] > 0 and full["retries"] > 0


def test_random_requests_from_several_threads(tmp_path: pathlib.Path) -> None:
    driver = compile_driver(tmp_path / "driver", "-O1", "-fsanitize=thread")
    found = drive(driver, 40_000, 4, 4, 1 << 29)
    assert found["hits"] > 0


# Compiling ------------------------------------------------------------------------------------------------------------


def test_it_is_compiled_once(tmp_path: pathlib.Path) -> None:
    need_compiler()
    made = build_library(tmp_path / "cache")
    before = made.stat()
    assert build_library(tmp_path / "cache") == made
    assert made.stat().st_mtime_ns == before.st_mtime_ns
    assert os.listdir(made.parent) == [made.name]  # nothing half made is left
    memory = Memory(made)
    assert memory.take(1) is not None


def test_it_is_made_anew_where_it_is_damaged(tmp_path: pathlib.Path) -> None:
    need_compiler()
    made = build_library(tmp_path / "cache")
    whole = made.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]):
        made.write_bytes(damaged)
        assert build_library(tmp_path / "cache") == made
        assert len(made.read_bytes()) == len(whole)
    assert Memory(made).take(1) is not None


def test_what_others_can_write_to_is_not_used(tmp_path: pathlib.Path) -> None:
    need_compiler()
    made = build_library(tmp_path / "cache")
    for exposed in (made, made.parent):
        for right in (0o020, 0o002):
            exposed.chmod(0o700 | right)
            with pytest.raises(UsageError, match=f"others can write to {exposed} .*delete it.*XDG_CACHE_HOME"):
                build_library(tmp_path / "cache")
        exposed.chmod(0o700)
    made.parent.chmod(0o777)
    made.unlink()
    with pytest.raises(UsageError, match=f"cannot be compiled into {made.parent}: others can write"):
        build_library(tmp_path / "cache")
    assert os.listdir(made.parent) == []


def test_without_a_compiler_it_says_what_to_do(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(UsageError, match=r"no-such-compiler was not found.*Install one"):
        find_compiler()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"cc or gcc or clang was not found"):
        build_library(tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho some reason >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(UsageError, match=r"exited with 3: some reason"):
        build_library(tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


# PyTorch --------------------------------------------------------------------------------------------------------------

IN_CPP = """
import ctypes, sys, torch
from elbowroom.cuda_allocator.build import build_library
from elbowroom.cuda_allocator.library import Memory
import pathlib
memory = Memory(build_library(pathlib.Path(sys.argv[1])), capacity_bytes=8 << 20)
memory.install()
catcher = ctypes.CDLL(sys.argv[2])
catcher.catch_alloc.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]
catcher.catch_pool.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
type_name, text = ctypes.create_string_buffer(4096), ctypes.create_string_buffer(4096)
alloc = memory.find_function("elbowroom_alloc")
assert catcher.catch_alloc(alloc, 0, type_name, text, 4096) == 0
assert catcher.catch_alloc(alloc, 6 << 20, type_name, text, 4096) == 1
for _ in range(1000):  # nothing is leaked on the way, and nothing stays locked
    assert catcher.catch_alloc(alloc, 1 << 40, type_name, text, 4096) == 2
print(type_name.value.decode())
print(text.value.decode())
assert catcher.catch_pool(memory.find_function("elbowroom_refuse_pool"), text, 4096) == 2
print(text.value.decode())
"""


def run(code: list[str], *arguments: object) -> str:
    """What a Python program prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS.parent)])}
    done = subprocess.run(
        [sys.executable, *code, *map(str, arguments)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_no_room_is_an_error_that_pytorch_knows(tmp_path: pathlib.Path) -> None:
    catcher = compile_shared(tmp_path / "catcher.so", "catcher.cpp")
    name, text, *rest = run(["-c", IN_CPP], tmp_path, catcher).splitlines()
    assert name == "N3c1016OutOfMemoryErrorE"  # which becomes torch.OutOfMemoryError in Python
    assert f"Tried to allocate {1 << 40} bytes" in text and f"{6 << 20} bytes are allocated" in text
    assert "CUDA graphs" in "\n".join(rest)


def test_plugged_into_pytorch(tmp_path: pathlib.Path) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this build of PyTorch brings a CUDA runtime of its own")
    runtime = compile_shared(tmp_path / "libcudart.so.0", "fake_cudart.c")
    assert run([str(HERE / "plugged_in.py")], runtime).strip().endswith("all is well")


def test_without_a_device_there_is_no_arena() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(UsageError, match="leave out use_planned_allocator"):
        use_planned_allocator()
    assert find_arena() is None
    if "libcudart" not in pathlib.Path("/proc/self/maps").read_text():
        with pytest.raises(UsageError, match="libcudart"):
            find_runtime()
