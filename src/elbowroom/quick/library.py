"""The library in C++ that watches ops: compiled by `elbowroom build`, and used wherever it is there."""

from __future__ import annotations

import functools
import logging
import pathlib
from types import ModuleType

from elbowroom import _compiler
from elbowroom.errors import UsageError
from elbowroom.native import library as native

logger = logging.getLogger(__name__)

QUICK = native.Extension("_quick", "the library that watches ops", pathlib.Path(__file__).parent)


def find_library(folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return the library's file, whether it is there or not."""
    return native.find_library(QUICK, folder)


def build_library(folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return the library's file. Compile it if it is not there.

    Raises:
        UsageError: as for `native.library.build_library`.
    """
    return native.build_library(QUICK, folder)


@functools.cache
def load() -> ModuleType | None:
    """Return the library, if it has been built; said once in a process if not."""
    library = find_library()
    if not library.exists():
        logger.warning(
            "ops are watched in Python, which takes two to three times as long for each as the library does that "
            "`elbowroom build` compiles; quick=False says that this is meant to be"
        )
        return None
    try:
        if not _compiler.is_made(library):
            logger.warning("%s is damaged, so Python does without; `elbowroom build` makes it anew", library)
            return None
        return native.import_library(QUICK, library)
    except (ImportError, OSError, UsageError) as error:
        logger.warning("%s cannot be used, so Python does without: %s", library, error)
        return None
