"""Sections of real tensors, and plans of real models whose ops run in slices."""

from __future__ import annotations

import itertools
import json
import pathlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import elbowroom
from elbowroom.cli.main import make_app
from elbowroom.cost.price import price
from elbowroom.errors import Infeasible
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.files import save
from elbowroom.ir.section_grid import SectionGrid, find_parts
from elbowroom.ir.sliced_trace import slice_trace
from elbowroom.ir.slicing import OpCut, SlicePass, iterate_slices
from elbowroom.ir.trace import Role, Trace, View
from elbowroom.planner.problem import plan
from elbowroom.planner.slicing.choice import Slices
from elbowroom.simulator.simulate import simulate
from elbowroom.slicing.bounds import narrow_read
from elbowroom.slicing.op_call import bind
from elbowroom.slicing.registry import find_passes
from tests.slicing_cases import GROUPS

PARTS = 3


def make_random(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes)


def make_channels_last(*sizes: int) -> torch.Tensor:
    tensor = torch.randn(sizes)
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


@pytest.mark.parametrize("make", [make_random, make_channels_last])
@pytest.mark.parametrize("group", ["convolutions", "pools", "products", "norms", "attentions", "others"])
def test_a_slice_lies_within_its_sections(group: str, make: object) -> None:
    """By the bytes that the slice's view really covers."""
    for op, args, kwargs in GROUPS[group](make):  # type: ignore[arg-type]
        for slice_pass in itertools.chain.from_iterable(find_passes(op, args, kwargs)):
            reads = bind(op, args, kwargs).reads
            for index in slice_pass.reads:
                if reads[index].storage_offset() == 0 and reads[index].numel():
                    _check_sections(reads[index], index, slice_pass)


def _check_sections(tensor: torch.Tensor, index: int, slice_pass: SlicePass) -> None:
    view = View(storage=0, version=0, dtype=str(tensor.dtype)[6:], shape=tuple(tensor.shape))
    grid = SectionGrid(tensor.untyped_storage().nbytes())
    dimensions = [loop.reads[index] for loop in slice_pass.loops]
    slices = list(iterate_slices(slice_pass, (PARTS,) * len(slice_pass.loops)))
    parts = [find_parts(view, tensor.stride(), dimensions, slice_pass.loops, bounds) for bounds in slices]
    for extent, part in itertools.chain.from_iterable(each.items() for each in parts):
        grid.add(extent, part)
    labels = _label_bytes(grid)
    assert len(grid.sizes) > 1 or grid.is_whole
    for bounds, part in zip(slices, parts, strict=True):
        piece = narrow_read(tensor, index, slice_pass, bounds)
        touched = set(labels[_list_bytes(piece)].tolist())
        assert touched <= set(grid.find(part)), (slice_pass, bounds)


def _label_bytes(grid: SectionGrid) -> np.ndarray:
    """The section of each byte, by where the byte lies on each axis."""
    labels = np.zeros(grid.nbytes, dtype=int)
    for extent, edges in grid._axes:
        places = np.arange(grid.nbytes) % extent
        inner = [int(edge * extent) if edge.denominator == 1 else -(-edge.numerator * extent // edge.denominator)
                 for edge in map(Fraction, edges[1:-1])]  # fmt: skip
        labels = labels * (len(edges) - 1) + np.searchsorted(np.array(inner, dtype=int), places, side="right")
    return labels


def _list_bytes(piece: torch.Tensor) -> np.ndarray:
    size = piece.element_size()
    first = torch.as_strided(
        torch.arange(piece.untyped_storage().nbytes() // size), piece.shape, piece.stride(), piece.storage_offset()
    )
    begins = first.reshape(-1).numpy() * size
    return (begins[:, None] + np.arange(size)).reshape(-1)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(4), nn.Flatten(),
            nn.Linear(16 * 8 * 8, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(images)
        return result


def capture(batch: int) -> Trace:
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.long)

    def step() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return elbowroom.capture(step, model, optimizer)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return capture(32)


def test_a_pass_writes_only_its_own_results(trace: Trace) -> None:
    """The gradient of a weight, which the second pass computes, does not exist during the first."""
    ops = {op.tick: op for op in trace.ops}
    slicing, passes = next(
        (each, passes)
        for each in trace.slicing
        for passes in each.alternatives
        if ops[each.tick].name == "aten.convolution_backward.default" and passes[0].results == (0,)
    )
    cut = OpCut(slicing.tick, passes, tuple((2,) * len(each.loops) for each in passes))
    weight = ops[slicing.tick].writes[1].storage
    assert trace.storages[weight].role is Role.GRADIENT
    sliced = slice_trace(trace, (cut,))
    slices = [op for op, share in zip(sliced.trace.ops, sliced.shares, strict=True) if share < 1]
    assert len(slices) == sum(2 ** len(each.loops) for each in passes)
    is_written = [weight in {view.storage for view in op.writes} for op in slices]
    assert is_written == [False, False, *[True] * (len(slices) - 2)]


def test_the_floor_is_at_most_half(trace: Trace) -> None:
    costs = price(trace, load_shipped("p100"))
    needed = []
    for each in (Slices.NONE, Slices.EXACT):
        with pytest.raises(Infeasible) as caught:
            plan(trace, costs, 1, strategy="offload_all", slices=each)
        needed.append(caught.value.needed_bytes)
    assert needed[1] < needed[0] / 2
    made = plan(trace, costs, needed[1], strategy="offload_all")
    assert simulate(trace, costs, made).peak_bytes <= needed[1]
    names = {op.name for op in trace.ops if op.tick in {cut.tick for cut in made.cuts}}
    assert {"aten.convolution.default", "aten.convolution_backward.default"} <= names


def test_the_command_says_what_is_cut(trace: Trace, tmp_path: pathlib.Path) -> None:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(make_app(), [*arguments, "--hardware", "p100"])

    step, made = str(tmp_path / "step.json"), str(tmp_path / "plan.json")
    save(trace, step)
    floor = json.loads(call("plan", step, "--budget", "100%", "--json").stdout)["smallest_budget_bytes"]
    within = ("plan", step, "--budget", str(floor - 1), "--strategy", "offload_all")
    assert call(*within, "--slices", "none").exit_code == 3
    planned = call(*within, "--json", "--output", made)
    assert planned.exit_code == 0, planned.output
    fields = json.loads(planned.stdout)
    assert fields["ops_in_slices"] > 0 and fields["smallest_budget_of_whole_ops_bytes"] == floor
    assert fields["forecast_peak_bytes"] < floor
    assert "ops in slices" in call(*within).stdout
    forecast = json.loads(call("simulate", step, made, "--json").stdout)["forecast"]
    assert forecast["peak_bytes"] == fields["forecast_peak_bytes"]
    laid_out = call("layout", step, "--plan", made)
    assert laid_out.exit_code == 0, laid_out.output
    viewed = call("view", step, "--plan", made, "-o", str(tmp_path / "x.html"))
    assert viewed.exit_code == 0, viewed.output
