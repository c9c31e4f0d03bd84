"""Unchanged training loops within a budget: the step is found from the optimizer, and results stay the same."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import gc
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import elbowroom
from elbowroom.cli.main import make_app
from elbowroom.cli.step_files import load_run_step
from elbowroom.errors import Infeasible, UsageError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Journal, Mode
from elbowroom.scripts.exit_codes import find_cause
from elbowroom.scripts.journal_file import JournalFile
from elbowroom.scripts.live_view import LiveView
from elbowroom.scripts.managed_program import LAUNCHED, ManagedProgram
from elbowroom.scripts.request import names_script, read_request
from elbowroom.units import format_bytes

WIDTH, ROWS = 64, 1024
BUDGET = 3 << 20
OPTIONS: dict[str, Any] = {"strategy": "offload_all", "op_time_store": False}
Outcome = tuple[list[str], bytes]


def make_net(layers: int = 5) -> nn.Sequential:
    return nn.Sequential(
        *(layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)))
    )


def make_batches(count: int = 5) -> Iterator[torch.Tensor]:
    return (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index)) for index in range(count))


def show(loss: torch.Tensor) -> str:
    return float(loss.detach()).hex()


def finish(losses: list[str], *modules: nn.Module) -> Outcome:
    return losses, b"".join(each.detach().numpy().tobytes() for one in modules for each in one.parameters())


# -- loops that know nothing of Elbowroom -----------------------------------------------------------------------------


def train_plainly() -> Outcome:
    """Gradients are cleared first; the model is evaluated after each step, and a copy of it averaged."""
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    average = torch.optim.swa_utils.AveragedModel(net)
    losses = []
    for batch in make_batches():
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(net)
        net.eval()
        with torch.no_grad():
            losses += [show(loss), show(net(batch).mean()), show(average(batch).mean())]
        net.train()
    return finish(losses, net, average)


def train_with_accumulation() -> Outcome:
    """Two batches an update, with autocast, a scheduler and clipping."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    losses = []
    for index, batch in enumerate(make_batches(10)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(batch).float().square().mean() / 2
        loss.backward()
        losses.append(show(loss))
        if index % 2:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return finish(losses, net)


def train_with_scaler() -> Outcome:
    """The scaler skips the first update, as its gradients overflow."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)
    losses = []
    for batch in make_batches():
        loss = net(batch).square().mean() * 8
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(show(loss))
    return finish(losses, net)


def train_gan(updates_of_judge: int = 1) -> Outcome:
    """Two models with an optimizer each."""
    maker, judge = make_net(3), make_net(3)
    ours = torch.optim.Adam(maker.parameters(), lr=1e-3)
    its = torch.optim.Adam(judge.parameters(), lr=1e-3)
    losses = []
    for batch in make_batches():
        for _ in range(updates_of_judge):
            made = maker(batch)
            its.zero_grad()
            loss = judge(made.detach()).mean() - judge(batch).mean()
            loss.backward()
            its.step()
            losses.append(show(loss))
        ours.zero_grad()
        loss = -judge(made).mean()
        loss.backward()
        ours.step()
        losses.append(show(loss))
    return finish(losses, maker, judge)


def train_wgan() -> Outcome:
    """One model is updated twice as often as the other."""
    return train_gan(updates_of_judge=2)


def train_by_closure() -> Outcome:
    """The optimizer calls forward and backward itself."""
    net = make_net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)
    losses = []
    for batch in make_batches():

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(batch).square().mean()
            loss.backward()
            losses.append(show(loss))
            return loss

        optimizer.step(closure)
    return finish(losses, net)


def train_in_evaluation_mode() -> Outcome:
    """Fine-tuning without dropout."""
    net = make_net().eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for batch in make_batches():
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(show(loss))
    return finish(losses, net)


class Coder(nn.Module):
    """Its `forward` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = make_net(3), make_net(3)

    def measure(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.decoder(self.encoder(batch)) - batch).square().mean()


def train_by_method() -> Outcome:
    model = Coder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for batch in make_batches():
        loss = model.measure(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(show(loss))
    return finish(losses, model)


def train_parts() -> Outcome:
    """Two modules that no third one owns, and a parameter of no module, in one optimizer."""
    encoder, decoder = make_net(3), make_net(3)
    scale = nn.Parameter(torch.ones(WIDTH))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters(), scale], lr=1e-3)
    losses = []
    for batch in make_batches():
        loss = (decoder(encoder(batch) * scale) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(show(loss))
    return finish(losses, encoder, decoder, nn.ParameterList([scale]))


def train_in_backward() -> Outcome:
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""
    net = make_net()
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in net.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for each in net.parameters():
        each.register_post_accumulate_grad_hook(update)
    losses = []
    for batch in make_batches():
        loss = net(batch).square().mean()
        loss.backward()
        losses.append(show(loss))
    return finish(losses, net)


def train_without_optimizer() -> Outcome:
    net = make_net()
    losses = []
    for batch in make_batches(6):
        net.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        for each in net.parameters():
            each.data.add_(each.grad, alpha=-0.1)
        losses.append(show(loss))
    return finish(losses, net)


def train_compiled() -> Outcome:
    net = make_net()
    compiled = torch.compile(net, backend="aot_eager")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    losses = []
    for batch in make_batches():
        loss = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(show(loss))
    return finish(losses, net)


def train_compiled_in_place() -> Outcome:
    """Evaluated first, and compiled by `Module.compile`. The same graphs are compiled as without us."""
    net = make_net()
    net.compile(backend="aot_eager")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    losses = []
    for batch in make_batches():
        with torch.no_grad():
            losses.append(show(net.eval()(batch).mean()))
        loss = net.train()(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(show(loss))
    losses.append(str(torch._dynamo.utils.counters["stats"]))
    return finish(losses, net)


def train_compiled_function() -> Outcome:
    """The function calls the model. Its graph is not split, or `fullgraph` would refuse it."""
    net = make_net()
    bare = nn.Linear.__new__(nn.Linear)  # not initialized: it has no parameters to look at
    compute_loss = torch.compile(lambda batch: net(batch).square().mean(), backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    losses = []
    for batch in make_batches():
        net.eval()
        with torch.no_grad():
            losses.append(show(compute_loss(batch)))
        net.train()
        loss = compute_loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(show(loss))
    del bare
    losses.append(str(torch._dynamo.utils.counters["stats"]))
    return finish(losses, net)


def train_twice() -> Outcome:
    """Two models one after the other, as in cross-validation; the second phase makes its optimizer in two steps."""
    first = train_with_accumulation()
    second = train_plainly()
    return first[0] + second[0], first[1] + second[1]


class Failure(Exception):
    pass


def fail(*_: object) -> None:
    raise Failure


def train_again_after(place: str) -> Outcome:
    """The third step fails at a place. The program catches that, and trains another model."""
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    with contextlib.suppress(Failure, Infeasible, RuntimeError):
        for index, batch in enumerate(make_batches()):
            if index == 2 and place == "call":
                net[-1].register_forward_pre_hook(fail)
            loss = net(batch).square().mean()
            if index == 2 and place == "script":
                fail()
            if index == 2 and place == "memory":
                torch.empty(1 << 40, dtype=torch.uint8)
            if index == 2 and place == "backward":
                loss.register_hook(fail)
            loss.backward()
            if index == 2 and place == "update":
                optimizer.register_step_pre_hook(fail)
            optimizer.step()
            optimizer.zero_grad()
    del net, optimizer, loss
    return train_plainly()


def train_with_another_optimizer() -> Outcome:
    """The program gives up the third step, and goes on with a new optimizer of the model."""
    net = make_net()
    losses = []
    for lr in (1e-3, 1e-4):
        optimizer = torch.optim.Adam(net.parameters(), lr=lr)
        for index, batch in enumerate(make_batches()):
            loss = net(batch).square().mean()
            loss.backward()
            if index == 2 and lr == 1e-3:
                break
            optimizer.step()
            optimizer.zero_grad()
            losses.append(show(loss))
    return finish(losses, net)


def train_with_inner_loops() -> Outcome:
    """Each step trains a copy of the model first."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for batch in make_batches():
        loss = net(batch).square().mean()
        inner = copy.deepcopy(net)
        inner_optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(2):
            inner(batch).square().mean().backward()
            inner_optimizer.step()
        (loss + inner(batch).square().mean()).backward()
        for one, other in zip(net.parameters(), inner.parameters(), strict=True):
            assert one.grad is not None
            one.grad += other.grad
        optimizer.step()
        optimizer.zero_grad()
        losses.append(show(loss))
    return finish(losses, net)


def train_and_probe() -> Outcome:
    """After each epoch the program trains another model by an optimizer of its own, and then goes on with the first."""
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        for batch in make_batches(3):
            loss = net(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(show(loss))
        probe = make_net(2)
        probing = torch.optim.Adam(probe.parameters(), lr=1e-3)
        for batch in make_batches(4):
            loss = probe(net(batch).detach()).square().mean()
            loss.backward()
            probing.step()
            probing.zero_grad()
            losses.append(show(loss))
    return finish(losses, net, probe)


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer, whose parameters and state it shows."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.inner, self.defaults, self.state = inner, inner.defaults, inner.state
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def train_with_wrapper() -> Outcome:
    """The program steps a wrapper that has not been made as optimizers are."""
    net = make_net()
    optimizer = Wrapper(torch.optim.Adam(net.parameters(), lr=1e-3))
    losses = []
    for batch in make_batches(6):
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(show(loss))
    return finish(losses, net)


@dataclasses.dataclass(frozen=True)
class Expected:
    """How a loop is expected to run: number of recorded steps in its last room, rooms, and their budget."""

    loop: Callable[..., Outcome]
    steps: int = 5
    rooms: int = 1
    budget: int = BUDGET
    place: str = ""

    @property
    def name(self) -> str:
        return f"{self.loop.__name__} {self.place}".rstrip()

    def run(self) -> Outcome:
        return self.loop(self.place) if self.place else self.loop()


LOOPS = (
    Expected(train_plainly),
    Expected(train_with_accumulation),
    Expected(train_with_scaler, steps=4),  # a skipped update belongs to the next step
    Expected(train_gan),
    Expected(train_wgan, steps=14),  # the first step has two updates, as it is not known yet that they are not in turn
    Expected(train_by_closure),
    Expected(train_in_evaluation_mode, steps=4),  # the first step is noticed at its end
    Expected(train_by_method),
    Expected(train_parts),
    Expected(train_in_backward),
    Expected(train_without_optimizer),  # of six
    Expected(train_compiled, budget=6 << 20),
    Expected(train_compiled_in_place, budget=6 << 20),
    Expected(train_compiled_function, budget=6 << 20),
    Expected(train_twice, rooms=2),
    *(
        Expected(train_again_after, rooms=2, place=place)
        for place in ("call", "script", "memory", "backward", "update")
    ),
    Expected(train_with_another_optimizer, rooms=2),
    Expected(train_with_inner_loops, budget=3 * BUDGET),
    Expected(train_and_probe, rooms=4, steps=4),
    Expected(train_with_wrapper, rooms=2),  # it is noticed at its second step
)


@contextlib.contextmanager
def managing(profile: HardwareProfile, budget: int = BUDGET, **options: Any) -> Iterator[ManagedProgram]:
    program = ManagedProgram(str(budget), dict(OPTIONS), profile=profile, **options)
    program.open()
    try:
        yield program
    except BaseException as error:
        program.close(error)
        raise
    program.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("expected", LOOPS, ids=lambda each: each.name)
def test_loops(expected: Expected, profile: HardwareProfile) -> None:
    patched = (nn.Module.__call__, torch.Tensor.backward, torch.optim.Optimizer.__init__)
    torch.manual_seed(0)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    plain = expected.run()
    torch.manual_seed(0)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with managing(profile, expected.budget) as program:
        assert expected.run() == plain
        assert program.room is not None
    assert (nn.Module.__call__, torch.Tensor.backward, torch.optim.Optimizer.__init__) == patched
    journal = program.room.journal()
    assert program.rooms == expected.rooms
    assert len(journal.steps) == expected.steps, [step.mode for step in journal.steps]
    assert 0 < (journal.peak_bytes or 0) <= expected.budget
    assert all(step.offloaded_bytes + step.recomputed for step in journal.steps if step.mode is Mode.PLANNED)


def test_steps_of_a_gan_are_whole(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both updates are in one step, which is planned: no graph lives beyond its step."""
    monkeypatch.setattr("elbowroom.plan_cache.GAIN", 1e9)  # planned at once, however long planning takes
    with managing(profile) as program:
        train_gan()
        assert program.room is not None
        assert [step.mode for step in program.room.journal().steps][-1] is Mode.PLANNED
        assert all(step.saves == step.needs for step in program.room.journal().steps)


def test_other_modules_count(profile: HardwareProfile) -> None:
    """A frozen module from before the first step is in memory, too."""
    peaks = []
    for width in (8, 512):
        teacher = nn.Linear(width, width, bias=False)
        gc.collect()
        torch.manual_seed(0)
        with managing(profile, 1 << 30) as program:
            train_with_accumulation()
        assert program.room is not None
        peaks.append((program.room.journal().steps[0].peak_bytes or 0) - teacher.weight.nbytes)
        del program  # it holds the model
    assert peaks[0] == peaks[1]


def train_with_teacher(teacher: nn.Module) -> Outcome:
    torch.manual_seed(0)
    net = make_net(2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for index in range(5):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(index))
        with torch.no_grad():
            wanted = teacher(batch)
        loss = (net(batch) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(show(loss))
    return finish(losses, net)


@pytest.mark.parametrize(
    "script", [lambda each: each, torch.jit.script, lambda each: torch.jit.freeze(torch.jit.script(each))]
)
def test_a_frozen_teacher_leaves(script: Callable[[nn.Module], nn.Module], profile: HardwareProfile) -> None:
    """Nobody has told us of it."""
    torch.manual_seed(1)
    teacher = nn.Sequential(*(nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(8)), nn.Linear(4 * WIDTH, WIDTH))
    teacher = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), *teacher).requires_grad_(False).eval()
    budget_bytes = sum(each.nbytes for each in teacher.parameters()) // 2
    teacher = script(teacher)  # type: ignore[assignment]
    expected = train_with_teacher(teacher)
    with managing(profile, budget_bytes) as program:
        assert train_with_teacher(teacher) == expected
        assert program.room is not None
        assert max(step.peak_bytes or 0 for step in program.room.journal().steps) <= budget_bytes
    del program


def test_what_a_former_job_has_left_counts(profile: HardwareProfile) -> None:
    """Copies of the weights that the program kept while it trained with another optimizer."""
    net = make_net()
    parameters = list(net.parameters())
    kept: list[dict[str, torch.Tensor]] = []
    with managing(profile) as program:
        for lr in (1e-3, 1e-4):
            optimizer = torch.optim.Adam(parameters, lr=lr)
            for batch in make_batches(3):
                net(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            kept = kept or [copy.deepcopy(net.state_dict()) for _ in range(4)]
        assert program.rooms == 2 and program.room is not None
        kept_bytes = sum(each.nbytes for one in kept for each in one.values())
        state_bytes = 3 * sum(each.nbytes for each in parameters) + 4 * len(parameters)  # with steps of Adam
        room = program.room
        live_bytes = room._ledger.live_bytes + room._pager.count_away()
        assert state_bytes + kept_bytes <= live_bytes <= state_bytes + kept_bytes + 2 * batch.nbytes
        kept.clear()
        assert room._ledger.live_bytes + room._pager.count_away() == live_bytes - kept_bytes


def test_a_former_model_is_no_part_of_the_next_job(profile: HardwareProfile) -> None:
    """Cross-validation, for example. A cycle keeps the model until the collector runs."""

    def train() -> weakref.ref[nn.Module]:
        net = make_net()
        net.me = [net]  # type: ignore[assignment]
        optimizer = torch.optim.AdamW(net.parameters())
        for batch in make_batches(2):
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weakref.ref(net)

    with managing(profile) as program:
        gc.disable()
        try:
            former, latter = train(), train()
        finally:
            gc.enable()
        assert former() is None and latter() is not None
        assert program.rooms == 2
    del program


def test_a_budget_that_cannot_hold(profile: HardwareProfile) -> None:
    """The error names the module, also if the script wraps it."""
    with pytest.raises(Infeasible, match="needed at once") as caught, managing(profile, 1 << 16):
        train_plainly()
    wrapped = RuntimeError("the trainer failed")
    wrapped.__cause__ = caught.value
    assert find_cause(wrapped) is caught.value
    assert find_cause(ValueError()) is None


def test_ranks_that_the_script_starts(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Lightning does for several devices: they train without a budget."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    with managing(profile, BUDGET) as program:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        program._check_ranks()
        monkeypatch.undo()
    assert "this is one of 2 ranks" in caplog.text


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_script_that_goes_on_after_an_error_is_not_trained_without_a_budget(
    has_optimizer: bool, profile: HardwareProfile, tmp_path: pathlib.Path
) -> None:
    """As loops do that skip a batch that fails."""
    folder = tmp_path / "missing"
    program = ManagedProgram(str(BUDGET), {**OPTIONS, "spill_folder": str(folder)}, profile=profile)
    program.open()
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if has_optimizer else None
    try:
        for index, batch in enumerate(make_batches(4)):
            if index == 2:
                assert program.room is None
                folder.mkdir()
            with pytest.raises(UsageError, match="missing") if index < 2 else contextlib.nullcontext():
                net(batch).square().mean().backward()
                if optimizer is not None:
                    optimizer.step()
        assert program.room is not None
    finally:
        program.close()


def test_trainings_in_two_threads_at_once(profile: HardwareProfile) -> None:
    """Each has its results, or is told why it cannot train."""
    begin = threading.Barrier(2)
    found: dict[int, bytes | UsageError] = {}

    def train(number: int, *, alone: bool) -> None:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        for each in net.parameters():
            nn.init.normal_(each, std=0.1, generator=torch.Generator().manual_seed(number))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        try:
            for index, batch in enumerate(make_batches()):
                if index < 2 and not alone:
                    with contextlib.suppress(threading.BrokenBarrierError):
                        begin.wait()
                net(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found[number] = finish([], net)[1]
        except UsageError as error:
            found[number] = error
            begin.abort()

    for number in (1, 2):
        train(number, alone=True)
    plain = dict(found)
    found.clear()
    with managing(profile, 4 * BUDGET):
        threads = [threading.Thread(target=train, args=(number,), kwargs={"alone": False}) for number in (1, 2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    refused = [each for each in found.values() if isinstance(each, UsageError)]
    assert len(found) == 2 and len(refused) <= 1
    assert all("trains while a training step of thread" in str(each) for each in refused)
    assert all(found[number] in (plain[number], *refused) for number in (1, 2))


def test_a_step_that_a_living_thread_has_left_open(profile: HardwareProfile) -> None:
    """It does not keep the program from ending."""

    def train() -> None:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in make_batches(3):
            net(batch).square().mean().backward()
            optimizer.step()
        net(batch)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        with managing(profile) as program:
            threads.submit(train).result()
            room = program.room
        assert room is not None and len(room.journal().steps) >= 3


def test_a_script_with_rooms_of_its_own(profile: HardwareProfile) -> None:
    with managing(profile) as program:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with elbowroom.fit(net, optimizer, BUDGET, profile=profile, **OPTIONS) as room:
            for batch in make_batches(2):
                with room.step():
                    net(batch).sum().backward()
                    optimizer.step()
        assert program.rooms == 0
        assert program.has_own_rooms


def test_the_journal_survives(profile: HardwareProfile, tmp_path: pathlib.Path) -> None:
    """A file exists from the first step on, has all steps after an exception, and one for each room."""
    path = tmp_path / "run.json"

    def fail_in_the_fourth_step() -> None:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for index, batch in enumerate(make_batches()):
            loss = net(batch).square().mean()
            if index == 3:
                raise ZeroDivisionError
            loss.backward()
            optimizer.step()
            assert elbowroom.load(Journal, path).steps[0].step == 0

    with pytest.raises(ZeroDivisionError), managing(profile, journal_file=JournalFile(path)):
        fail_in_the_fourth_step()
    assert len(elbowroom.load(Journal, path).steps) == 3
    assert (found := load_run_step(path)) is not None and found.budget_bytes == BUDGET
    with managing(profile, journal_file=JournalFile(path, {"WORLD_SIZE": "2", "RANK": "1"})):
        train_twice()
    assert {each.name for each in tmp_path.iterdir()} == {"run.json", "run.rank1.json", "run.rank1.2.json"}
    with pytest.raises(UsageError, match="not a folder"):
        JournalFile(tmp_path / "missing" / "run.json")


def test_a_forked_process_has_its_own_journal(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = JournalFile(tmp_path / "run.json", {"WORLD_SIZE": "2", "RANK": "1"})
    file.begin_room()
    assert file.path.name == "run.rank1.json"
    monkeypatch.setattr(os, "getpid", lambda: 7)
    assert file.path.name == "run.rank1.pid7.json"


def test_many_models_one_after_the_other(profile: HardwareProfile, caplog: pytest.LogCaptureFixture) -> None:
    """Each is freed when the program makes the next one, and a warning says that each is learned anew."""
    models: list[weakref.ref[nn.Module]] = []
    with managing(profile) as program:
        for _ in range(4):
            net = make_net(1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            gc.collect()
            assert [each() for each in models if each() is not None] == []
            models.append(weakref.ref(net))
            net(next(make_batches())).sum().backward()
            optimizer.step()
        assert program.rooms == 4
    assert "call elbowroom.fit in the program instead" in caplog.text


def test_the_live_view(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the figures of `Room.metrics`; what the script prints still goes to its own stdout."""
    monkeypatch.setattr("elbowroom.scripts.live_view.SECONDS_BETWEEN_DRAWINGS", 0.0)
    drawn = io.StringIO()
    with managing(profile, view=LiveView(Console(file=drawn, force_terminal=True, width=100))) as program:
        train_plainly()
        print("of the script")
        assert program.room is not None
        peak = format_bytes(int(program.room.metrics()["max_peak_bytes"]))
    assert capsys.readouterr().out == "of the script\n"
    last = drawn.getvalue().rpartition("Elbowroom: ")[2]
    assert last.startswith("step 4 (planned)")
    for words in (f"peak {peak} of 3.0 MiB", "activations, other", "optimizer state", "waiting for transfers"):
        assert words in last
    silent = io.StringIO()
    with managing(profile, view=LiveView(Console(file=silent, force_terminal=False))):
        train_plainly()
    assert silent.getvalue() == ""


# -- the command line -------------------------------------------------------------------------------------------------


def test_requests(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    budget = {"ELBOWROOM_MEMORY_BUDGET": "2GiB"}

    def read(*arguments: str, environment: dict[str, str] | None = None) -> Any:
        return read_request(arguments, program="run", environment=environment or {})

    given = ("--memory-budget", "1GiB", "--no-view", "-o", "j.json", "--manages=activations", str(script), "--lr", "3")
    with pytest.warns(FutureWarning, match="ELBOWROOM_BUDGET is now ELBOWROOM_MEMORY_BUDGET"):
        assert read(str(script), environment={"ELBOWROOM_BUDGET": "shared"}).memory_budget == "shared"
    request = read(*given, environment=budget)
    assert request.arguments == ("--lr", "3")
    assert (request.memory_budget, request.shows_view, request.options) == ("1GiB", False, {"manages": "activations"})
    assert request.output == pathlib.Path("j.json")
    assert read(str(script), "--", "-o", environment=budget).arguments == ("-o",)
    assert read(str(script), "--", "--", environment=budget).arguments == ("--",)
    assert read("--no-view", "--", str(script), "3", environment=budget).arguments == ("3",)
    module = read("-m", "package.train", "-m", "x", environment={**budget, "ELBOWROOM_VIEW": "0"})
    assert (module.target, module.is_module, module.arguments) == ("package.train", True, ("-m", "x"))
    assert (module.memory_budget, module.shows_view) == ("2GiB", False)

    for arguments, words in (
        ((str(script),), "no budget is given"),
        (("--memory-budget", "1GiB"), "no script is given"),
        (("--memory-budget", "1GiB", "missing.py"), "there is no script missing.py"),
        (("--memory-budget", "1GiB", "--lr", "3", str(script)), "--lr"),
        (("--memory-budget",), "--memory-budget"),
    ):
        with pytest.raises(UsageError, match=words):
            read(*arguments)


def test_scripts_and_workloads_share_a_command() -> None:
    assert names_script(["--budget", "1GiB", "train.py", "--steps", "3"])
    assert names_script(["-m", "package.train"])
    assert not names_script(["torchvision:resnet18", "--budget", "1GiB"])
    assert not names_script(["--budget", "1GiB", "torchvision:resnet18"])
    assert names_script(["--budget", "1GiB", "--", "x.py"])
    assert names_script(["--batch", "8", "x.py"])  # which refuses the options of workloads
    assert not names_script(["--help"])
    assert names_script(["--budget", "1GiB", __file__.removesuffix("cpu/test_scripts.py")])  # a folder


SCRIPT = """
    import dataclasses, json, os, pickle, signal, sys
    import torch
    import neighbour

    @dataclasses.dataclass
    class Options:
        ending: str = sys.argv[1]

    assert pickle.loads(pickle.dumps(Options())) == Options()
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for index in range(3):
        loss = net(torch.randn(1024, 64)).square().mean()
        loss.backward()
        optimizer.step()
    print(json.dumps([__name__, os.path.basename(__file__), sys.argv[1:], neighbour.__name__]))
    if Options().ending == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if Options().ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if Options().ending == "fail":
        raise ZeroDivisionError("in the script")
    sys.exit(int(Options().ending))
"""


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "neighbour.py").touch()
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch, profile: HardwareProfile) -> Iterator[None]:
    """A process that has run a script goes on as before; the machine is not measured.

    Ctrl-C raises KeyboardInterrupt, also where the tests run in the background of a shell, which has it ignored.
    """
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("elbowroom.hardware.profile_store.probe", lambda *_, **__: profile)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [("0", 0, ""), ("7", 7, ""), ("interrupt", 130, "Keyboard"), ("fail", 1, "in the script")],
)
def test_exit_codes_of_scripts(
    script: pathlib.Path, tmp_path: pathlib.Path, ending: str, code: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script's own code passes through, and the journal is kept however it ends."""
    journal = tmp_path / "run.json"
    arguments = ["run", "--memory-budget", "4MiB", "-o", str(journal), str(script), ending, "--lr", "3"]
    result = CliRunner().invoke(make_app(), arguments)
    assert result.exit_code == code, result.output
    assert json.loads(result.stdout.splitlines()[0]) == ["__main__", "train.py", [ending, "--lr", "3"], "neighbour"]
    assert len(elbowroom.load(Journal, journal).steps) == 3
    assert words in result.stderr
    assert "scripts/script.py" not in result.stderr  # a traceback begins in the script


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--strategy", "none", "no strategy is called 'none'"),
        ("--policy", "none", "no policy is called 'none'"),
        ("--spill-folder", "missing", "cannot spill to missing"),
        ("--output", ".", "it is a folder"),
        ("--lr", "3", "unrecognized arguments: --lr"),
    ],
)
def test_a_script_does_not_begin_with_a_bad_option(script: pathlib.Path, option: str, value: str, words: str) -> None:
    result = CliRunner().invoke(make_app(), ["run", "--memory-budget", "4MiB", option, value, str(script), "0"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


@pytest.mark.usefixtures("restored")
def test_a_budget_that_cannot_hold_has_its_own_exit_code(script: pathlib.Path) -> None:
    result = CliRunner().invoke(make_app(), ["run", "--memory-budget", "64KiB", str(script), "0"])
    assert result.exit_code == 3
    assert "needed at once" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("restored")
def test_a_script_that_does_not_train(script: pathlib.Path) -> None:
    script.write_text("print('nothing')")
    result = CliRunner().invoke(make_app(), ["run", "--memory-budget", "1GiB", str(script)])
    assert (result.exit_code, result.stdout) == (0, "nothing\n")
    assert "no training step was found" in result.stderr
    script.write_text("print(")
    result = CliRunner().invoke(make_app(), ["run", "--memory-budget", "1GiB", str(script)])
    assert result.exit_code == 2
    assert "is not a Python file" in result.stderr
    for code, is_told in (("", True), ("2", False)):  # an option that the script does not know ends it with 2
        script.write_text(f"import sys; sys.exit({code})")
        result = CliRunner().invoke(make_app(), ["run", "--memory-budget", "1GiB", str(script)])
        assert result.exit_code == int(code or 0)
        assert ("no training step was found" in result.stderr) == is_told


@pytest.mark.usefixtures("restored")
def test_threads_that_outlive_the_script_train_within_the_budget(tmp_path: pathlib.Path) -> None:
    script, journal = tmp_path / "train", tmp_path / "run.json"
    lines = textwrap.dedent(SCRIPT).split("for index", 1)
    loop = textwrap.indent("for index" + lines[1].split("print(", 1)[0], "    ")
    (tmp_path / "neighbour.py").touch()
    script.write_text(
        f"{lines[0]}\nimport concurrent.futures, threading, time\ndef train():\n    time.sleep(0.1)\n{loop}\n"
        "idle = concurrent.futures.ThreadPoolExecutor(1)\nidle.submit(int).result()\n"
        "threading.Thread(target=train).start()\n"
    )
    result = CliRunner().invoke(make_app(), ["run", "--memory-budget", "4MiB", "-o", str(journal), str(script), "0"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(elbowroom.load(Journal, journal).steps) == 3


def test_a_killed_process_leaves_its_journal(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """As a module of its own, as `torchrun -m` starts it; the budget comes from the environment."""
    journal = tmp_path / "run.json"
    environment = {
        **os.environ, "ELBOWROOM_MEMORY_BUDGET": "4MiB", "WORLD_SIZE": "2", "RANK": "1",
        "PYTHONPATH": str(pathlib.Path(elbowroom.__file__).parents[1]),
    }  # fmt: skip
    command = [sys.executable, "-m", "elbowroom.run", "-o", str(journal), "-m", "train", "kill", "--", "x"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    assert json.loads(done.stdout) == ["__main__", "train.py", ["kill", "--", "x"], "neighbour"]
    assert len(elbowroom.load(Journal, tmp_path / "run.rank1.json").steps) >= 1
