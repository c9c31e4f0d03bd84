"""Profiles that this machine measured before, so that not every process measures it anew.

They are files in the user's cache, which may be deleted at any time. One that is a day old, cannot be read, or belongs
to a machine that is now faster or slower is measured again and replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import time

import torch

from elbowroom._folders import find_cache, make_cache
from elbowroom.errors import TraceError, UsageError
from elbowroom.hardware.links import name_file_system
from elbowroom.hardware.probe import choose_place, list_capacities, measuring, name_machine, probe, warn_of_memory
from elbowroom.hardware.sizes import choose_sizes
from elbowroom.hardware.timing import median_seconds
from elbowroom.ir import files
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.measured_profile import MeasuredProfile
from elbowroom.ops.cpu_isa import find_isa
from elbowroom.progress import Advance

logger = logging.getLogger(__name__)

MOST_SECONDS = 24 * 3600.0
"""Age at which a profile is measured again."""

MOST_RATIO = 1.5
"""Difference in speed, as a ratio, at which a profile is measured again."""

MOST_FILES = 16

CHECK_WIDTH = 192
CHECK_ELEMENTS = 1 << 16
"""Sizes of the matrices and the vector of the work that checks the machine's speed: within 2 MB."""

CHECK_SECONDS = 0.02
"""How long that work is repeated."""


def load_or_probe(
    device: str,
    *,
    spill_folder: str | None = None,
    most_bytes: int | None = None,
    progress: Advance | None = None,
    is_enabled: bool = True,
) -> HardwareProfile:
    """Return a stored profile of this machine, or measure one and store it.

    Args:
        device, spill_folder, most_bytes, progress: as for `probe`.
        is_enabled: whether stored profiles are read and written.

    Raises:
        UsageError: as for `probe`.
    """
    measure = functools.partial(probe, device, spill_folder=spill_folder, most_bytes=most_bytes, progress=progress)
    if not is_enabled:
        return measure()
    chosen, folder = choose_place(device, spill_folder, most_bytes)
    store = ProfileStore(chosen, folder)
    if (found := store.load(most_bytes)) is not None:
        warn_of_memory(folder)
        return found
    begin_seconds = time.time()
    profile = measure()
    store.save(profile, most_bytes, begin_seconds)
    return profile


class ProfileStore:
    """The stored profile of one device with one spill folder.

    Args:
        folder: of the files; in the user's cache by default.
    """

    def __init__(self, device: torch.device, spill_folder: str, folder: pathlib.Path | None = None) -> None:
        self._device = device
        self._spill_folder = spill_folder
        self._folder = find_cache() / "profiles" if folder is None else folder
        kind = find_isa() if device.type == "cpu" else "cuda"
        disk = f"{name_file_system(spill_folder)} {os.stat(spill_folder).st_dev}"
        self.machine = f"{name_machine(device)}; {kind}; PyTorch {torch.__version__}; {disk}"
        self.path = self._folder / f"{hashlib.sha256(self.machine.encode()).hexdigest()[:16]}.json"

    def load(self, most_bytes: int | None) -> HardwareProfile | None:
        """Return the profile with today's capacities; None if there is none, or it may not hold any more.

        Args:
            most_bytes: memory that measuring it may have taken at least, as for `probe`.
        """
        try:
            found = files.load(MeasuredProfile, self.path)
        except (UsageError, TraceError) as error:
            logger.debug("no stored profile: %s", error)
            return None
        if found.machine != self.machine or not 0 <= time.time() - found.begin_seconds < MOST_SECONDS:
            return None
        if self._is_more(self._limit(most_bytes), found.most_bytes):
            return None  # measuring may take more memory now, for shapes that are more like those of real layers
        ratio = self._time_check_work() / found.check_seconds if found.check_seconds > 0 else 0.0
        if not 1 / MOST_RATIO < ratio < MOST_RATIO:
            logger.info("the stored profile is measured again: this machine takes %.2f times as long as then", ratio)
            return None
        return dataclasses.replace(found.profile, tiers=list_capacities(self._device, self._spill_folder))

    def save(self, profile: HardwareProfile, most_bytes: int | None, begin_seconds: float) -> None:
        """Store a profile that has just been measured. If that is impossible, later processes measure again."""
        measured = MeasuredProfile(
            machine=self.machine,
            profile=profile,
            most_bytes=self._limit(most_bytes),
            begin_seconds=begin_seconds,
            check_seconds=self._time_check_work(),
        )
        try:
            make_cache(self._folder)
            files.save(measured, self.path)
            self._delete_old_files()
        except (OSError, UsageError, TraceError) as error:
            logger.info("the profile is not stored: %s", error)

    @staticmethod
    def _is_more(limit: int | None, other: int | None) -> bool:
        return other is not None and (limit is None or limit > other)

    def _limit(self, most_bytes: int | None) -> int | None:
        """Return a limit on memory, or None if it does not limit the shapes."""
        kind = self._device.type
        return None if choose_sizes(kind, most_bytes) == choose_sizes(kind, None) else most_bytes

    def _time_check_work(self) -> float:
        device = self._device
        with measuring(device):
            matrix = torch.ones(CHECK_WIDTH, CHECK_WIDTH, device=device, dtype=torch.float32)
            vector = torch.ones(CHECK_ELEMENTS, device=device, dtype=torch.float32)

            def work() -> None:
                torch.mm(matrix, matrix)
                torch.relu(vector)

            return median_seconds(work, device, budget_seconds=CHECK_SECONDS)

    def _delete_old_files(self) -> None:
        found = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in found[MOST_FILES:]:
            os.unlink(path)
