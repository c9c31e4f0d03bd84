"""What pyproject.toml cannot say: the extension, compiled with the package, and the long description.

The extension is compiled where PyTorch, ninja and a C++ compiler are there; else the first `fit` does it. pip hides
what is installed from a build: `pip install --no-build-isolation .` does not.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys
import tomllib
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


def describe(text: str, source: str, version: str) -> str:
    """Return the README with links that work on a package's page: to the files of this version.

    Args:
        source: address of the repository.
    """

    def lengthen(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        kind = "raw" if mark else "blob"
        return f"{mark}[{label}]({source}/{kind}/v{version}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", lengthen, text)


if __name__ == "__main__":
    PROJECT = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    setup(
        cmdclass={"build_py": BuildWithExtension},
        distclass=PlatformDistribution,
        long_description=describe(pathlib.Path("README.md").read_text(), PROJECT["urls"]["Source"], PROJECT["version"]),
        long_description_content_type="text/markdown",
    )
