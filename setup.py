"""Compiles the extension with the package where PyTorch, ninja and a C++ compiler are there; else the first `fit` does.

All else is in pyproject.toml. pip hides what is installed from a build: `pip install --no-build-isolation .` does not.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import warnings

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HAS_PARTS = all(importlib.util.find_spec(name) for name in ("torch", "ninja"))


class BuildWithExtension(build_py):
    """Puts the extension beside its sources. In a checkout, where these change, it goes into the user's cache."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if not HAS_PARTS or self.editable_mode:
            return
        sys.path.insert(0, "src")
        from elbowroom.errors import ElbowroomError
        from elbowroom.native.library import NATIVE, build_library

        folder = pathlib.Path(self.build_lib, "elbowroom", "native").resolve()
        for former in folder.glob("native-*.so"):
            former.unlink()
        try:
            build_library(NATIVE, folder)
        except ElbowroomError as error:
            warnings.warn(f"{error} The first `elbowroom.fit` tries again.", stacklevel=1)


class PlatformDistribution(Distribution):
    """A wheel with the extension in it is for this Python and this machine."""

    def has_ext_modules(self) -> bool:
        """Tell setuptools that there is machine code."""
        return HAS_PARTS


setup(cmdclass={"build_py": BuildWithExtension}, distclass=PlatformDistribution)
