"""What offloading and reloading one storage costs the host, beside the copies themselves.

    python benchmarks/move_overhead.py [--pairs N] [--output FILE.json]

A deep MLP of small layers is trained on a fake card (`tests/fake_card.py`) whose copies do nothing and are always done,
once with everything in memory and once by a plan that offloads everything. The difference, for each storage that is
offloaded, is the time that a host which has to keep ahead of a device loses. The fake card itself counts its bytes in
Python, which takes some of it.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from writing import write_results

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import elbowroom
from elbowroom.ir.journal import Mode
from elbowroom.room import Room
from elbowroom.runtime.stream_transfers import StreamTransfers
from elbowroom.runtime.streams import StreamEvent
from elbowroom.tiers.pinned import SlabBlock
from tests import fake_card
from tests.fake_streams import FakeEvent

LAYERS, WIDTH, ROWS = 60, 64, 256

SHARE = 0.85
"""Of the bytes that the step takes as it is: its budget."""

DONE = FakeEvent("compute")
DONE.done = True


class NoStreams(fake_card.RoomStreams):
    """Streams on which nothing happens: results are wrong, and only times are read."""

    def record_compute(self) -> FakeEvent:
        return DONE

    def copy_out(
        self, source: torch.UntypedStorage, host: SlabBlock, after: Sequence[StreamEvent], source_offset: int = 0
    ) -> FakeEvent:
        return DONE

    def copy_in(
        self, host: SlabBlock, target: torch.UntypedStorage, after: Sequence[StreamEvent], target_offset: int = 0
    ) -> FakeEvent:
        return DONE

    def compute_waits(self, event: StreamEvent) -> None:
        pass

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def count_offloads(counts: list[int]) -> None:
    """Count offloads in `counts[0]` from now on."""
    offload = StreamTransfers.offload

    def counted(transfers: StreamTransfers, *args: Any) -> Any:
        counts[0] += 1
        return offload(transfers, *args)

    StreamTransfers.offload = counted  # type: ignore[method-assign]


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--output")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    patch.setattr(fake_card, "RoomStreams", NoStreams)
    fake_card.use_fake_card(patch)
    model = nn.Sequential(*(each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def time_step(room: Room) -> float:
        with room.step():
            begin = time.perf_counter()
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - begin

    with elbowroom.fit(model, optimizer, 1 << 40, manages="activations") as room:
        for _ in range(6):
            time_step(room)
        assert room.planned is not None
        budget = int(SHARE * room.planned.forecast.peak_bytes)
        fits = [time_step(room) for _ in range(parsed.pairs)]
    counts = [0]
    with elbowroom.fit(
        model, optimizer, budget, strategy="offload_all", min_offload_bytes=1, manages="activations"
    ) as room:
        for _ in range(12):
            time_step(room)
        count_offloads(counts)
        moved = [time_step(room) for _ in range(parsed.pairs)]
        assert all(record.mode is Mode.PLANNED for record in room.journal().steps[-parsed.pairs :])
    offloads = counts[0] / parsed.pairs
    fits_seconds, moved_seconds = statistics.median(fits), statistics.median(moved)
    seconds = (moved_seconds - fits_seconds) / offloads
    print(f"everything in memory {1e3 * fits_seconds:.1f} ms a step; {offloads:.0f} storages offloaded")
    print(f"{1e3 * moved_seconds:.1f} ms: {1e6 * seconds:.0f} us for each")
    result = {"fits_seconds": fits_seconds, "moved_seconds": moved_seconds, "offloads": offloads, "seconds": seconds}
    write_results(parsed.output, [result])


if __name__ == "__main__":
    main()
