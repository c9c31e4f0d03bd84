"""Ops that have no room as a whole run in slices: the bits of plain training, within the budget."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import elbowroom
from elbowroom.errors import Infeasible, TierError, TierFull
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.runtime.sections import Sections, find_extents
from elbowroom.runtime.slice_choice import SliceChooser
from elbowroom.runtime.spill_queue import SpillJob
from elbowroom.slicing.bounds import find_packed_strides
from elbowroom.slicing.registry import list_rules
from tests.state_jobs import MIN_BYTES, StateJob, adamw, assert_same, list_tensors, run_plain, run_within
from tests.system_limit import fill_memory, limited_data

pytestmark = pytest.mark.usefixtures("two_threads")

STEPS = 3


def make_job(
    make_model: Callable[[], nn.Module],
    shape: tuple[int, ...],
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9
    ),
    *,
    classes: int = 0,
) -> StateJob:
    torch.manual_seed(3)
    model = make_model()
    optimizer = make_optimizer(model.parameters())

    def step(index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        if classes:
            batch = torch.randint(0, classes, shape, generator=generator)
            loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        else:
            loss = model(torch.randn(shape, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return StateJob(model, [optimizer], step)


def make_vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def make_resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.SiLU(), nn.AvgPool2d(2),
    )  # fmt: skip


class InLessPrecision(nn.Sequential):
    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def make_resnet_of_groups() -> nn.Module:
    return InLessPrecision(
        nn.Conv2d(3, 64, 1), nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 1), nn.GroupNorm(8, 64), nn.AvgPool2d(4)
    )


def make_wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 2048), nn.Tanh(), nn.Linear(2048, 256))


class LanguageModel(nn.Module):
    def __init__(self, classes: int = 4096, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.norm(self.embedding(tokens)))


JOBS: dict[str, tuple[Callable[[], StateJob], int]] = {
    "convolutions": (lambda: make_job(make_vgg, (8, 3, 44, 44)), 11_000_000),
    "batch norm": (lambda: make_job(make_resnet, (8, 3, 44, 44)), 11_000_000),
    "group norm under autocast": (lambda: make_job(make_resnet_of_groups, (8, 3, 32, 32)), 3_100_000),
    "weights": (lambda: make_job(make_wide, (16, 256)), 2 << 20),
    "weights, AdamW": (lambda: make_job(make_wide, (16, 256), adamw), 3 << 20),
    "weights, foreach AdamW": (lambda: make_job(make_wide, (16, 256), functools.partial(adamw, foreach=True)), 3 << 20),
    "weights, fused AdamW": (lambda: make_job(make_wide, (16, 256), functools.partial(adamw, fused=True)), 3 << 20),
    "logits": (lambda: make_job(LanguageModel, (8, 65), classes=4096), 6 << 20),
    # With AVX-512, slices of few rows of the head's gradient agree with a smaller product, and not with this one.
    "many logits": (lambda: make_job(lambda: LanguageModel(8192, 64), (8, 129), classes=8192), 24 << 20),
}
"""Jobs, and budgets below the working set of their largest op."""


@pytest.mark.parametrize("name", JOBS)
def test_same_bits(name: str, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    make, budget_bytes = JOBS[name]
    with monkeypatch.context() as patch:
        patch.setattr(elbowroom.runtime.sliced_ops.SlicedOps, "wants", lambda *_: False)
        with pytest.raises(Infeasible):
            run_within(make, profile, budget_bytes, STEPS)
    plain = run_plain(make, STEPS)
    for mode in ("dynamic", "auto"):
        assert_same(plain, run_within(make, profile, budget_bytes, STEPS, elsewhere_bytes=1 << 20, mode=mode))


def test_nothing_is_dropped_whose_inputs_have_no_room_beside_it(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """On a link so slow that computing a storage again is always faster. No probe is known."""
    monkeypatch.setattr("elbowroom.slicing.exactness_store.find_cache", lambda: tmp_path)
    make, budget_bytes = JOBS["batch norm"]
    links = tuple(
        dataclasses.replace(link, out_bytes_per_second=1e6, back_bytes_per_second=1e6) for link in profile.links
    )
    slow = dataclasses.replace(profile, links=links)
    found = run_within(make, slow, budget_bytes, 2, elsewhere_bytes=1 << 20, mode="dynamic")
    assert_same(run_plain(make, 2), found)


def test_a_step_that_only_slices_fit_is_not_refused(profile: HardwareProfile) -> None:
    """With `step`, which is planned before it runs; a budget that slices do not reach either still is."""
    make, budget_bytes = JOBS["convolutions"]
    plain = run_plain(make, STEPS)
    job = make()
    batch_step = functools.partial(job.step, 0)
    with pytest.raises(Infeasible):
        elbowroom.fit(job.model, job.optimizers, 1 << 18, profile=profile, min_offload_bytes=MIN_BYTES, step=batch_step)
    with elbowroom.fit(job.model, job.optimizers, budget_bytes, profile=profile, min_offload_bytes=MIN_BYTES,
                       step=batch_step) as room:  # fmt: skip
        for index in range(STEPS):
            with room.step():
                job.step(index)
        assert room._metering.sliced.counts
        assert all((record.peak_bytes or 0) <= budget_bytes for record in room.journal().steps)
    found = list_tensors(job)
    assert_same({name: plain[name] for name in found}, found)


def test_inexact_slices_are_close_and_reported(profile: HardwareProfile, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> StateJob:
        return make_job(make_vgg, (8, 3, 44, 44))

    plain = run_plain(make, STEPS)
    found = run_within(make, profile, 4 << 20, STEPS, elsewhere_bytes=1 << 20, exact=False)
    assert any(not torch.equal(plain[what], found[what]) for what in plain)
    for what, expected in plain.items():
        torch.testing.assert_close(found[what], expected, rtol=1e-3, atol=1e-5)
    assert "gradient accumulation" in caplog.text
    with pytest.raises(Infeasible, match="exact=False"):
        run_within(make, profile, 4 << 20, STEPS)


def test_an_op_with_a_number_that_no_slices_help_is_refused(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's kernels get the number as a tensor, and Python as a number: the error lists all bytes in the way."""
    monkeypatch.setattr(SliceChooser, "choose", lambda *_, **__: None)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with (
        elbowroom.fit(model, optimizer, 28 << 20, mode="dynamic", profile=profile) as room,
        pytest.raises(Infeasible, match=r"aten\.mul\.Tensor has no room as a whole") as caught,
        room.step(),
    ):
        torch.ones(5 << 20) * 2.0
    listed = dict(caught.value.in_the_way)
    assert sum(listed.values()) == caught.value.needed_bytes
    assert listed["other tensors that are in use or that the program holds"] == pytest.approx(20 << 20, abs=4096)


def test_torchscript_passes_the_message_of_a_refusal_on(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter raises an error of its own."""
    monkeypatch.setattr(SliceChooser, "choose", lambda *_, **__: None)
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 1 << 20), nn.GELU()))
    with (
        elbowroom.fit(model, torch.optim.SGD(model.parameters()), 28 << 20, mode="dynamic", profile=profile) as room,
        pytest.raises(RuntimeError, match=r"bytes\) are needed at once when aten\."),
        room.step(),
    ):
        model(torch.ones(4, 4))


def test_an_op_without_a_rule_is_refused_with_its_name(profile: HardwareProfile) -> None:
    assert "aten.cumsum.default" not in list_rules()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 1))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return (batch * self.weight).cumsum(1)

    with pytest.raises(Infeasible, match=r"cumsum"):
        run_within(lambda: make_job(Model, (16, 1 << 16)), profile, 5 << 20, 1)


def test_a_batch_norm_that_cannot_run_in_slices_leaves_its_statistics(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of it have begun when the disk fails, and when no exact ones are known."""
    for error in (TierFull("a disk", 2, 1, "Free some."), None):
        norm = nn.BatchNorm2d(32)
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
        batch = torch.randn(8, 32, 64, 64)

        def fail(*_: Any, error: Any = error) -> Any:
            raise error

        with monkeypatch.context() as patch, elbowroom.fit(
            norm, [optimizer], 7 << 20, mode="dynamic", profile=profile, min_offload_bytes=MIN_BYTES
        ) as room:  # fmt: skip
            if error is None:
                patch.setattr("elbowroom.runtime.slice_choice.probe_each", lambda *_, **__: {})
            else:
                patch.setattr(Sections, "write", fail)
            with pytest.raises(Infeasible if error is None else TierFull), room.step():
                norm(batch)
        assert torch.equal(norm.running_mean, torch.zeros(32)) and torch.equal(norm.running_var, torch.ones(32))


@pytest.mark.parametrize("dimension", range(4))
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_the_pieces_of_a_section(dimension: int, order: tuple[int, ...]) -> None:
    """Any slice of a tensor in any memory layout is where its pieces say, and nowhere else."""
    whole = torch.arange(3 * 40 * 41 * 42.0).view(3, 40, 41, 42).permute(order)
    view = torch.ops.aten.slice.Tensor(whole, dimension, 1, 3)
    packed = torch.empty_strided(view.shape, find_packed_strides(view))
    extents = find_extents(view, packed)
    assert extents is not None and extents.nbytes == packed.nbytes
    source = torch.empty(0, dtype=torch.uint8).set_(whole.untyped_storage())
    target = torch.empty(0, dtype=torch.uint8).set_(packed.untyped_storage())
    for copy_offset, memory_offset in extents.list_runs():
        piece = source[copy_offset : copy_offset + extents.run_bytes]
        target[memory_offset : memory_offset + extents.run_bytes] = piece
    assert torch.equal(packed, view)


def test_results_that_are_away_can_be_used_like_others(profile: HardwareProfile) -> None:
    """The program and other threads look at a result that is away; the graph is used after the step, and detached."""
    make, budget_bytes = JOBS["weights"]
    job, twin = make(), make()
    batch = torch.randn(512, 256, generator=torch.Generator().manual_seed(5))
    expected = twin.model[0](batch)
    with elbowroom.fit(job.model, job.optimizers, budget_bytes, mode="dynamic", profile=profile,
                       min_offload_bytes=MIN_BYTES) as room:  # fmt: skip
        with room.step():
            result = job.model[0](batch)
        assert room._metering.sliced.counts["aten.addmm.default"]
        assert result.untyped_storage().nbytes() > budget_bytes
        assert room._pager.is_away(result.untyped_storage())
        seen: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: seen.append(result.detach().clone()))
        thread.start()
        thread.join()
        assert torch.equal(seen[0], expected)
        assert torch.equal(torch.from_numpy(result.numpy(force=True)), expected)
    result.sum().backward()
    expected.sum().backward()
    assert torch.equal(job.model[0].weight.grad, twin.model[0].weight.grad)


@pytest.mark.parametrize("name", ["weights", "weights, fused AdamW"])
def test_a_failing_disk_leaves_parameters_whole(
    name: str, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write fails in turn in an optimizer step whose ops run in slices: each tensor has old or new contents.

    What one op updates, a parameter and its averages, is all old or all new.
    """
    make, budget_bytes = JOBS[name]
    states = []
    twin = make()
    for index in range(STEPS):
        states.append(list_tensors(twin))
        twin.step(index)
    states.append(list_tensors(twin))
    run = SpillJob.run
    failed = 0
    for failing in range(0, 60, 7):
        job = make()
        with elbowroom.fit(job.model, job.optimizers, budget_bytes, mode="dynamic", profile=profile,
                           min_offload_bytes=MIN_BYTES) as room:  # fmt: skip
            with room.step():
                job.step(0)
            left = [failing]

            def fail(self: Any, spill: Any, left: list[int] = left) -> None:
                left[0] -= self.is_out
                run(self, _Broken(spill) if left[0] == -1 and self.is_out else spill)

            with monkeypatch.context() as patch:
                patch.setattr(SpillJob, "run", fail)
                try:
                    with room.step():
                        job.step(1)
                except (TierError, Infeasible):
                    failed += 1
            found = list_tensors(job)
        places = [each for each, _ in job.model.named_parameters()]
        for position, place in enumerate(places):
            updated = [place]
            if "fused" in name:
                updated += [f"optimizer 0, parameter {position}, {each}" for each in ("exp_avg", "exp_avg_sq")]
            is_old, is_new = (
                all(torch.equal(found[each], states[index][each]) for each in updated) for index in (1, 2)
            )
            assert is_old or is_new, (failing, place)
    assert failed


class _Broken:
    def __init__(self, spill: Any) -> None:
        self._spill = spill

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spill, name)

    def write(self, *_: Any) -> None:
        raise OSError(5, os.strerror(5))


def test_an_op_that_the_system_refuses_memory_runs_in_slices(profile: HardwareProfile) -> None:
    """The budget has room for the whole op, and the process has not."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)

    def count_spare() -> int:
        with limited_data(0):
            return sum(each.nbytes for each in fill_memory(1 << 20))  # more after other tests

    # So large that a result is away, which it is from an eighth of the budget on.
    images = torch.randn(max(16, count_spare() // (8 << 20) + 4), 16, 256, 256)

    def pool() -> torch.Tensor:
        return functional.max_pool2d(images.cos(), 16)

    plain = pool()
    budget_bytes = count_spare() + 4 * images.nbytes
    assert images.nbytes > budget_bytes // 8
    with elbowroom.fit(model, adamw(model.parameters()), budget_bytes, profile=profile, mode="dynamic") as room:
        for megabytes in (48, 40, 32, 24, 16):  # threads that end meanwhile give back their stacks
            with room.step(), limited_data(0):
                filled = fill_memory(1 << 20)  # pages that malloc and the arena still have
                with limited_data(megabytes << 20):
                    ours = pool()
                del filled
            assert torch.equal(ours, plain)
            if sliced_ops := room.metrics().get("sliced_ops", 0):
                break
    assert sliced_ops >= 1


class Ragged(nn.Module):
    """Attention over sequences of other lengths, in a jagged nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor([x[:50], x[50:130], x[130:]], layout=torch.jagged)
        heads = self.inner(nested).unflatten(-1, [4, 16]).transpose(1, 2)
        found = functional.scaled_dot_product_attention(heads, heads, heads)
        return found.transpose(1, 2).flatten(-2).values()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_not_cut(profile: HardwareProfile) -> None:
    def make() -> StateJob:
        return make_job(Ragged, (256, 64), adamw)

    plain, job = make(), make()
    with elbowroom.fit(job.model, job.optimizers, 1 << 30, profile=profile, min_offload_bytes=MIN_BYTES) as room:
        for index in range(STEPS):
            with room.step():
                assert torch.equal(job.step(index), plain.step(index))
    assert_same(list_tensors(job), list_tensors(plain))


def test_sparse_gradients_are_not_cut(profile: HardwareProfile) -> None:
    model = nn.EmbeddingBag(2000, 64, sparse=True, mode="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget_bytes = sum(each.nbytes for each in model.parameters()) + (100 << 10)

    def step() -> None:
        model(torch.arange(2000).reshape(20, 100)).square().mean().backward()
        optimizer.step()

    with elbowroom.fit(model, optimizer, budget_bytes, profile=profile) as room:  # noqa: SIM117
        with pytest.raises(Infeasible), room.step():
            step()
