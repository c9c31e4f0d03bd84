"""How large slices are, and which cuts are chosen, when there is no room for the first choice."""

from __future__ import annotations

import copy
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.ir.slicing import SlicePass, iterate_slices
from elbowroom.native import library
from elbowroom.runtime import slice_choice
from elbowroom.runtime.slice_choice import Cut, SliceChooser
from elbowroom.runtime.slice_sizes import SliceSizes
from elbowroom.slicing import vector_ends
from elbowroom.slicing.exactness_store import Exactness, ExactnessStore
from elbowroom.slicing.op_call import OpCall, bind
from tests.cpu.test_sliced_ops import JOBS, LanguageModel, make_job
from tests.state_jobs import MIN_BYTES, StateJob, assert_same, list_tensors, run_plain, run_within

pytestmark = pytest.mark.usefixtures("two_threads")


def make_with_wide_head() -> StateJob:
    return make_job(lambda: LanguageModel(6282, 256), (8, 129), classes=6282)


def test_slices_do_not_get_smaller_with_each_step(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice whose argument was evicted to make room for it fits the next time in the same size."""
    known: dict[SliceSizes, list[int]] = {}
    begin_again = SliceSizes.begin_again

    def note(self: SliceSizes, cut: Cut) -> None:
        known.setdefault(self, []).append(self.slice_bytes)
        begin_again(self, cut)

    monkeypatch.setattr(SliceSizes, "begin_again", note)
    job = make_with_wide_head()
    with elbowroom.fit(job.model, job.optimizers, 32_000_000, profile=profile, min_offload_bytes=MIN_BYTES) as room:
        for index in range(5):
            with room.step():
                job.step(index)
        assert room._metering.sliced.counts["aten.mm.default"] == 15
    assert max(map(len, known.values())) >= 3
    assert all(len(set(sizes)) == 1 for sizes in known.values()), list(known.values())


@pytest.mark.parametrize("budget_bytes", [32 << 20, 34 << 20])
def test_another_cut_where_the_first_reads_too_much_as_a_whole(budget_bytes: int, profile: HardwareProfile) -> None:
    """Within 30 MiB the logits' gradient cannot be read as a whole, and within 32 there is no room beside it."""

    def make() -> Any:
        return make_job(lambda: LanguageModel(8192, 64), (8, 129), classes=8192)

    found = run_within(make, profile, budget_bytes, 2, elsewhere_bytes=1 << 20, mode="auto")
    assert_same(run_plain(make, 2), found)


class PartOfWeight(nn.Module):
    """A product with columns of a larger matrix: they have gaps in memory, and are not aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(311, 1024) * 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[:, 3:704]


def make_linear_in_odd_memory() -> nn.Linear:
    """Make a layer whose weight lies where a mapped file might have it, which aligns to 8 bytes only."""
    layer = nn.Linear(311, 701)
    weight = torch.frombuffer(bytearray(layer.weight.nbytes + 8), dtype=torch.float32, offset=8).view(701, 311)
    layer.weight.data = weight.copy_(layer.weight.detach())
    return layer


@pytest.mark.parametrize(
    ("make_first", "rows", "dtype", "budget_bytes"),
    [
        (functools.partial(nn.Linear, 311, 701), 2, torch.float32, 460_000),
        (functools.partial(nn.Linear, 311, 701), 2, torch.float32, 620_000),
        (functools.partial(nn.Linear, 311, 701), 2, torch.float64, 920_000),
        (PartOfWeight, 512, torch.float32, 3_000_000),
        (make_linear_in_odd_memory, 64, torch.float32, 1_600_000),
        (PartOfWeight, 512, torch.float32, 2_700_000),
    ],
)
def test_slices_of_whole_blocks_and_of_memory_that_is_not_aligned(
    make_first: Callable[[], nn.Module], rows: int, dtype: torch.dtype, budget_bytes: int, profile: HardwareProfile
) -> None:
    """Of 701 columns, only some numbers of equal slices are exact. The second and third batch are not aligned."""

    def make() -> StateJob:
        torch.manual_seed(0)
        model = nn.Sequential(make_first(), nn.Softplus(), nn.Linear(701, 13)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        memory = torch.randn(3, rows * 311 + 2, dtype=dtype)

        def step(index: int) -> torch.Tensor:
            loss = model(memory[index, :-2].view(rows, 311)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return StateJob(model, [optimizer], step)

    found = run_within(make, profile, budget_bytes, 3, min_offload_bytes=1 << 12, is_metered=False)
    assert_same(run_plain(make, 3), found)


@pytest.mark.parametrize("budget_bytes", [17_000_000, 20_000_000])
def test_a_step_runs_unwatched_only_if_its_peak_is_known(budget_bytes: int, profile: HardwareProfile) -> None:
    """Ops ran in slices when it was captured. As a whole they take more than is estimated, and than there is."""
    make, _ = JOBS["convolutions"]
    assert_same(run_plain(make, 5), run_within(make, profile, budget_bytes, 5, elsewhere_bytes=1 << 20, mode="auto"))


def make_convolutions(images: int = 16) -> StateJob:
    return make_job(
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        ),
        (images, 3, 48, 48),
    )  # fmt: skip


@pytest.mark.parametrize("budget_bytes", [11_900_000, 10_720_000])
def test_a_plan_with_too_little_room_is_mended_or_followed_in_part(budget_bytes: int, profile: HardwareProfile) -> None:
    """The first captured step ran an op in slices, so its plan has too little room for the whole one.

    Within the larger budget there is a better plan, and within the other one there is none.
    """
    job = make_convolutions()
    with elbowroom.fit(job.model, job.optimizers, budget_bytes, profile=profile, min_offload_bytes=MIN_BYTES) as room:
        for index in range(30):
            with room.step():
                job.step(index)
        modes = [record.mode for record in room.journal().steps]
        assert all((record.peak_bytes or 0) <= budget_bytes for record in room.journal().steps)
    assert Mode.DRIFTED not in modes[6:] and modes[6:].count(Mode.PLANNED) >= 20, modes


def test_probes_of_tensors_below_a_mebibyte_have_room(profile: HardwareProfile) -> None:
    """The weight's gradient is compared as a whole, whose tensors are in files then."""

    plain = make_convolutions(7)
    job = make_convolutions(7)
    with elbowroom.fit(job.model, job.optimizers, 4_630_000, profile=profile, min_offload_bytes=MIN_BYTES) as room:
        with room.step():
            loss = job.step(0)
        assert room._metering.sliced.counts["aten.convolution_backward.default"] > 0
        assert torch.equal(loss, plain.step(0))
        assert all(map(torch.equal, job.model.parameters(), plain.model.parameters()))


def test_each_pass_has_slices_of_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the weight's gradient are exact only as a whole, and of the input's in four parts or more."""

    def probe(call: OpCall, passes: Sequence[SlicePass], parts: Any, **_: Any) -> dict[SlicePass, Exactness]:
        def is_exact(each: SlicePass) -> bool:
            return math.prod(parts(each)) == 1 if 1 in each.results else math.prod(parts(each)) >= 4

        return {each: Exactness.PROVEN if is_exact(each) else Exactness.INEXACT for each in passes}

    monkeypatch.setattr(slice_choice, "probe_each", probe)
    x, weight = torch.randn(16, 16, 12, 12), torch.randn(16, 16, 3, 3)
    rest = ([16], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    call = bind(torch.ops.aten.convolution_backward.default, (x, x, weight, *rest), {})
    results, sizes = [x, weight, weight[0, 0, 0]], SliceSizes(x.nbytes // 4)
    chooser = SliceChooser(is_exact=True)
    assert chooser.choose(call, results, [sizes.slice_bytes], 1 << 30) is None
    cut = chooser.choose(call, results, sizes.list_all(), 1 << 30)
    assert cut is not None and cut.is_larger
    assert sorted(math.prod(cut.parts[each]) for each in cut.passes) == [1, 8]
    assert chooser.choose(call, results, [1], 1 << 30, former=cut) == cut
    assert sizes.go_on(cut) and not sizes.overlaps, "the same slices, one at a time"
    assert sizes.go_on(cut) and sizes.overlaps, "and then none that are larger than they were to be"
    assert chooser.choose(call, results, sizes.list_all(), 1 << 30) is None
    assert sizes.exclude() and cut.passes in sizes.excluded and not sizes.exclude()


def test_only_the_slices_of_a_pass_that_has_no_room_are_halved() -> None:
    x, weight = torch.randn(16, 32, 12, 12), torch.randn(32, 32, 3, 3)
    rest = ([32], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    call = bind(torch.ops.aten.convolution_backward.default, (x, x, weight, *rest), {})
    results, sizes, chooser = [x, weight, weight[0, 0, 0]], SliceSizes(x.nbytes // 2), SliceChooser(is_exact=False)

    def choose() -> Cut:
        cut = chooser.choose(call, results, [sizes.slice_bytes], 1 << 30, halvings=sizes.halvings)
        assert cut is not None and len(cut.passes) == 2
        return cut

    cut = choose()
    first, second = cut.passes
    while not cut.is_finest(second):
        sizes.running = second
        assert sizes.go_on(cut) and sizes.overlaps and sizes.running is None
        former, cut = cut, choose()
        assert cut.parts[first] == former.parts[first]
    assert sizes.slice_bytes == x.nbytes // 2 and sum(cut.parts[second]) > sum(former.parts[second])
    sizes.running = second
    assert sizes.go_on(cut) and not sizes.overlaps
    assert sizes.go_on(cut) and sizes.slice_bytes == x.nbytes // 4, "no pass has begun: there was no room for results"
    assert sizes.exclude() and not sizes.halvings


def test_samples_for_cuts_of_pointwise_ops_need_no_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Those of bfloat16 take 256 KiB a tensor."""
    monkeypatch.setattr(vector_ends, "_found", {})
    tensor = torch.randn(16, 1024).bfloat16()
    call = bind(torch.ops.aten.relu.default, (tensor,), {})
    native = library.load()
    scope = native.make_scope()
    former = native.enter_scope(scope)
    try:
        scope.set_make_room(lambda *_: refuse())
        scope.limit_bytes = 300 << 10
        chooser = SliceChooser(is_exact=True, folder=str(tmp_path))
        chooser._store = ExactnessStore(tmp_path)
        cut = chooser.choose(call, [tensor], [8 << 10], 300 << 10)
    finally:
        native.enter_scope(former)
        scope.close()
    assert cut is not None and cut.exactness.is_exact


@pytest.mark.parametrize("op", [torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim])
@pytest.mark.parametrize("sizes", [(130, 1500), (50, 137, 12)])
def test_rows_of_odd_lengths_are_summed_in_slices_of_whole_vectors(
    sizes: tuple[int, ...], op: Any, tmp_path: pathlib.Path
) -> None:
    """As for the gradient of a bias. What remains at the end of a row is summed in another order."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rows = torch.randn(sizes).to(dtype)
        call = bind(op, (rows, [0]), {})
        result = op(rows, [0])
        chooser = SliceChooser(is_exact=True)
        chooser._store = ExactnessStore(tmp_path)
        cut = chooser.choose(call, [result], [rows.nbytes // 7], 1 << 30)
        assert cut is not None and not cut.is_larger
        (slice_pass,) = cut.passes
        (slices,) = zip(*iterate_slices(slice_pass, cut.parts[slice_pass]), strict=True)
        assert len(slices) == cut.parts[slice_pass][0] > 2
        (dimension,) = slice_pass.loops[0].reads
        parts = [op(rows.narrow(dimension, begin, end - begin).contiguous(), [0]) for begin, end in slices]
        assert torch.equal(torch.cat(parts, dimension - 1), result)


@pytest.mark.parametrize("mode", ["auto", "dynamic"])
def test_small_tensors_leave_where_data_takes_most_of_the_budget(mode: str, profile: HardwareProfile) -> None:
    """The data take 2.65 MB, and arguments of 128 KiB are not large beside the budget."""

    def make() -> StateJob:
        torch.manual_seed(0)
        layers = (nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))
        model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(4) for layer in layers))
        data = torch.randn(5180, 128)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(index: int) -> torch.Tensor:
            torch.manual_seed(index)
            loss = model(data[torch.randint(0, 5180, (256,))]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return StateJob(model, [optimizer], step)

    found = run_within(make, profile, 2_950_000, 3, is_metered=False, min_offload_bytes=1 << 12, mode=mode)
    assert_same(run_plain(make, 3), found)


def refuse() -> bool:
    raise Infeasible(needed_bytes=2, budget_bytes=1, op="", is_whole_step=False)


def test_a_step_that_is_planned_ahead_is_refused_only_if_no_slices_fit(profile: HardwareProfile) -> None:
    """No plan fits these budgets. The state that AdamW makes in the first step has no room as a whole, either."""

    def make() -> StateJob:
        def make_model() -> nn.Module:
            return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(1024, 512), nn.Linear(512, 1024))))

        return make_job(make_model, (64, 1024), torch.optim.AdamW)

    budget_bytes = 2_000_000
    job = make()
    losses = [job.step(index) for index in range(3)]
    expected = list_tensors(job)
    job = make()
    options: dict[str, Any] = {"profile": profile, "step": lambda: job.step(0)}
    with elbowroom.fit(job.model, job.optimizers, budget_bytes, **options) as room:
        assert room.planned is None
        for index in range(3):
            with room.step():
                assert torch.equal(job.step(index), losses[index])
        assert room._metering.sliced.counts["aten.zeros_like.default"] > 0
        assert 0 < (room.journal().peak_bytes or 0) <= budget_bytes
    assert_same(list_tensors(job), expected)
    with pytest.raises(Infeasible, match=r"If ops run in slices, at least .* bytes\) are needed, when aten"):
        elbowroom.fit(job.model, job.optimizers, 300_000, **options)


class Scaled(nn.Module):
    """Scales channels, and applies a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1, 8, 1, 1))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale)


@pytest.mark.parametrize(
    ("function", "budget_bytes", "options"),
    [
        pytest.param(
            functools.partial(functional.interpolate, size=(17, 99), mode="nearest-exact"), 1_100_000, {},
            id="the whole op that follows leaves no room for ops that wait",
        ),
        pytest.param(
            functools.partial(functional.local_response_norm, size=5), 1_907_772, {"policy": "dtr"},
            id="gradients leave no room for a replay",
        ),
    ],
)  # fmt: skip
def test_what_moves_has_room_later(
    function: Callable[[torch.Tensor], torch.Tensor],
    budget_bytes: int,
    options: dict[str, Any],
    profile: HardwareProfile,
) -> None:
    """The program holds the input and the output."""

    def make() -> StateJob:
        torch.manual_seed(3)
        model = Scaled(function)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(index: int) -> torch.Tensor:
            x = torch.randn(12, 8, 32, 36, generator=torch.Generator().manual_seed(index))
            y = model(x)
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return StateJob(model, [optimizer], step)

    options["min_offload_bytes"] = 4096
    assert_same(run_within(make, profile, budget_bytes, steps=4, **options), run_plain(make, 4))
