"""Planning ahead leaves whatever a step touches in Python as it was, or does without."""

from __future__ import annotations

import array
import collections
import functools
import itertools
import math
import random
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import elbowroom
from elbowroom.errors import TraceError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.tracing.iterators import IteratorTaken
from elbowroom.tracing.reach import Reach
from elbowroom.tracing.undo import undone

WIDTH, ROWS = 16, 8

HISTORY: list[torch.Tensor] = []
COUNT = 0


class Average:
    """A metric of the program's own: state in attributes, in a slot, in its class and in globals."""

    __slots__ = ("__dict__", "steps")
    made = 0

    def __init__(self) -> None:
        self.steps, self.sum, self.values = 0, torch.zeros(()), [torch.zeros(())]

    def update(self, value: torch.Tensor) -> None:
        global COUNT
        COUNT += 1
        HISTORY.append(value)
        Average.made += 1
        Average.latest = value  # type: ignore[attr-defined]
        self.steps += 1
        self.sum = self.sum + value
        self.values.append(value)

    def tell(self) -> tuple[Any, ...]:
        there = COUNT, len(HISTORY), Average.made, hasattr(Average, "latest")
        return *there, self.steps, self.sum.item(), [each.item() for each in self.values]


class Job:
    """A small model, and whatever a step may touch besides."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.x = torch.randn(ROWS, WIDTH)
        self.after: Callable[[torch.Tensor], object] = lambda loss: None
        self.before: Callable[[], torch.Tensor] = lambda: self.x
        self.scaler: torch.amp.GradScaler | None = None

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.before()).square().mean()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.after(loss.detach())
        return loss.detach()


Tell = Callable[[], object]


def touch_metric(job: Job) -> Tell:
    metric = Average()
    job.after = metric.update
    return metric.tell


def touch_containers(job: Job) -> Tell:
    losses: list[torch.Tensor] = []
    latest: collections.deque[torch.Tensor] = collections.deque(maxlen=2)
    seen: set[torch.Tensor] = set()
    table: dict[str, dict[str, list[torch.Tensor]]] = {"train": collections.defaultdict(list)}
    counts, raw = np.zeros(3), (bytearray(3), array.array("d", [0.0]))
    notes, append, calls = types.SimpleNamespace(best=None), losses.append, 0

    def after(loss: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        append(loss)
        latest.append(loss)
        seen.add(loss)
        table["train"]["loss"].append(loss)
        counts[calls % 3] += 1
        raw[0][0] += 1
        raw[1][0] += 1
        notes.best, notes.first = loss, loss
        after.calls = calls  # type: ignore[attr-defined]

    job.after = after
    return lambda: (losses, latest, seen, table, counts.tolist(), repr(raw), vars(notes), vars(after), calls)


def touch_scheduler(job: Job) -> Tell:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, 0.1, total_steps=20)
    job.after = lambda loss: scheduler.step()
    return lambda: (scheduler.state_dict(), job.optimizer.param_groups[0]["lr"])


def touch_scaler(job: Job) -> Tell:
    scaler = job.scaler = torch.amp.GradScaler("cpu")
    return lambda: (scaler._scale, scaler._growth_tracker, dict(scaler._per_optimizer_states))


def touch_average_model(job: Job) -> Tell:
    average = torch.optim.swa_utils.AveragedModel(job.model)
    job.after = lambda loss: average.update_parameters(job.model)
    return lambda: {name: value.tolist() for name, value in average.state_dict().items()}


def touch_hooks(job: Job) -> Tell:
    activations: list[torch.Tensor] = []
    job.model[0].register_forward_hook(lambda module, given, result: activations.append(result.detach()))
    return lambda: activations


def touch_gradients(job: Job) -> Tell:
    """Of tensors that the model does not have, and of its own where the step has them from elsewhere."""
    scale, own = nn.Parameter(torch.ones(WIDTH)), list(job.model.parameters())
    job.before = lambda: job.x * scale * sum(each.square().sum() for each in own)
    return lambda: (scale.grad, [each.grad for each in own], [each.requires_grad for each in own])


def touch_generators(job: Job) -> Tell:
    generators = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1), np.random.RandomState(1)

    def before() -> torch.Tensor:
        factor = generators[1].random() + generators[2].random() + generators[3].rand()
        return job.x * factor + torch.randn(ROWS, WIDTH, generator=generators[0])

    job.before = before
    states = [lambda: generators[0].get_state().tolist(), lambda: generators[1].bit_generator.state]
    return lambda: [state() for state in states] + [generators[2].getstate(), str(generators[3].get_state())]


def touch_cache(job: Job) -> Tell:
    @functools.lru_cache
    def table(width: int) -> torch.Tensor:
        return torch.arange(width).float()

    job.before = lambda: job.x * table(WIDTH)
    return lambda: table.cache_info().currsize


class Cache:
    """No cache of functools, whatever its methods are called."""

    def cache_clear(self) -> None:
        raise AssertionError

    def cache_info(self) -> None:
        raise AssertionError


def touch_look_alike(job: Job) -> Tell:
    made = Cache()
    job.before = lambda: job.x * (made is not Cache)
    return lambda: 0


def give_generator(job: Job) -> Tell:
    batches = (torch.full((ROWS, WIDTH), float(index)) for index in range(100))
    job.before = lambda: next(batches)
    return lambda: batches.gi_frame.f_locals.get("index")


def give_iterator_that_is_swallowed(job: Job) -> Tell:
    job.batches = iter([job.x] * 100)  # type: ignore[attr-defined]

    def before() -> torch.Tensor:
        try:
            return next(job.batches)  # type: ignore[attr-defined, no-any-return]
        except Exception:
            return job.x

    job.before = before
    return lambda: job.batches.__length_hint__()  # type: ignore[attr-defined]


def give_loader(job: Job) -> Tell:
    loader = torch.utils.data.DataLoader(list(torch.randn(64, WIDTH)), batch_size=ROWS)
    batches: Iterator[torch.Tensor] = iter(loader)
    job.before = lambda: next(batches)
    return lambda: (batches._num_yielded, torch.get_rng_state().tolist())  # type: ignore[attr-defined]


def give_default(job: Job) -> Tell:
    count = itertools.count()

    def before(count: Iterator[int] = count) -> torch.Tensor:
        return job.x * next(count)

    job.before = before
    return lambda: repr(count)


def leave_elsewhere(job: Job) -> Tell:
    def after(loss: torch.Tensor) -> None:
        math.left = loss  # type: ignore[attr-defined]

    job.after = after
    return lambda: None


PLANNED = (
    *(touch_metric, touch_containers, touch_scheduler, touch_hooks, touch_gradients, touch_generators, touch_cache),
    touch_look_alike,
)
LIVE = (
    *(touch_scaler, touch_average_model, give_generator, give_iterator_that_is_swallowed, give_loader, give_default),
    leave_elsewhere,
)


@pytest.fixture
def emptied() -> Iterator[None]:
    """What tests left in globals goes."""
    global COUNT
    yield
    COUNT, Average.made = 0, 0
    HISTORY.clear()
    for owner, name in ((Average, "latest"), (math, "left")):
        if hasattr(owner, name):
            delattr(owner, name)


@pytest.mark.usefixtures("emptied")
@pytest.mark.parametrize("touch", [*PLANNED, *LIVE])
def test_whatever_a_step_touches_is_as_before(
    touch: Callable[[Job], Tell], profile: HardwareProfile, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Job()
    touch(plain)
    job = Job()
    tell = touch(job)
    random_state, before = torch.get_rng_state(), repr(tell())
    with elbowroom.fit(job.model, job.optimizer, "1GiB", step=job.step, profile=profile) as room:
        assert (room.planned is not None) is (touch in PLANNED)
        assert len(caplog.messages) == (touch in LIVE)
        assert ("first real step is captured instead" in caplog.text) is (touch in LIVE)
        assert repr(tell()) == before
        assert torch.equal(torch.get_rng_state(), random_state)
        left = getattr(math, "left", None)
        assert isinstance(left, FakeTensor) is (touch is leave_elsewhere)
        found = []
        for _ in range(3):
            with room.step():
                found.append(job.step())
    torch.set_rng_state(random_state)
    assert all(torch.equal(loss, plain.step()) for loss in found)
    assert not any(isinstance(each, FakeTensor) for each in (*HISTORY, *vars(job).values()))


def test_a_refusal_says_why_and_what_to_do() -> None:
    job = Job()
    give_generator(job)
    with pytest.raises(TraceError, match=r"next item of a generator.*first real step is captured instead"):
        elbowroom.capture(job.step, job.model, job.optimizer)


def test_an_iterator_is_refused_to_the_step_alone() -> None:
    """Not to other threads, which may prefetch, nor to whoever kept what stood for it."""
    numbers = iter(range(3))
    held = [numbers]
    reach = Reach([held])
    reach.guard()
    kept = held[0]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(next, kept).result() == 0
    with pytest.raises(IteratorTaken, match="next item of a range_iterator"):
        next(kept)
    reach.put_back()
    assert held[0] is numbers and next(numbers) == 1 and next(kept) == 2


class AttributeDict(dict[str, Any]):
    """Settings as programs often have them: the wrong error for what is not there."""

    __getattr__ = dict.__getitem__


class Lazy:
    """A slot that is set at first use, one that is private, and a property that has nothing yet."""

    __slots__ = ("__uses", "table")

    def __init__(self) -> None:
        self.__uses = 0

    def __call__(self) -> None:
        self.table = torch.zeros(1)
        self.__uses += 1

    @property
    def args(self) -> object:
        raise RuntimeError("there are none yet")

    @property
    def uses(self) -> int:
        return self.__uses


def test_objects_of_the_program_may_refuse_to_be_looked_at() -> None:
    held = types.SimpleNamespace(settings=AttributeDict(rate=0.1), lazy=Lazy())
    with undone(held):
        held.settings["rate"] = 0.2
        held.lazy()
        assert held.lazy.uses == 1
    assert held.settings == {"rate": 0.1}
    assert held.lazy.uses == 0 and not hasattr(held.lazy, "table")
