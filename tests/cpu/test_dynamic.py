"""Steps that never repeat, decided on as they go: the same bits, and the budget held from the first op on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import elbowroom
from benchmarks.profiler_meter import ProfilerMeter
from elbowroom._family import names
from elbowroom.errors import ElbowroomError, Infeasible, Thrashing, TransferFailed, UnknownMember, UsageError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode, StepRecord
from elbowroom.residency import policies
from elbowroom.runtime import action_executor, thrash_guard
from elbowroom.runtime.ending_step import ending_step
from elbowroom.runtime.step_runner import StepRunner
from tests.pressure import ask_at_every_request, let_everything_go

pytestmark = pytest.mark.usefixtures("activations_only")

STEPS, WIDTH = 5, 64
Step = Callable[[int], torch.Tensor]
Made = tuple[nn.Module, list[torch.optim.Optimizer], Step]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_on(model: nn.Module, loss: Callable[[int], torch.Tensor]) -> Made:
    optimizer = sgd(model)

    def step(index: int) -> torch.Tensor:
        value = loss(index)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return model, [optimizer], step


def make_transformer() -> Made:
    """Another length every step."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(WIDTH, 8))

    def loss(index: int) -> torch.Tensor:
        return functional.cross_entropy(model(torch.randn(8, 40 + 9 * index, WIDTH)).mean(1), torch.arange(8))

    return train_on(model, loss)


class Experts(nn.Module):
    """Rows go to the expert that the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + out


def make_experts() -> Made:
    model = nn.Sequential(Experts(), Experts(), Experts())
    return train_on(model, lambda index: model(torch.randn(900, WIDTH) + 0.1 * index).square().mean())


class Tree(nn.Module):
    """Joins the two halves of a row, and of each half."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, rows: list[torch.Tensor], cut: int) -> torch.Tensor:
        if len(rows) == 1:
            return torch.tanh(self.leaf(rows[0]))
        at = max(1, min(len(rows) - 1, len(rows) // 2 + cut))
        return torch.tanh(self.join(torch.cat((self(rows[:at], -cut), self(rows[at:], cut)), -1)))


def make_tree() -> Made:
    model = Tree()

    def loss(index: int) -> torch.Tensor:
        rows = list(torch.randn(9 + index, 256, WIDTH))
        return model(rows, index - 2).square().mean()

    return train_on(model, loss)


def make_early_exit() -> Made:
    model = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(12))

    def loss(index: int) -> torch.Tensor:
        x = torch.randn(512, WIDTH)
        for depth, layer in enumerate(model):
            x = layer(x)
            if depth > 6 and float(x.detach()[0, 0]) > 0.3 * (depth - 6 - index):
                break
        return x.square().mean()

    return train_on(model, loss)


def make_adversaries() -> Made:
    """Two optimizers, and a penalty on the judge's gradient: a backward pass through a backward pass."""
    maker = nn.Sequential(nn.Linear(16, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    judge = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Softplus(), nn.Linear(4 * WIDTH, 1))
    model = nn.ModuleList((maker, judge))
    makers, judges = sgd(maker), sgd(judge)

    def step(index: int) -> torch.Tensor:
        real, noise = torch.randn(300 + 50 * index, WIDTH), torch.randn(300 + 50 * index, 16)
        fake = maker(noise)
        mixed = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        value = judge(fake.detach()).mean() - judge(real).mean() + (slope.norm(dim=1) - 1).square().mean()
        value.backward()
        judges.step()
        judges.zero_grad()
        (-judge(fake).mean()).backward()
        makers.step()
        model.zero_grad()
        return value.detach()

    return model, [makers, judges], step


def make_boxes() -> Made:
    """As many boxes as the scores say, each cut out and looked at."""
    trunk = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
    model = nn.ModuleDict({"trunk": trunk, "score": nn.Conv2d(16, 1, 1), "head": nn.Linear(16 * 49, 4)})

    def loss(index: int) -> torch.Tensor:
        features = model["trunk"](torch.randn(2, 3, 48, 48))
        scores = model["score"](features)
        found = (scores.detach() > scores.detach().mean() + 0.8 * scores.detach().std()).nonzero()[:: 11 + index]
        boxes = [
            functional.adaptive_avg_pool2d(features[b, :, y : y + 14, x : x + 14], 7) for b, _, y, x in found.tolist()
        ]
        return model["head"](torch.stack(boxes).flatten(1)).square().mean() + scores.square().mean()

    return train_on(model, loss)


LOOPS = (make_transformer, make_experts, make_tree, make_early_exit, make_adversaries, make_boxes)


@dataclasses.dataclass
class Outcome:
    """What a loop made of its model, and what it took."""

    values: list[torch.Tensor]
    records: tuple[StepRecord, ...]
    error: Infeasible | None = None


def run(make: Callable[[], Made], profile: HardwareProfile, **options: Any) -> Outcome:
    """Train, within a room if there are options."""
    torch.manual_seed(3)
    model, optimizers, step = make()
    values: list[torch.Tensor] = []
    if not options:
        values += [step(index) for index in range(STEPS)]
        return Outcome([*values, *(each.detach() for each in model.parameters())], ())
    given = {"mode": "dynamic", "min_offload_bytes": 256, "profile": profile} | options
    with elbowroom.fit(model, optimizers, **given) as room:
        try:
            for index in range(STEPS):
                with room.step():
                    values.append(step(index))
        except Infeasible as error:
            return Outcome(values, room.journal().steps, error)
        return Outcome([*values, *(each.detach() for each in model.parameters())], room.journal().steps)


@functools.cache
def find_plain(make: Callable[[], Made], profile: HardwareProfile) -> Outcome:
    """What the loop gives by itself."""
    return run(make, profile)


@functools.cache
def find_ends(make: Callable[[], Made], profile: HardwareProfile) -> tuple[int, int]:
    """About the smallest budget that is enough, and what the loop takes by itself."""
    most = max(record.peak_bytes or 0 for record in run(make, profile, memory_budget=1 << 40).records)
    least = most // 2
    while (outcome := run(make, profile, memory_budget=least, policy="lru")).error is not None:
        least = max(int(least * 1.02), outcome.error.needed_bytes)
    return least, most


@pytest.mark.parametrize("policy", names(policies))
@pytest.mark.parametrize("make", LOOPS, ids=lambda make: make.__name__.removeprefix("make_"))
def test_the_same_bits_within_the_budget(make: Callable[[], Made], policy: str, profile: HardwareProfile) -> None:
    expected = find_plain(make, profile)
    least, most = find_ends(make, profile)
    budget = least + (most - least) // 5
    found = run(make, profile, memory_budget=budget, policy=policy)
    assert found.error is None
    assert all(torch.equal(*pair) for pair in zip(expected.values, found.values, strict=True))
    assert {record.mode for record in found.records} == {Mode.DYNAMIC}
    assert max(record.peak_bytes or 0 for record in found.records) <= budget
    assert sum(record.offloaded_bytes + record.recomputed for record in found.records) > 0


def test_unknown_modes_and_policies_are_refused_at_once(profile: HardwareProfile) -> None:
    model, optimizers, _ = make_early_exit()
    with pytest.raises(UnknownMember, match="no policy is called 'none'; there are: coop, delta"):
        elbowroom.fit(model, optimizers, "1GiB", mode="dynamic", policy="none", profile=profile)
    with pytest.raises(UsageError, match="there are: auto, dynamic"):
        elbowroom.fit(model, optimizers, "1GiB", mode="guess", profile=profile)


def test_an_op_that_cannot_fit_is_named_before_it_runs(profile: HardwareProfile) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    before = model.weight.detach().clone()
    with elbowroom.fit(model, sgd(model), 100_000, mode="dynamic", profile=profile) as room:
        with pytest.raises(Infeasible) as caught, room.step():
            model(torch.ones(1, WIDTH).expand(4000, WIDTH)).sum().backward()
        assert caught.value.op.startswith("aten.addmm")
        assert caught.value.needed_bytes >= 4 * (4000 * WIDTH + WIDTH * WIDTH)
        assert torch.equal(model.weight, before)
        assert model.weight.grad is None
        with room.step():
            model(torch.ones(2, WIDTH)).sum().backward()
    assert model.weight.grad is not None


def test_a_chain_of_dropped_storages_is_longer_than_any_recursion(profile: HardwareProfile) -> None:
    depth = 2000
    x = torch.nn.Parameter(torch.linspace(-1, 1, 512))

    def grow() -> torch.Tensor:
        y = x * 1.0
        for _ in range(depth):
            y = torch.sin(y)
        y.sum().backward()
        assert x.grad is not None
        return x.grad.clone()

    expected = grow()
    x.grad = None
    model = nn.Module()
    model.x = x
    budget = 600 * 2048
    given: dict[str, Any] = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1, "profile": profile}
    with elbowroom.fit(model, torch.optim.SGD([x], lr=0.1), budget, **given) as room:
        with room.step():
            found = grow()
        assert room.journal().steps[-1].recomputed > 0
    assert torch.equal(expected, found)


# Found by looking for them -------------------------------------------------------------------------------------------

Program = Callable[[nn.Module], torch.Tensor]


def press() -> None:
    """An op: all that may leave leaves before it."""
    torch.ones(3) + 1


def add_numpy_batch(model: nn.Module) -> torch.Tensor:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 8, 32)).astype("f"))
    y = (x @ model.w).sin()
    press()
    return y.sum()


def split_random(model: nn.Module) -> torch.Tensor:
    whole = torch.rand(32, 64)
    a, b = whole.unsafe_chunk(2, 1)
    z = model.w * a.sin() + model.w * b
    del whole, a, b
    press()
    return z.sum()


def conjugate(model: nn.Module) -> torch.Tensor:
    z = torch.complex(model.x, model.x)
    return (torch.complex(model.w, model.w) * z.conj()).abs().sum()


def sparse_product(model: nn.Module) -> torch.Tensor:
    return torch.sparse.mm(torch.eye(32).to_sparse(), model.w).sin().sum()


def nest(model: nn.Module) -> torch.Tensor:
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 4:] = True
    with torch.no_grad():
        model.encoder.eval()
        out = model.encoder(torch.randn(3, 6, 32), src_key_padding_mask=mask)
    return (out.sum() * model.w).sin().sum()


def read_statistics(model: nn.Module) -> torch.Tensor:
    y = (model.x - model.norm.running_mean).sin()
    z = model.w * y
    del y
    press()
    model.norm.train()
    model.norm(model.x)
    press()
    return z.sum()


def normalize_two_ways(model: nn.Module) -> torch.Tensor:
    model.norm.eval()
    y = model.norm(model.x @ model.w).sin()
    z = y.square()
    model.norm.train()
    with torch.inference_mode():
        model.norm(torch.randn(32, 32))
    press()
    del y
    press()
    return z.sum()


def update_a_buffer_first(model: nn.Module) -> torch.Tensor:
    """Before what was made of it is dropped, so that nothing is settled."""
    y = model.x.sin()
    z = model.w * y
    model.x.add_(1.0)
    del y
    press()
    return z.sum()


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


def write_through_a_subclass(model: nn.Module) -> torch.Tensor:
    x = model.x * 1.0
    y = x.sin()
    x.as_subclass(Plain).mul_(2)
    z = model.w * y
    del y
    press()
    return z.sum()


def refill_the_batch(model: nn.Module) -> torch.Tensor:
    batch = torch.randn(32, 32)
    y = batch.sin()
    z = model.w * y
    del y
    press()
    batch.numpy()[:] = 0
    thread = threading.Thread(target=batch.fill_, args=(7.0,))
    thread.start()
    thread.join()
    press()
    return z.sum()


def grow_results(model: nn.Module) -> torch.Tensor:
    total = model.w.sum()
    for _ in range(3):
        out = torch.empty(0)
        torch.sin(model.w.detach(), out=out)
        total = total + (model.w * out).sum()
        press()
    return total


def save_again(model: nn.Module) -> torch.Tensor:
    held = model.w * 2
    held.sin()  # saves it, and forgets it again
    total = held.sin().exp() + held.cos()
    del held
    press()
    return total.sum()


PROGRAMS = (
    *(add_numpy_batch, split_random, conjugate, sparse_product, nest, read_statistics, normalize_two_ways),
    *(update_a_buffer_first, write_through_a_subclass, refill_the_batch, grow_results, save_again),
)


def make_odd() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(32, 32))
    model.register_buffer("x", torch.randn(32, 32))
    model.norm = nn.BatchNorm1d(32)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model.encoder = nn.TransformerEncoder(layer, 2)
    return model


@pytest.mark.parametrize(("policy", "calm_ops"), [("dtr", 0), ("lru", 4)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_odd_programs(
    program: Program, policy: str, calm_ops: int, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(model: nn.Module, room: Any) -> list[torch.Tensor]:
        torch.manual_seed(2)
        found = []
        for _ in range(2):
            with room.step() if room is not None else contextlib.nullcontext():
                program(model).backward()
                found.append(model.w.grad.clone())
                model.w.grad = None
        return [*found, *model.state_dict().values()]

    def make_room(runner: StepRunner, nbytes: int) -> None:
        if runner.state.watcher.ops >= calm_ops:
            let_everything_go(runner, nbytes)

    expected = train(make_odd(), None)
    ask_at_every_request(monkeypatch, make_room)
    model = make_odd()
    options: dict[str, Any] = {"mode": "dynamic", "policy": policy, "min_offload_bytes": 1, "profile": profile}
    with elbowroom.fit(model, sgd(model), 1 << 40, **options) as room:
        found = train(model, room)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def write_to_a_buffer(model: nn.Module) -> torch.Tensor:
    total = (model.w * model.x.sin()).sum()
    model.x.add_(1)
    return total


def write_to_what_was_saved(model: nn.Module) -> torch.Tensor:
    x = model.w.detach() * 1.5
    total = (model.w * x.sin()).sum() + (model.w * x.cos()).sum() + (model.w * x).sum()
    x.data.add_(1)
    return total


@pytest.mark.parametrize(
    "program", [write_to_a_buffer, write_to_what_was_saved, *PROGRAMS], ids=lambda program: program.__name__
)
def test_room_gets_short_at_one_op(program: Program, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each in turn: at one that writes, nothing is dropped that would be computed from what it writes to."""
    short, last = 0, 1

    def make_room(runner: StepRunner, nbytes: int) -> None:
        nonlocal last
        last = runner.state.watcher.ops
        if last == short:
            let_everything_go(runner, nbytes)

    def find(budget: int) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model = make_odd()
        options: dict[str, Any] = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1, "profile": profile}
        fitted = elbowroom.fit(model, sgd(model), budget, **options) if budget else contextlib.nullcontext()
        with fitted as room, room.step() if budget else contextlib.nullcontext():
            program(model).backward()
        return [model.w.grad, *model.state_dict().values()]

    expected = find(0)
    ask_at_every_request(monkeypatch, make_room)
    while short < last:
        short += 1
        assert all(torch.equal(*pair) for pair in zip(expected, find(1 << 40), strict=True)), short


def test_a_graph_that_outlives_an_exception(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: nn.Module, room: Any) -> torch.Tensor:
        losses = []
        with contextlib.suppress(ValueError), room.step() if room is not None else contextlib.nullcontext():
            z = (model.x + model.w).sin()
            losses.append(z.sin().sum())
            del z
            press()
            raise ValueError
        with torch.no_grad():
            model.w.add_(1)
        losses[0].backward()
        return model.w.grad.clone()

    expected = run(make_odd(), None)
    ask_at_every_request(monkeypatch)
    model = make_odd()
    options: dict[str, Any] = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1, "profile": profile}
    with elbowroom.fit(model, sgd(model), 1 << 40, **options) as room:
        assert torch.equal(expected, run(model, room))


def test_bytes_are_counted_right_whatever_is_resized(profile: HardwareProfile) -> None:
    model = make_odd()
    with elbowroom.fit(model, sgd(model), 1 << 40, mode="dynamic", profile=profile) as room, room.step():
        before = room._ledger.live_bytes
        for _ in range(4):
            out = torch.empty(0)
            torch.sin(model.w.detach(), out=out)
            product = model.w * out
            assert room._ledger.live_bytes == before + 2 * 4096
            del out, product
            assert room._ledger.live_bytes == before
        grown = torch.empty(0).resize_(1 << 16)
        assert room._ledger.live_bytes == before + (4 << 16)
        sparse = torch.sparse_coo_tensor(torch.arange(1 << 10)[None], torch.ones(1 << 10), (1 << 12,)).coalesce()
        assert room._ledger.live_bytes >= before + (4 << 16) + 12 * (1 << 10)
        del grown, sparse
        # How large this gets, only values tell.
        found = torch.empty(0, dtype=torch.int64)
        torch.nonzero(torch.ones(1 << 16), out=found)
        assert room._ledger.live_bytes == before + (8 << 16)


def test_inputs_are_not_kept(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_at_every_request(monkeypatch)
    model, seen = make_odd(), []
    options: dict[str, Any] = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1, "profile": profile}
    gc.collect()
    gc.disable()
    try:
        with elbowroom.fit(model, sgd(model), 1 << 40, **options) as room:
            for _ in range(3):
                x = torch.randn(64, 32)
                seen.append(weakref.ref(x.untyped_storage()))
                with room.step():
                    (x.sin() @ model.w).sin().square().sum().backward()
                del x
            assert [each() for each in seen] == [None] * 3
    finally:
        gc.enable()


def test_an_error_is_not_replaced_by_what_cannot_be_settled(profile: HardwareProfile) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    x = torch.randn(300, WIDTH)
    options: dict[str, Any] = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1, "profile": profile}
    loss = []

    def run(room: Any) -> None:
        with room.step():
            y = x
            for layer in model:
                y = torch.tanh(layer(y))
            loss.append(y.sum())
            del y
            torch.empty(1 << 20)

    with elbowroom.fit(model, sgd(model), 900_000, **options) as room:
        with pytest.raises(Infeasible, match=r"when aten\.empty"):
            run(room)
        last = room._modes.runner
        assert isinstance(last, StepRunner)
        assert not any(saved.recording for saved in last.state.storages.by_id.values()), "nothing may rest on a replay"
        expected = [
            each.detach().clone() for each in torch.autograd.grad(plain_loss(model, x), list(model.parameters()))
        ]
        with torch.no_grad():
            model[0].bias.add_(0)  # what a replay would have read
        loss[0].backward()
        assert all(torch.equal(one, each.grad) for one, each in zip(expected, model.parameters(), strict=True))


class Tied(nn.Module):
    """Words in and out by one matrix: the last op of the forward pass and the first of the backward pass are large."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 64)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.layers(self.words(x)) @ self.words.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1), x.flatten())


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_a_step_that_is_refused_ends_within_its_budget(share: float, profile: HardwareProfile) -> None:
    """What was dropped or offloaded does not come back all at once while the step unwinds."""

    def run(budget_bytes: int) -> tuple[int, Infeasible | None]:
        torch.manual_seed(0)
        model, x, refused, losses = Tied(), torch.randint(0, 200, (8, 64)), None, []
        options: dict[str, Any] = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1, "profile": profile}
        meter = ProfilerMeter()
        with elbowroom.fit(model, sgd(model), budget_bytes, **options) as room:
            meter.start(model.parameters())
            try:
                with room.step():
                    losses.append(model(x))
                    losses[0].backward()
            except Infeasible as error:
                refused = error
            meter.stop()
        return meter.peak_bytes, refused

    plain_bytes, refused = run(1 << 40)
    assert refused is None
    for budget_bytes in range(plain_bytes, 0, -plain_bytes // 40):
        _, refused = run(budget_bytes)
        if refused is not None:
            break
    assert refused is not None
    budget_bytes = int(budget_bytes * share)
    peak_bytes, refused = run(budget_bytes)
    assert refused is not None and peak_bytes <= budget_bytes


def test_what_cannot_be_computed_at_the_end_is_given_up(
    profile: HardwareProfile, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    options: dict[str, Any] = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1, "profile": profile}
    with elbowroom.fit(model, sgd(model), 4 << 20, **options) as room:
        held: list[torch.Tensor] = []
        with room.step():
            loss = model(torch.randn(1024, WIDTH)).sum()
            with contextlib.suppress(Infeasible):
                while True:
                    held.append(torch.empty(1 << 16, dtype=torch.uint8))
        assert "given up" in caplog.text
        with pytest.raises(ElbowroomError, match=r"needs was given up then: .* Run its forward pass again"):
            loss.backward()
        del held, loss
        with room.step():
            model(torch.randn(64, WIDTH)).sum().backward()


def plain_loss(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    y = x
    for layer in model:
        y = torch.tanh(layer(y))
    return y.sum()


def test_a_step_that_fits_does_not_end_the_watch(profile: HardwareProfile) -> None:
    """Given a step beforehand, and one that everything fits: a later one may be larger."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))
    optimizer = sgd(model)

    def step(rows: int) -> None:
        model(torch.randn(rows, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(8)  # the momenta are there
    options: dict[str, Any] = {"mode": "dynamic", "min_offload_bytes": 1, "profile": profile}
    with elbowroom.fit(model, optimizer, 2_500_000, step=lambda: step(8), **options) as room:
        for rows in (8, 8, 8, 8, 800):
            with room.step():
                step(rows)
        assert room.planned is None
        records = room.journal().steps
        assert "5 dynamic" in room.report()
    assert {record.mode for record in records} == {Mode.DYNAMIC}
    assert records[-1].peak_bytes <= 2_500_000
    assert records[-1].offloaded_bytes + records[-1].recomputed > 0


def test_the_first_error_is_the_one_that_counts() -> None:
    def fail() -> None:
        raise TransferFailed("no room")

    with pytest.raises(ValueError, match="the user's"), ending_step(fail):
        raise ValueError("the user's")
    with pytest.raises(TransferFailed), ending_step(fail):
        pass


# Faults ---------------------------------------------------------------------------------------------------------------


def make_deep(layers: int = 8) -> tuple[nn.Sequential, torch.optim.Optimizer, Callable[[int], torch.Tensor]]:
    """Its step takes as many rows as it is told."""
    torch.manual_seed(6)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))
    optimizer = sgd(model)

    def step(rows: int) -> torch.Tensor:
        data = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def train_deep(rows: list[int]) -> list[torch.Tensor]:
    model, _, step = make_deep()
    losses = [step(each) for each in rows]
    return [*losses, *(each.detach() for each in model.parameters())]


DEEP: dict[str, Any] = {"mode": "dynamic", "min_offload_bytes": 1}
NARROW = 800_000
"""Holds a step of 300 rows, each of whose layers saves 77 kB, but not all that it saves."""


@pytest.mark.parametrize("lost", ["moves", "replays"])
def test_a_step_that_does_not_get_on_is_said_and_ended(
    lost: str, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thrash_guard, "NOT_LONG", 1e-9)
    model, optimizer, step = make_deep()
    options = DEEP | {"policy": "lru" if lost == "moves" else "dtr", "profile": profile}
    budget = NARROW if lost == "moves" else 3 * NARROW // 2  # a chain of replays takes more
    with elbowroom.fit(model, optimizer, budget, **options) as room:
        with room.step():
            step(300)
        monkeypatch.setattr(thrash_guard, "WORTH_SAYING", 1e-9)
        caplog.clear()
        with room.step():
            step(300)
        assert caplog.text.count("waiting for transfers") == 1
        before = [each.detach().clone() for each in model.parameters()]
        monkeypatch.setattr(thrash_guard, "ENOUGH", 1e-9)
        with pytest.raises(Thrashing, match=r"recomputing .* waiting for transfers, for .* s of its own") as caught:
            run_in(room, step, 300)
        assert (caught.value.move_seconds if lost == "moves" else caught.value.replay_seconds) > 0
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        del caught, before  # the traceback holds the batch, which counts as long as it is there
        monkeypatch.undo()
        optimizer.zero_grad()
        with room.step():
            step(300)
    assert all(torch.equal(*pair) for pair in zip(train_deep([300] * 3)[3:], model.parameters(), strict=True))


@pytest.mark.parametrize("policy", ["predictive", "lru"])
def test_too_large_a_batch_costs_nothing_but_its_step(policy: str, profile: HardwareProfile) -> None:
    """Wherever in the step it is refused: before the optimizer has changed anything."""
    model, optimizer, step = make_deep()
    refused, losses = set(), []
    options = DEEP | {"policy": policy, "profile": profile}
    with elbowroom.fit(model, optimizer, NARROW, **options) as room:
        losses.append(run_in(room, step, 300))
        for rows in (1400, 2000, 2600, 5000, 9000):
            before = [each.detach().clone() for each in model.parameters()]
            with pytest.raises(Infeasible) as caught:
                run_in(room, step, rows)
            assert caught.value.needed_bytes > NARROW
            refused.add(caught.value.op)
            del caught  # its traceback holds the batch, which counts as long as it is there
            assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
            del before
            optimizer.zero_grad()
            losses.append(run_in(room, step, 300))
        records = room.journal().steps
        gc.collect()
        assert room._transfers._copies == 0  # type: ignore[attr-defined]
    assert len(refused) > 1, refused
    assert max(record.peak_bytes or 0 for record in records) <= NARROW
    assert all(torch.equal(*pair) for pair in zip(train_deep([300] * 6), [*losses, *model.parameters()], strict=True))


def run_in(room: Any, step: Callable[[int], torch.Tensor], rows: int) -> torch.Tensor:
    with room.step():
        return step(rows)


@pytest.mark.parametrize("policy", ["predictive", "lru", "dtr"])
@pytest.mark.parametrize("host_bytes", [1000, 200_000])
def test_what_has_no_room_below_is_dropped(
    host_bytes: int, policy: str, profile: HardwareProfile, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, step = make_deep()
    options = DEEP | {"policy": policy, "host_bytes": host_bytes, "profile": profile}
    with elbowroom.fit(model, optimizer, 1_000_000, **options) as room:
        found = [run_in(room, step, 300) for _ in range(3)]
        records = room.journal().steps
        gc.collect()
        assert room._transfers._copies == 0  # type: ignore[attr-defined]
    assert all(torch.equal(*pair) for pair in zip(train_deep([300] * 3), [*found, *model.parameters()], strict=True))
    assert max(record.peak_bytes or 0 for record in records) <= 1_000_000
    assert max(record.offloaded_bytes for record in records) <= host_bytes
    assert records[-1].recomputed > 0
    assert caplog.text.count("stay there") == (policy != "dtr")


def test_what_can_neither_leave_nor_be_dropped_is_named(profile: HardwareProfile) -> None:
    model, optimizer, _ = make_deep(1)

    def step(count: int) -> torch.Tensor:
        """Saves what no replay gives: random numbers."""
        total = model[0][0].bias.sum()
        for _ in range(count):
            total = total + (model[0][0].bias * torch.rand(300, WIDTH)).sum()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return total.detach()

    torch.manual_seed(8)
    expected = [step(2)]
    model, optimizer, _ = make_deep(1)
    with elbowroom.fit(model, optimizer, 600_000, host_bytes=100_000, profile=profile, **DEEP) as room:
        with pytest.raises(Infeasible, match=r"cannot leave since the spill file .* has no room for") as caught:
            run_in(room, step, 20)
        assert len(caught.value.in_the_way) == 4 and caught.value.in_the_way[2][1] >= 76_800
        del caught
        optimizer.zero_grad()
        torch.manual_seed(8)
        assert torch.equal(run_in(room, step, 2), expected[0])


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_error_inside_a_replay(at: int, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `at`th allocation in a replay fails."""
    replay = action_executor.replay
    is_failing, count = False, 0

    def ask(requested_bytes: int, missing_bytes: int) -> bool:
        nonlocal count
        count += 1
        if count == at:
            raise ZeroDivisionError("in a replay")
        return False  # let it pass

    def short_replay(*args: Any) -> Any:
        if not is_failing:
            return replay(*args)
        with room._ledger.counting(0, ask):
            return replay(*args)

    monkeypatch.setattr(action_executor, "replay", short_replay)
    model, optimizer, step = make_deep()
    options = DEEP | {"policy": "dtr", "profile": profile}
    with elbowroom.fit(model, optimizer, 1_000_000, **options) as room:
        found = [run_in(room, step, 300)]
        before = [each.detach().clone() for each in model.parameters()]
        is_failing = True
        with pytest.raises(ZeroDivisionError, match="in a replay"):
            run_in(room, step, 300)
        is_failing = False
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        optimizer.zero_grad()
        found += [run_in(room, step, 300)]
        assert max(record.peak_bytes or 0 for record in room.journal().steps) <= 1_000_000
        gc.collect()
        assert room._transfers._copies == 0  # type: ignore[attr-defined]
    found += [step(300)]  # without the room
    assert all(torch.equal(*pair) for pair in zip(train_deep([300] * 3), [*found, *model.parameters()], strict=True))


class Counts(torch.autograd.Function):
    """Writes down each time that it runs."""

    forwards = backwards = 0

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        Counts.forwards += 1
        y = (x * 2).sigmoid() * Counts.forwards
        context.save_for_backward(x, y)
        return y.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Counts.backwards += 1
        x, y = context.saved_tensors
        return gradients[0] * x.cos() * y / Counts.backwards


@torch.library.custom_op("elbowroom_tests::wave", mutates_args=())
def wave(x: torch.Tensor) -> torch.Tensor:
    """An op that does not say what it gives, and gives something else each time that it runs."""
    CALLS.append(x.shape[0])
    return x.sin() * len(CALLS)


CALLS: list[int] = []


def keep(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


wave.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos() * ctx.saved_tensors[1], setup_context=keep
)


@pytest.mark.parametrize("policy", names(policies))
@pytest.mark.parametrize("odd", [Counts.apply, wave], ids=["function", "op"])
def test_what_has_side_effects_runs_as_often_as_without_us(
    odd: Callable[[torch.Tensor], torch.Tensor],
    policy: str,
    profile: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(room: Any) -> list[torch.Tensor]:
        Counts.forwards = Counts.backwards = 0
        CALLS.clear()
        values = []
        for index in range(3):
            with room.step() if room is not None else contextlib.nullcontext():
                y = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(index))
                for layer in model:
                    y = odd(layer(y)).tanh()
                loss = y.square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            values.append(loss.detach())
        counts = [float(Counts.forwards), float(Counts.backwards), float(len(CALLS))]
        return [*values, *(each.detach().clone() for each in model.parameters()), torch.tensor(counts)]

    model, optimizer, _ = make_deep(4)
    expected = train(None)
    model, optimizer, _ = make_deep(4)
    ask_at_every_request(monkeypatch)
    with elbowroom.fit(model, optimizer, 1 << 40, policy=policy, profile=profile, **DEEP) as room:
        found = train(room)
        assert sum(record.offloaded_bytes + record.recomputed for record in room.journal().steps) > 0
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_what_numpy_was_shown_and_has_no_room_below_stays(profile: HardwareProfile) -> None:
    """It can be computed, but from what may have been written to: there is an end to trying."""
    model, optimizer, _ = make_deep()

    def step(rows: int) -> torch.Tensor:
        y = torch.randn(rows, WIDTH)
        for layer in model:
            y = layer(y)
            y.detach().numpy()
        y.sum().backward()
        return y.detach()

    options = DEEP | {"policy": "lru", "host_bytes": 1000, "profile": profile}
    with elbowroom.fit(model, optimizer, 600_000, **options) as room:
        with pytest.raises(Infeasible, match="has no room for"):
            run_in(room, step, 300)
        optimizer.zero_grad()
        run_in(room, step, 3)


def test_nothing_is_recorded_where_there_was_always_room(profile: HardwareProfile) -> None:
    """Nor is a step that then needs more than there is refused, or another one."""
    rows = [64, 64, 64, 1024, 1024, 64]

    def train(budget: int, **options: Any) -> tuple[list[torch.Tensor], list[StepRecord], list[int]]:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)))
        optimizer = sgd(model)
        losses, counts = [], []
        with elbowroom.fit(
            model, optimizer, budget, mode="dynamic", policy="dtr", min_offload_bytes=1, profile=profile,
            **options,
        ) as room:  # fmt: skip
            for count in rows:
                with room.step():
                    loss = model(torch.randn(count, WIDTH)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
                counts.append(room._modes.runner.state.watcher.recorded_ops)  # type: ignore[union-attr]
            return [*losses, *model.parameters()], room.journal().steps, counts

    expected, records, _ = train(1 << 40)
    budget = (3 * max(record.peak_bytes or 0 for record in records)) // 5
    assert records[0].peak_bytes < budget // 4
    found, records, counts = train(budget)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert max(record.peak_bytes or 0 for record in records) <= budget
    assert counts[0] > 0 and counts[1:3] == [0, 0], "the first might have been too large"
    assert 0 < counts[3] < counts[4] and counts[5] == counts[0], "there has been too little room now"
    assert records[3].recomputed > 0 and records[4].recomputed > 0
    found, records, counts = train(budget, host_bytes=1)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert counts == [counts[0]] * 3 + [counts[4]] * 2 + [counts[0]], "all that is too much has to be computed again"


def test_what_is_too_small_to_move_is_not_recorded(profile: HardwareProfile) -> None:
    """Nobody will compute it again. Constants are, since much is computed from them, and what is written in place."""
    model = nn.Linear(64, 64)
    options: dict[str, Any] = {"mode": "dynamic", "min_offload_bytes": 1 << 14, "profile": profile}
    with elbowroom.fit(model, [], 1 << 30, **options) as room, room.step():
        large, small, constant = model.weight.relu(), model.bias.relu(), torch.arange(3)
        written = model.weight.relu()
        written[0].mul_(2)  # 256 bytes of them
        table = room._modes.runner.state.storages.table  # type: ignore[union-attr]
        found = {name: table.find(each.untyped_storage()) for name, each in locals().items() if torch.is_tensor(each)}
        recorded = {name: [] if each is None else each.record.ops for name, each in found.items()}
        assert recorded == {
            "large": ["aten.relu.default"], "small": [], "constant": ["aten.arange.default"],
            "written": ["aten.relu.default", "aten.mul_.Tensor"],
        }  # fmt: skip


def test_what_a_recording_reads_has_to_be_as_it_was(profile: HardwareProfile) -> None:
    """Of autograd's claims, too: `x.data` may be written to, and PyTorch does not notice."""
    model = nn.Linear(64, 64)
    options: dict[str, Any] = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1, "profile": profile}
    with elbowroom.fit(model, [], 1 << 30, **options) as room, room.step():
        x = model.weight.relu()
        y = x.sin().tanh()
        runner = room._modes.runner
        assert runner is not None
        with runner._lock:
            runner._start_managing()
        leaf, target = (runner.state.storages.table.see(each.untyped_storage()) for each in (x, y))
        recording = runner.state.storages.table.find_recording(target.record)
        assert recording.names == ["aten.sin.default", "aten.tanh.default"]
        assert recording.leaves == [leaf] and recording.is_open(runner.state.storages.table)
        x.data.add_(1)
        assert not recording.is_current(runner.state.storages.table)
        assert "aten.relu.default" in runner.state.storages.table.find_recording(target.record).names
