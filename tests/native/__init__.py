"""Programs in C for the tests of the arena's library, and how they are compiled."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from elbowroom.cuda_allocator.build import FLAGS, LIBRARIES, SOURCES, find_compiler
from elbowroom.errors import UsageError

HERE = pathlib.Path(__file__).parent


def need_compiler() -> list[str]:
    """The C compiler; skips the test where there is none."""
    try:
        return find_compiler()
    except UsageError as error:
        pytest.skip(str(error))


def compile_shared(made: pathlib.Path, source: str) -> pathlib.Path:
    """One of the files here as a shared library; skips the test where there is no compiler for it."""
    compiler = need_compiler()
    if source.endswith(".cpp"):
        found = shutil.which("c++")
        if found is None:
            pytest.skip("needs a C++ compiler, and there is no c++")
        compiler = [found]
    flags = [flag for flag in FLAGS if flag not in ("-fvisibility=hidden",) and not flag.startswith("-std")]
    subprocess.run([*compiler, *flags, "-o", str(made), str(HERE / source)], check=True)
    return made


def compile_driver(made: pathlib.Path, *flags: str) -> pathlib.Path:
    """The driver with the library in it; skips the test where the compiler cannot do what the flags ask for."""
    sources = [str(HERE / "arena_driver.c"), *map(str, sorted(SOURCES.glob("*.c")))]
    warnings = ["-Wall", "-Wextra", "-Werror", "-std=c11", "-pthread", "-g", f"-I{SOURCES}"]
    done = subprocess.run(
        [*need_compiler(), *warnings, *flags, "-o", str(made), *sources, *LIBRARIES], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        plain = subprocess.run(
            [*need_compiler(), *warnings, "-o", str(made), *sources, *LIBRARIES], capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert plain.returncode == 0, plain.stderr
        pytest.skip(f"the compiler does not take {' '.join(flags)}: {done.stderr.strip().splitlines()[-1]}")
    return made
