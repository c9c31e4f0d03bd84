"""Programs whose ops over lists of one tensor run in slices, and that then do other things than plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elbowroom.errors import Infeasible, TierError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.runtime.sections import Sections
from elbowroom.runtime.spill_queue import SpillJob
from tests.state_jobs import StateJob, adamw, fit, list_tensors

SIDE = 512
NBYTES = SIDE * SIDE * 4


def make_model() -> nn.Module:
    model = nn.Module()
    for seed, name in enumerate(("first", "second")):
        tensor = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def run_in_slices(
    profile: HardwareProfile, model: nn.Module, run: Callable[[nn.Module], Any], budget_bytes: int
) -> Any:
    """Run a program in a step, in which some op over lists has to run in slices."""
    job = StateJob(model, [torch.optim.SGD(model.parameters(), lr=0.1)], lambda _: None)
    with fit(job, profile, budget_bytes) as room:
        try:
            with room.step():
                return run(model)
        finally:
            assert any("_foreach_" in key[0] for key in room._modes.sliced_ops._refusals)


def average(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_lerp_([model.first], [model.second], 0.25)


def test_an_op_over_lists_counts_as_a_write(profile: HardwareProfile) -> None:
    """The version of what it writes to is another one, as in plain PyTorch."""

    def run(model: nn.Module) -> int:
        before = model.first._version
        average(model)
        return model.first._version - before

    plain = run(make_model())
    assert plain == 1
    assert run_in_slices(profile, make_model(), run, 3 * NBYTES // 2) == plain


def test_a_backward_pass_through_what_an_op_over_lists_has_changed_is_refused(profile: HardwareProfile) -> None:
    """Not computed from the new contents."""

    def run(model: nn.Module) -> torch.Tensor:
        model.first.requires_grad_(False)
        batch = torch.ones(1, SIDE, requires_grad=True)
        result = batch @ model.first  # saves the weight
        average(model)
        result.sum().backward()
        return batch.grad

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(make_model())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_in_slices(profile, make_model(), run, 3 * NBYTES // 2)


def test_ops_over_lists_of_meta_tensors(profile: HardwareProfile) -> None:
    """They have the shapes of an op that has run in slices before."""

    def run(model: nn.Module) -> str:
        average(model)
        first, second = (torch.empty(SIDE, SIDE, device="meta") for _ in range(2))
        torch._foreach_lerp_([first], [second], 0.25)
        return first.device.type

    assert run_in_slices(profile, make_model(), run, 3 * NBYTES // 2) == "meta"


def test_complex_tensors_in_lists(profile: HardwareProfile) -> None:
    """Refused, or computed."""

    def run(model: nn.Module) -> torch.Tensor:
        first, second = (torch.view_as_complex(each.detach().view(-1, 2)) for each in model.parameters())
        return torch._foreach_mul([first], [second])[0]

    expected = run(make_model())
    model = make_model()
    job = StateJob(model, [torch.optim.SGD(model.parameters(), lr=0.1)], lambda _: None)
    with fit(job, profile, 3 * NBYTES // 2) as room:
        try:
            with room.step():
                found = run(model)
        except Infeasible:
            return
        assert torch.equal(found, expected)


class BrokenSpill:
    """A disk that fails."""

    def __init__(self, spill: Any) -> None:
        self._spill = spill

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spill, name)

    def fail(self, *_: Any) -> None:
        raise OSError(5, "broken")

    read = write = fail


@pytest.mark.parametrize("is_out", [True, False])
@pytest.mark.parametrize("share", [1.6, 2.4, 3.2])
def test_a_failing_disk_leaves_a_fused_update_whole(
    share: float, is_out: bool, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one op updates is all old or all new, also if a part of it is in memory when the op begins."""

    def make() -> StateJob:
        parameter = nn.Parameter(torch.randn(SIDE * SIDE, generator=torch.Generator().manual_seed(0)))
        model = nn.ParameterList([parameter])
        optimizer = adamw(model.parameters(), fused=True)

        def step(index: int) -> None:
            parameter.grad = torch.randn(SIDE * SIDE, generator=torch.Generator().manual_seed(index + 1))
            optimizer.step()
            optimizer.zero_grad()

        return StateJob(model, [optimizer], step)

    twin = make()
    states = []
    for index in range(3):
        twin.step(index)
        states.append(list_tensors(twin))
    names = [name for name in states[0] if not name.endswith("step")]
    assert len(names) == 3
    run = SpillJob.run
    torn = []
    for failing in (3, 20):
        job = make()
        with fit(job, profile, int(share * NBYTES)) as room:
            for index in range(2):
                with room.step():
                    job.step(index)
            left = [failing]

            def fail(self: Any, spill: Any, left: list[int] = left) -> None:
                left[0] -= self.is_out is is_out
                run(self, BrokenSpill(spill) if left[0] == -1 and self.is_out is is_out else spill)

            with monkeypatch.context() as patch:
                patch.setattr(SpillJob, "run", fail)
                with pytest.raises((TierError, Infeasible)), room.step():
                    job.step(2)
            assert room.metrics()["sliced_ops"] > 0
            job.model[0].grad = None
            found = list_tensors(job)
        is_old, is_new = (all(torch.equal(found[name], state[name]) for name in names) for state in states[1:])
        if not is_old and not is_new:
            torn.append(failing)
    assert not torn


def test_an_update_that_is_half_written_is_told(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier below has no room for second copies, and fails at the second slice."""
    write, written = Sections.write, []

    def fail(self: Any, *args: Any) -> Any:
        written.append(args)
        if len(written) == 2:
            raise TierError("broken")
        return write(self, *args)

    monkeypatch.setattr(Sections, "begin_rewriting", lambda *_: None)
    monkeypatch.setattr(Sections, "write", fail)
    with pytest.raises(TierError) as caught:
        run_in_slices(profile, make_model(), average, 3 * NBYTES // 2)
    assert "_foreach_lerp_.Scalar had begun to write" in caught.value.__notes__[0]


@pytest.mark.parametrize("make", [functools.partial(torch.optim.AdamW, amsgrad=True), torch.optim.Adamax])
def test_foreach_optimizers_with_a_maximum(make: Callable[..., Any], profile: HardwareProfile) -> None:
    """`_foreach_maximum_` of two tensors, which do not fit together."""
    model = nn.ParameterList([torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))])
    twin = nn.ParameterList([model[0].detach().clone()])
    optimizer, other = make(model.parameters(), foreach=True), make(twin.parameters(), foreach=True)

    def step(model: nn.ParameterList, optimizer: Any) -> None:
        model[0].grad = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(twin, other)
    job = StateJob(model, [optimizer], lambda _: None)
    with fit(job, profile, 8 * NBYTES // 5) as room:
        for _ in range(2):
            with room.step():
                step(model, optimizer)
    assert torch.equal(model[0], twin[0])


@pytest.mark.parametrize("shape", [(515, 511), (67, 63, 9, 7)], ids=str)
@pytest.mark.parametrize("is_fused", [False, True])
def test_odd_sizes(shape: tuple[int, ...], is_fused: bool, profile: HardwareProfile) -> None:
    """What foreach updates train within a budget, fused ones do, too."""

    def make() -> StateJob:
        model = nn.ParameterList([torch.randn(shape, generator=torch.Generator().manual_seed(0))])
        optimizer = adamw(model.parameters(), foreach=not is_fused, fused=is_fused)

        def step(index: int) -> None:
            model[0].grad = torch.randn(shape, generator=torch.Generator().manual_seed(index + 1))
            optimizer.step()
            optimizer.zero_grad()

        return StateJob(model, [optimizer], step)

    twin, job = make(), make()
    for index in range(2):
        twin.step(index)
    with fit(job, profile, 13 * NBYTES // 10) as room:
        for index in range(2):
            with room.step():
                job.step(index)
        assert room.metrics()["sliced_ops"] > 0
        assert torch.equal(job.model[0], twin.model[0])
