"""Counters in the format of `torch.cuda.memory_stats`."""

from __future__ import annotations

from typing import Any

from elbowroom.cuda_allocator.library import Counts

POOLS = ("all", "small_pool", "large_pool")
BYTES = {
    "allocated_bytes": ("allocated_bytes", "allocated_peak_bytes"),
    "active_bytes": ("allocated_bytes", "allocated_peak_bytes"),
    "requested_bytes": ("allocated_bytes", "allocated_peak_bytes"),
    "reserved_bytes": ("reserved_bytes", "reserved_peak_bytes"),
}
"""PyTorch's names, with the fields of `Counts` for current and peak values."""

UNTOLD = ("allocation", "segment", "active", "inactive_split", "inactive_split_bytes",
          "oversize_allocations", "oversize_segments")  # fmt: skip
"""Statistics that programs may look up, but that are not counted here: 0."""


def nest_statistics(counts: Counts) -> dict[str, Any]:
    """Return counters in the nested form of `torch._C._cuda_memoryStats`."""
    found: dict[str, Any] = {
        "num_alloc_retries": counts.retries,
        "num_ooms": counts.failed,
        "num_sync_all_streams": 0,
        "num_device_alloc": 0,
        "num_device_free": 0,
        "max_split_size": -1,
    }
    for name in UNTOLD:
        figures = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
        is_pooled = not name.startswith("oversize")
        found[name] = {pool: dict(figures) for pool in POOLS} if is_pooled else figures
    for name, (now, peak) in BYTES.items():
        figures = {"current": getattr(counts, now), "peak": getattr(counts, peak), "allocated": 0, "freed": 0}
        found[name] = {pool: figures if pool == "all" else dict.fromkeys(figures, 0) for pool in POOLS}
    return found
