"""A program that computes on two streams of a card: all that it does is ordered with what moves.

The card is a fake one, and ops compute at once. Clocks show whether an order is missing: each stream counts its own
work, and knows how much of the others' comes before.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.hooks.storage_ids import get_address, get_any_storage
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.native import library
from elbowroom.runtime.compute_streams import ComputeStreams, StreamNumbers
from elbowroom.runtime.streams import StreamEvent
from elbowroom.tiers.pinned import SlabBlock
from tests import fake_card
from tests.fake_streams import FakeEvent

STREAMS = ("main", "side", "out", "back")
WIDTH, ROWS, STEPS = 128, 1024, 5


class Clock:
    """One stream: how much of each stream's work comes before its next."""

    def __init__(self, clocks: Clocks, name: str) -> None:
        self.clocks, self.name = clocks, name
        self.known = dict.fromkeys(STREAMS, 0)

    def query(self) -> bool:
        return self.clocks.is_idle(self.name)

    def wait_stream(self, stream: Clock) -> None:
        self.merge(stream.known)

    def record_event(self) -> dict[str, int]:
        return dict(self.known)

    def wait_event(self, event: dict[str, int]) -> None:
        self.merge(event)

    def merge(self, known: dict[str, int]) -> None:
        self.known = {name: max(count, known.get(name, 0)) for name, count in self.known.items()}


class Clocks:
    """The streams of a card, and who has read and written each block of its memory."""

    def __init__(self) -> None:
        self.streams = {name: Clock(self, name) for name in STREAMS}
        self.current = "main"
        self.idle_share = 0.0
        self._random = random.Random(0)
        self.missing: list[str] = []
        self.gradients: dict[int | None, dict[str, int]] = {}  # what was known where they were made, by address
        self._written: dict[int, tuple[str, int, str]] = {}
        self._read: dict[int, list[tuple[str, int, str]]] = {}

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    def wait(self, one: str, other: str) -> None:
        self.streams[one].wait_stream(self.streams[other])

    def read(self, address: int, name: str, what: str) -> None:
        self._check(self._written.get(address), name, what)
        self._read.setdefault(address, []).append(self._tick(name, what))

    def write(self, address: int, name: str, what: str) -> None:
        for each in (self._written.get(address), *self._read.pop(address, ())):
            self._check(each, name, what)
        self._written[address] = self._tick(name, what)

    def is_idle(self, name: str) -> bool:
        """Tell whether a stream has done all its work, by chance. Then that comes before all later work."""
        if self._random.random() >= self.idle_share:
            return False
        for each in self.streams.values():
            each.merge(self.streams[name].known)
        return True

    def forget(self, address: int) -> None:
        """Begin anew: the allocator has given this block to somebody."""
        self._written.pop(address, None)
        self._read.pop(address, None)

    def _tick(self, name: str, what: str) -> tuple[str, int, str]:
        known = self.streams[name].known
        known[name] += 1
        return name, known[name], what

    def _check(self, before: tuple[str, int, str] | None, name: str, what: str) -> None:
        if before is not None and self.streams[name].known[before[0]] < before[1]:
            self.missing.append(f"'{what}' on {name} does not wait for '{before[2]}' on {before[0]}")


class ClockEvent(FakeEvent):
    known: dict[str, int]
    computing: str | None


class ClockStreams(fake_card.RoomStreams):
    """Streams whose edges are those of `CudaStreams` and `native/copy_streams.cpp`."""

    clocks: Clocks

    def __init__(self, schedule: str) -> None:
        super().__init__(schedule)
        self._computing = ComputeStreams()

    def note_computing(self, stream: StreamNumbers) -> None:
        if self._computing.add(self.clocks.streams[STREAMS[stream[0]]]):
            self.meet()

    def meet(self) -> None:
        if self._computing.are_several:
            self._computing.meet(self.clocks.streams[self.clocks.current])

    def record_compute(self) -> ClockEvent:
        self.meet()
        return self._mark(super().record_compute(), self.clocks.current, self.clocks.current)

    def copy_out(
        self, source: torch.UntypedStorage, host: SlabBlock, after: Sequence[StreamEvent], source_offset: int = 0
    ) -> ClockEvent:
        computing = self._begin("out", after)
        self.clocks.read(get_address(source), "out", "copy out")
        return self._mark(super().copy_out(source, host, after, source_offset), "out", computing)

    def copy_in(
        self, host: SlabBlock, target: torch.UntypedStorage, after: Sequence[StreamEvent], target_offset: int = 0
    ) -> ClockEvent:
        computing = self._begin("back", after)
        self.clocks.write(get_address(target), "back", "copy back")
        return self._mark(super().copy_in(host, target, after, target_offset), "back", computing)

    def compute_waits(self, event: StreamEvent) -> None:
        super().compute_waits(event)
        assert isinstance(event, ClockEvent)
        for name in {self.clocks.current, event.computing or self.clocks.current}:
            self.clocks.streams[name].merge(event.known)
        self.meet()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        storage = super().allocate(nbytes)
        self.clocks.forget(get_address(storage))
        return storage

    def _begin(self, name: str, after: Sequence[StreamEvent]) -> str | None:
        events = [each for each in after if isinstance(each, ClockEvent)]
        for each in events:
            self.clocks.streams[name].merge(each.known)
        return next((each.computing for each in events if each.computing), None)

    def _mark(self, event: FakeEvent, name: str, computing: str | None) -> ClockEvent:
        event.__class__ = ClockEvent
        assert isinstance(event, ClockEvent)
        event.known, event.computing = dict(self.clocks.streams[name].known), computing
        return event


class Layer(torch.autograd.Function):
    """A linear layer that tells the clocks what it reads and writes. Its backward pass runs on its stream, which waits
    for the stream that made the gradient, as autograd has it on a card."""

    @staticmethod
    def forward(context: Any, clocks: Clocks, batch: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        made = (batch @ weight).tanh()
        context.save_for_backward(batch, weight)
        context.clocks, context.stream, context.name = clocks, clocks.current, name
        note(clocks, name, (batch, weight), (made,))
        return made

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        clocks: Clocks = context.clocks
        clocks.streams[context.stream].merge(clocks.gradients.get(find_address(gradients[0]), {}))
        with clocks.on(context.stream):
            batch, weight = context.saved_tensors
            made = gradients[0] @ weight.t(), batch.t() @ gradients[0]
            note(clocks, f"backward of {context.name}", (batch, weight), made)
            clocks.gradients[find_address(made[0])] = dict(clocks.streams[context.stream].known)
        return None, *made, None


def note(clocks: Clocks, what: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
    for address in filter(None, map(find_address, read)):
        clocks.read(address, clocks.current, what)
    for address in filter(None, map(find_address, written)):
        clocks.forget(address)
        clocks.write(address, clocks.current, what)


def find_address(tensor: torch.Tensor) -> int | None:
    """Return where a tensor is; None if it has left since."""
    storage = get_any_storage(tensor)
    assert storage is not None
    with contextlib.suppress(RuntimeError):
        return get_address(storage)
    return None


class Branches(nn.Module):
    """Some layers on the main stream beside one or two on another, which share a weight and their input."""

    def __init__(self, clocks: Clocks, on_side: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.clocks, self.on_side = clocks, on_side
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 12) for _ in range(9))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        clocks = self.clocks
        first = Layer.apply(clocks, batch, self.weights[0], "first")
        clocks.wait("side", "main")
        with clocks.on("side"):
            side = first
            for index in range(self.on_side):
                side = Layer.apply(clocks, side, self.weights[1 + index], f"side {index}")
        main = first
        for index in (1, 4, 5, 6, 7):
            main = Layer.apply(clocks, main, self.weights[index], f"main {index}")
        clocks.wait("main", "side")
        both = side + main
        note(clocks, "sum", (), (both,))
        return Layer.apply(clocks, both, self.weights[8], "last").square().mean()  # type: ignore[no-any-return]


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    found = Clocks()
    monkeypatch.setattr(ClockStreams, "clocks", found, raising=False)
    monkeypatch.setattr(fake_card, "RoomStreams", ClockStreams)
    fake_card.use_fake_card(monkeypatch)
    native = library.load()
    native.replace_current_stream(lambda: STREAMS.index(found.current))
    yield found
    native.replace_current_stream(None)


@pytest.mark.parametrize(("on_side", "idle_share"), [(1, 0.0), (3, 0.0), (3, 0.3)])
@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (6_500_000, {"manages": "activations", "strategy": "offload_all"}),
        (6_500_000, {"manages": "activations", "strategy": "recompute_all"}),
        (4_500_000, {"manages": "activations", "mode": "dynamic"}),
        (3_600_000, {"mode": "dynamic"}),
    ],
)
def test_streams_wait_where_something_moves(
    budget: int, options: dict[str, Any], on_side: int, idle_share: float, clocks: Clocks, profile: HardwareProfile
) -> None:
    clocks.idle_share = idle_share
    model = Branches(clocks, on_side)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with elbowroom.fit(model, optimizer, budget, profile=profile, min_offload_bytes=1, **options) as room:
        for index in range(STEPS):
            with room.step():
                batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
                note(clocks, "batch", (), (batch,))
                model(batch).backward()
                clocks.wait("main", "side")
                optimizer.step()
                optimizer.zero_grad()
            clocks.wait("side", "main")
        steps = room.journal().steps
    assert clocks.missing == []
    assert steps[-1].offloaded_bytes + steps[-1].recomputed > 0


class CountedStream:
    """One of many streams, most of which have nothing to do."""

    def __init__(self, number: int, calls: list[str], *, is_busy: bool) -> None:
        self.number, self.calls, self.is_busy = number, calls, is_busy
        self.before: set[int] = {number}

    def query(self) -> bool:
        return not self.is_busy

    def wait_stream(self, stream: CountedStream) -> None:
        self.calls.append("stream")
        self.before |= stream.before

    def record_event(self) -> set[int]:
        self.calls.append("event")
        return set(self.before)

    def wait_event(self, event: set[int]) -> None:
        self.before |= event


def test_streams_that_have_nothing_to_do_cost_little() -> None:
    """A program that makes a stream in each step has used all of PyTorch's pool after 32 steps."""
    calls: list[str] = []
    streams = [CountedStream(number, calls, is_busy=number in (0, 7)) for number in range(33)]
    computing = ComputeStreams()
    assert all(map(computing.add, streams))
    computing.meet(streams[0])
    assert calls == ["stream", "event"]  # each makes an event
    assert all({0, 7} <= each.before for each in streams)
