"""How the extension in C++ is compiled and kept, on one of a few lines."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elbowroom.errors import UsageError
from elbowroom.native import library
from elbowroom.native.library import TORCH_VERSIONS, Extension, build_library, find_library, import_library

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = """
#include "answer.h"
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_small", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__small() {
  PyObject* const module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", ANSWER);
  return module;
}
"""


@pytest.fixture
def small(tmp_path: pathlib.Path) -> Extension:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "small.cpp").write_text(SOURCE)
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    return Extension("_small", "a small extension", (sources / "small.cpp",), (sources / "answer.h",))


def answer(extension: Extension, made: pathlib.Path) -> int:
    found: int = import_library(extension, made).answer
    return found


def test_two_threads_load_one_module(small: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is initialized twice, at the same time, lacks some of its attributes."""
    loads: list[float] = []

    def load(_: Extension) -> object:
        loads.append(0)
        time.sleep(0.2)  # as long as the first load takes
        return object()

    monkeypatch.setattr(library, "_load", functools.cache(load))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(library.load.__wrapped__, [small] * 2)
    assert first is second and len(loads) == 1


def test_two_at_once_compile_one_file_which_is_kept_and_made_anew_where_damaged(
    small: Extension, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "env c++")  # a command with arguments will do
    folder = tmp_path / "cache"
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build_library, [small] * 2, [folder] * 2)
    assert first == second == find_library(small, folder)
    assert os.listdir(folder) == [first.name]
    whole, before = first.read_bytes(), first.stat()
    assert build_library(small, folder) == first and first.stat().st_mtime_ns == before.st_mtime_ns
    first.write_bytes(whole[: len(whole) // 2])
    assert build_library(small, folder) == first
    assert len(first.read_bytes()) == len(whole)
    assert answer(small, first) == 42  # loaded last: what is loaded must not be written into


def test_other_sources_and_another_pytorch_are_another_file(small: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {find_library(small)}
    for path in (*small.sources, *small.headers):
        path.write_text(path.read_text() + "// more\n")
        found.add(find_library(small))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    found.add(find_library(small))
    assert len(found) == 4


def test_what_came_with_the_package_is_used_if_it_is_whole(
    small: Extension, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "FOLDER", tmp_path / "package")
    made = build_library(small, tmp_path / "package")
    made.parent.chmod(0o775)  # as pip makes folders for some users: who can write there can change our Python, too
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_library(small) == find_library(small) == made
    made.write_bytes(made.read_bytes()[:-1])
    assert find_library(small).parent == tmp_path / "elbowroom"
    with pytest.raises(UsageError, match=r"no-such-compiler was not found.*Install one"):
        build_library(small)


def test_the_first_error_of_the_compiler_is_quoted(small: Extension, tmp_path: pathlib.Path) -> None:
    small.headers[0].write_text("#define ANSWER no_such_thing\n")
    with pytest.raises(UsageError, match=r"cannot be compiled") as caught:
        build_library(small, tmp_path / "cache")
    said = str(caught.value)
    assert "error: " in said and "no_such_thing" in said and "Name another compiler" in said
    assert "Traceback" not in said and "variable CXX" in said
    assert os.listdir(tmp_path / "cache") == []


def test_half_a_file_is_not_left_where_the_compiler_is_ended(
    small: Extension, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "ended"
    compiler.write_text("#!/bin/sh\nkill -9 $$\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(UsageError, match="a small extension cannot be compiled"):
        build_library(small, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0.dev20261101+cu130", "3.0.0"])
def test_an_unknown_pytorch_is_refused(version: str, small: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    oldest, newest = (rf"{major}\.{minor}" for major, minor in TORCH_VERSIONS)
    with pytest.raises(UsageError, match=rf"{oldest} to {newest}, and this is {re.escape(version)}; run: pip install"):
        build_library(small)


def test_pip_is_told_the_same_versions_of_pytorch() -> None:
    (major, oldest), (same, newest) = library.TORCH_VERSIONS
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert major == same
    assert extras["torch"] == [f"torch>={major}.{oldest},<{major}.{newest + 1}"]
    library.check_torch(torch.__version__)
