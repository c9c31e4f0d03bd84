"""Imports the optional packages of models.

torchvision registers shape functions for the operators in its own binary. If that binary does not match torch (a CPU
build of torch with torchvision from PyPI), importing it raises "operator torchvision::nms does not exist". So does
importing timm and transformers, which import torchvision if it is installed. Image models need none of these operators,
so declaring them is enough.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

import torch

from elbowroom.errors import UsageError

_NEEDED_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_package(name: str) -> Any:
    """Import torchvision, timm or transformers.

    Raises:
        UsageError: the package is not installed, or its import fails.
    """
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"{name} is not installed; run: pip install 'elbowroom[models]'")
    try:
        if importlib.util.find_spec("torchvision") is not None:
            _import_torchvision()
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        raise UsageError(
            f"{name} is installed but cannot be imported with torch {torch.__version__}: {error}"
        ) from error


def _import_torchvision() -> None:
    before = set(sys.modules)
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        # Only if torchvision's own operators are missing: a second declaration would break them.
        if "torchvision::nms" not in str(error):
            raise
        for module in set(sys.modules) - before:
            if module.partition(".")[0] == "torchvision":
                del sys.modules[module]
        for operator in _NEEDED_OPERATORS:
            # Permanent in this process.
            if not hasattr(torch.ops.torchvision, operator):
                torch.library.define(f"torchvision::{operator}", _SCHEMA)
        importlib.import_module("torchvision")


def unknown_name(owner: str, noun: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name, with similar known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=5, cutoff=0.5)
    if near:
        return UsageError(f"{owner} has no {noun} {name!r}; similar names: {', '.join(near)}")
    examples = ", ".join(names[:: max(1, len(names) // 6)])
    return UsageError(f"{owner} has no {noun} {name!r}; examples: {examples}")
