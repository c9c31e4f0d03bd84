"""Tells watched steps of version counters that are raised before the write.

Custom ops and AOTAutograd call `increment_version` before the code that writes, which is watched. Without this the rise
looks like a write of another thread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from elbowroom.native import library


@functools.cache
def announce_rises() -> None:
    """Tell of each call of `increment_version` from now on. Permanent."""
    raise_versions = torch._C._increment_version
    announce = library.load().announce_rises

    @functools.wraps(raise_versions)
    def announce_and_raise(tensors: Iterable[torch.Tensor]) -> Any:
        raised = list(tensors)
        announce([each for each in raised if isinstance(each, torch.Tensor)])
        return raise_versions(raised)

    torch._C._increment_version = announce_and_raise
