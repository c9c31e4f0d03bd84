"""A step as captured: on fake tensors and live the same, and nothing changed by looking."""

from __future__ import annotations

import dataclasses
import logging
import threading
import warnings
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import elbowroom
from benchmarks.profiler_meter import ProfilerMeter
from elbowroom.errors import Infeasible, TraceError, UsageError
from elbowroom.hardware.shipped import load_shipped
from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.hooks.meter import CpuMeter
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.trace import Role, Trace
from elbowroom.planner.problem import pose
from elbowroom.tracing.live import LiveCapture, match_ops
from elbowroom.tracing.residents import list_resident_tensors, list_residents
from tests.models import MODELS, Made

# Others differ: transformers' models look at their masks on real tensors and not on fake ones, and torch's fake kernels
# do not know the workspace of a oneDNN LSTM, nor the dtype of batch norm's statistics under autocast. While there are
# fake tensors the derivative of `split` makes other views.
ALIKE = ("resnet50", "vgg16_bn", "densenet121", "mobilenet_v3_large", "unet")


def capture_live(made: Made, profile: HardwareProfile) -> Trace:
    model, optimizer, step = made
    with elbowroom.fit(model, optimizer, 1 << 40, profile=profile) as room:
        while room.planned is None:
            with room.step():
                step(0)
        return room.planned.trace


def capture_fake(made: Made) -> Trace:
    model, optimizer, step = made
    return elbowroom.capture(lambda: step(0), model, optimizer)


def lives(trace: Trace) -> list[tuple[int, int, int, str]]:
    """Every storage by what can be compared between two captures: ids follow the order in which they are seen."""
    large = [each for each in trace.storages if each.nbytes >= 1 << 14]  # live, smaller ones stay with autograd
    return sorted((each.created, each.released, each.nbytes, str(each.role)) for each in large)


@pytest.mark.parametrize("name", ALIKE)
def test_fake_and_live_are_the_same_step(name: str, profile: HardwareProfile) -> None:
    fake, live = capture_fake(MODELS[name]().make()), capture_live(MODELS[name]().make(), profile)
    assert match_ops(fake.ops, live.ops) == list(range(len(live.ops)))
    for field in ("reads", "writes"):
        for ours, theirs in zip(fake.ops, live.ops, strict=True):
            shapes = [[(view.version, view.dtype, view.shape) for view in getattr(op, field)] for op in (ours, theirs)]
            assert shapes[0] == shapes[1], f"{field} of {ours.name} at {ours.tick}"
    assert [op.barrier for op in fake.ops] == [op.barrier for op in live.ops]
    for ours, theirs in zip(fake.saves, live.saves, strict=True):
        assert (ours.tick, ours.released) == (theirs.tick, theirs.released)
        assert fake.storages[ours.storage].nbytes == live.storages[theirs.storage].nbytes
    assert [(need.tick, need.save) for need in fake.needs] == [(need.tick, need.save) for need in live.needs]
    # On fake tensors a batch is seen only where it is used, and what a loop holds besides is not seen at all.
    assert [one for one in lives(fake) if one[0] >= 0] == [one for one in lives(live) if one[0] >= 0]


def test_capturing_changes_and_allocates_nothing() -> None:
    model, optimizer, step = MODELS["resnet50"]().make()
    identities = {name: (id(value), value.data_ptr()) for name, value in model.state_dict(keep_vars=True).items()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    meter = ProfilerMeter()
    meter.start()
    elbowroom.capture(lambda: step(0), model, optimizer)
    meter.stop()
    assert meter.peak_bytes < 1 << 20  # of tensors that a real step would make by the hundred MiB
    assert {n: (id(v), v.data_ptr()) for n, v in model.state_dict(keep_vars=True).items()} == identities
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert not optimizer.state and all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert step(0).isfinite()  # and it still trains


def test_roles_and_barriers() -> None:
    model, optimizer, step = MODELS["gpt2"]().make()
    trace = capture_fake((model, optimizer, step))
    step(0)
    counts = {
        role: {id(each.tensor.untyped_storage()) for each in list_residents(model, [optimizer]) if each.role is role}
        for role in Role
    }
    found = {role: sum(storage.role is role and storage.created < 0 for storage in trace.storages) for role in Role}
    assert found[Role.PARAMETER] == len(counts[Role.PARAMETER])
    assert found[Role.OPTIMIZER_STATE] == len(counts[Role.OPTIMIZER_STATE])
    assert any(storage.role is Role.GRADIENT for storage in trace.storages)
    assert any(storage.role is Role.ACTIVATION for storage in trace.storages)
    draws = [op for op in trace.ops if "bernoulli" in op.name]
    assert draws and all(op.barrier for op in draws)
    assert not any(op.barrier for op in trace.ops if op.name == "aten.addmm.default")


class Tied(nn.Module):
    """Shares a module, a weight and, in a circle, itself; has a buffer, and lacks another and a bias."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4, bias=False)
        self.first, self.second, self.third = shared, nn.Sequential(shared, nn.BatchNorm1d(4)), nn.Linear(4, 4)
        self.third.weight = shared.weight
        self.register_buffer("there", torch.ones(2))
        self.register_buffer("missing", None)
        self.list = nn.ModuleList([self.third])
        self.list.append(self.list)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("kind", ["eager", "scripted"])
def test_the_quick_list_of_what_lasts_has_the_same_tensors(kind: str) -> None:
    model: nn.Module = (
        Tied() if kind == "eager" else torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    )
    strange = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([*model.parameters(), strange])
    for parameter in (*model.parameters(), strange):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in list(model.parameters())[1:]:
        parameter.grad = None

    def tell(tensors: Iterable[torch.Tensor]) -> set[int]:
        return {each.data_ptr() for each in tensors}

    labelled = list_residents(model, [optimizer])
    assert tell(list_resident_tensors(model, [optimizer])) == tell(each.tensor for each in labelled)
    assert strange.grad.data_ptr() in tell(each.tensor for each in labelled)  # type: ignore[union-attr]
    assert {Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE} == {each.role for each in labelled}


def test_tensors_that_stand_for_parameters_have_no_gradients() -> None:
    """Those that `functional_call` is given need not be leaves, and PyTorch warns of their gradients."""

    class Listing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            listed.extend((len(list_resident_tensors(self, [])), len(list_residents(self, []))))
            return super().forward(x)

    listed: list[int] = []
    model = Listing(4, 4)
    given = {name: 2 * each for name, each in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.functional_call(model, given, (torch.ones(1, 4),))
    assert listed == [2, 2]


class Looks(nn.Module):
    """Looks at a value in the middle of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            if x.sum().item() < 0:
                x = x * 2
        return x


def make_looking() -> Made:
    torch.manual_seed(0)
    model = Looks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(index: int) -> torch.Tensor:
        torch.manual_seed(index)
        loss = model(torch.randn(512, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def test_a_step_that_looks_at_values_is_captured_live(
    profile: HardwareProfile, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_looking()
    with pytest.raises(TraceError, match="fake tensors"):
        capture_fake(made)
    plain, (model, optimizer, step) = make_looking(), made
    expected = [plain[2](index) for index in range(5)]
    with elbowroom.fit(model, optimizer, "1GiB", profile=profile, step=lambda: step(0)) as room:
        assert room.planned is None and "fake tensors" in caplog.text
        for index in range(5):
            with room.step():
                assert torch.equal(step(index), expected[index])
        assert room.planned is not None
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain[0].parameters(), strict=True))


def test_what_cannot_be_captured_says_so() -> None:
    model, optimizer, step = MODELS["unet"]().make()
    with FakeTensorMode(), pytest.raises(UsageError, match="FakeTensorMode"):
        elbowroom.capture(lambda: step(0), model, optimizer)
    with pytest.raises(TraceError, match="backward"):
        elbowroom.capture(lambda: model(torch.zeros(2, 3, 64, 64)), model, optimizer)
    with pytest.raises(UsageError, match="the model is on"):
        elbowroom.capture(lambda: None, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), optimizer)


def test_only_elbowroom_says_that_a_step_cannot_be_captured(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch logs a traceback for what fails on fake tensors, though the step goes on without them."""
    log = logging.getLogger(FakeTensorMode.__module__)
    library = torch.library.Library("test_capture", "FRAGMENT")
    library.define("opaque(Tensor x) -> Tensor")

    def refuse(batch: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=log.error, args=("of another thread",))
        other.start()
        other.join()
        raise RuntimeError("it has no shapes")

    library.impl("opaque", refuse, "Meta")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        with pytest.raises(TraceError, match=r"RuntimeError: it has no shapes"):
            elbowroom.capture(lambda: torch.ops.test_capture.opaque(model(torch.ones(4))), model, optimizer)
    finally:
        library._destroy()
    assert [record.message for record in caplog.records if record.name == log.name] == ["of another thread"]
    log.error("later")
    assert caplog.messages[-1] == "later"


def test_a_trace_is_of_the_settled_step() -> None:
    """Not of the first one, in which the optimizer makes its state."""
    model, optimizer, step = MODELS["unet"]().make()
    before = capture_fake((model, optimizer, step))
    step(0)
    after = capture_fake((model, optimizer, step))
    assert dataclasses.replace(after, name=before.name) == before


def test_state_made_by_the_step_is_no_activation() -> None:
    """A buffer that the model itself replaces in each step."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.register_buffer("last", torch.zeros(256, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = functional.relu(self.layer(x))
            return self.last.square().mean()

    model = Remembers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model.last = model.last.detach()
        model(torch.ones(256, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = elbowroom.capture(step, model, optimizer)
    kept = [storage for storage in trace.storages if storage.nbytes == 256 * 64 * 4 and storage.role is Role.BUFFER]
    assert kept


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_that_is_mostly_state_is_planned_below_the_floor_of_its_activations(foreach: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    batch = torch.randn(128, 256)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    trace = elbowroom.capture(step, model, optimizer)
    costs = elbowroom.price(trace, load_shipped("rtx4090"))
    plain = pose(trace, costs, 1).plain
    weights = {home.id for home in trace.storages if home.nbytes == 256 * 256 * 4}
    assert weights >= trace.state and len(trace.state) == 8 * 4
    budget_bytes = plain.peak_bytes * 6 // 10
    with pytest.raises(Infeasible):
        elbowroom.plan(trace, costs, budget_bytes)
    if foreach:  # one op reads all of the optimizer's state
        with pytest.raises(Infeasible, match="_foreach"):
            elbowroom.plan(trace, costs, budget_bytes, manages="everything")
        return
    plan = elbowroom.plan(trace, costs, budget_bytes, manages="everything")
    elbowroom.check(trace, plan)
    forecast = elbowroom.simulate(trace, costs, plan)
    assert forecast.peak_bytes <= budget_bytes
    assert forecast.state_offloaded_bytes > forecast.offloaded_bytes // 2


@pytest.mark.parametrize(
    ("device", "is_first", "is_settled"), [("cuda", True, False), ("cuda", False, True), ("cpu", True, True)]
)
def test_op_times_of_a_first_step_on_a_card_do_not_count(device: str, is_first: bool, is_settled: bool) -> None:
    model, ledger = nn.Linear(2, 2), CpuLedger()
    optimizer = torch.optim.SGD(model.parameters())
    capture = LiveCapture("", torch.device(device), model, [optimizer], CpuMeter(ledger), is_first=is_first)
    assert capture.is_settled is is_settled
    ledger.close()
