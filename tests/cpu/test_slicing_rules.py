"""Every rule for slices against the whole op; gradient accumulation; probes of exactness and their store."""

from __future__ import annotations

import copy as copy_module
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.errors import Infeasible
from elbowroom.ir.slicing import Loop, SlicePass, iterate_slices
from elbowroom.native import library
from elbowroom.ops.replayable import iterate_tensors
from elbowroom.slicing import calls, probe
from elbowroom.slicing.bits import equal_bits
from elbowroom.slicing.calls import make_results, run_slice, run_whole
from elbowroom.slicing.draws import _list_values, may_tell
from elbowroom.slicing.exactness_store import Exactness, ExactnessStore, describe_pass
from elbowroom.slicing.op_call import bind
from elbowroom.slicing.probe import MOST_SLICES, is_exact, memory_in_files, probe_passes
from elbowroom.slicing.random_data import Ties
from elbowroom.slicing.registry import find_passes, find_passes_along, list_rules
from tests.slicing_cases import GROUPS, MIXED_GROUPS

aten = torch.ops.aten
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float64: 1e-12}


def make_random(dtype: torch.dtype, layout: str) -> Callable[..., torch.Tensor]:
    """Return a maker of random tensors; "strided" ones have gaps between their elements."""

    def make(*sizes: int) -> torch.Tensor:
        if layout == "strided" and sizes:
            wide = torch.randn(*sizes[:-1], 2 * sizes[-1]).to(dtype)
            return wide[..., ::2]
        made = torch.randn(sizes).to(dtype)
        if layout == "channels_last" and len(sizes) == 4:
            return made.to(memory_format=torch.channels_last)
        return made

    return make


def copy(value: Any) -> Any:
    """Copy tensors with their strides, gaps included."""
    if isinstance(value, (list, tuple)):
        return type(value)(copy(each) for each in value)
    if isinstance(value, dict):
        return {name: copy(each) for name, each in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.copy_(value)


def run(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the results of the whole op."""
    call = bind(op, args, kwargs)
    results = call.run(call.values)
    return [results[position] for position in call.find_mask()]


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, where: str) -> None:
    """Compare results of inputs of this dtype."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), where
    if not expected.is_floating_point():
        assert torch.equal(found, expected), where
    elif expected.numel():
        largest = expected.nan_to_num(0, 0, 0).abs().max().item()
        bound = max(TOLERANCE[expected.dtype], TOLERANCE[dtype]) * (1 + largest)
        assert torch.allclose(found, expected, rtol=0, atol=bound, equal_nan=True), where


@pytest.mark.parametrize(
    ("group", "dtype", "layout"),
    [
        *((group, torch.float32, "contiguous") for group in GROUPS),
        *((group, torch.float32, "channels_last") for group in ("convolutions", "pools", "norms", "interpolations")),
        *((group, torch.bfloat16, "contiguous") for group in {**GROUPS, **MIXED_GROUPS}),
        *((group, torch.float64, "strided") for group in GROUPS if group not in ("pointwise", "optimizers")),
    ],
    ids=str,
)
def test_slices_give_what_the_whole_op_gives(
    group: str, dtype: torch.dtype, layout: str, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    store = ExactnessStore(tmp_path)
    tested = proven = 0
    for op, args, kwargs in {**GROUPS, **MIXED_GROUPS}[group](make_random(dtype, layout)):
        if layout == "channels_last" and not any(isinstance(each, torch.Tensor) and each.ndim == 4 for each in args):
            continue  # contiguous, as in another case
        try:
            reference = copy((args, kwargs))
            whole = run(op, *reference)
        except (RuntimeError, NotImplementedError):
            continue  # the kernel does not know this dtype
        alternatives = find_passes(op, args, kwargs, with_partial=True)
        if not alternatives:
            continue  # these arguments are not cut
        described = make_results(op, args, kwargs)
        assert [(each.shape, each.dtype) for each in described] == [(each.shape, each.dtype) for each in whole], op
        has_strides = [each.stride() for each in described] == [each.stride() for each in whole]
        for passes in alternatives:
            sums = any(each.sums for each in passes)
            exact = not sums and probe_passes(op, args, kwargs, passes, 3, store=store).is_exact
            for parts in (3, 1000) if dtype is torch.float32 else (3,):
                given = copy((args, kwargs))
                found = run_whole(op, *given, passes, parts)
                where = f"{op} {passes} {parts}"
                assert has_strides or not exact, where
                for each, expected in zip(found, whole, strict=True):
                    assert_close(each, expected, dtype, where)
                    assert not (exact and parts == 3) or equal_bits(each, expected), where
                values, wanted = bind(op, *given).values, bind(op, *reference).values
                for name in values:  # running statistics, and arguments that the op writes to
                    pairs = zip(iterate_tensors(values[name]), iterate_tensors(wanted[name]), strict=True)
                    for each, expected in pairs:
                        assert_close(each, expected, dtype, where)
            tested += 1
            proven += exact
    assert proven > tested / 5


def test_slices_are_not_exact_if_another_dtype_was_described(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be converted as they are stored."""
    call = (aten.tanh.default, (torch.randn(8, 8),), {})
    passes = find_passes(*call)[0]
    assert probe_passes(*call, passes, 2, store=ExactnessStore(tmp_path / "right")).is_exact
    describe = calls.describe_results
    monkeypatch.setattr(probe, "describe_results", lambda *args: tuple(each.double() for each in describe(*args)))
    assert not probe_passes(*call, passes, 2, store=ExactnessStore(tmp_path / "wrong")).is_exact


def test_every_rule_has_a_case() -> None:
    tested = {str(op) for make in GROUPS.values() for op, _, _ in make(make_random(torch.float32, "contiguous"))}
    assert set(list_rules()) == tested


@pytest.mark.parametrize("group", ["convolutions", "norms", "losses"])
def test_fake_arguments_have_the_passes_of_real_ones(group: str) -> None:
    for op, args, kwargs in GROUPS[group](make_random(torch.float32, "channels_last")):
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in args]
        assert find_passes(op, fake, kwargs) == find_passes(op, args, kwargs), op


class InSlices(TorchDispatchMode):
    """Runs every op in slices that a probe finds exact."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.cut: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        alternatives = find_passes(func, args, kwargs, with_partial=True)
        exact = (
            each for each in alternatives
            if not any(part.sums for part in each) and is_exact(func, args, kwargs, each, self.parts)
        )  # fmt: skip
        passes = next(exact, None)
        if passes is None:
            return func(*args, **kwargs)
        self.cut.add(str(func))
        results = run_whole(func, args, kwargs, passes, self.parts)
        if len(func._schema.returns) == 1:
            return args[0] if func._schema.is_mutable else results[0]
        mask = bind(func, args, kwargs).find_mask()
        return tuple(dict(zip(mask, results, strict=True)).get(index) for index in range(len(func._schema.returns)))


class Net(torch.nn.Module):
    """A bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(inplace=True),
            torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 8, 3, groups=2, padding=1), torch.nn.GroupNorm(2, 8),
            torch.nn.GELU(), torch.nn.AvgPool2d(2),
        )  # fmt: skip
        self.up = torch.nn.Sequential(
            torch.nn.ConvTranspose2d(8, 6, 2, 2), torch.nn.SiLU(), torch.nn.Upsample(scale_factor=2, mode="bilinear")
        )
        self.embedding = torch.nn.Embedding(9, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.linear = torch.nn.Linear(16, 5)

    def forward(self, image: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        upper = torch.cat([self.up(self.down(image)), image], 1).mean(1)
        some = self.norm(self.embedding(words) + upper).unsqueeze(1)
        some = torch.nn.functional.scaled_dot_product_attention(some, some, some, is_causal=True)
        return self.linear(some.squeeze(1)).flatten(0, 1)


def step(net: Net, image: torch.Tensor, words: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Return loss, gradients and buffers after one step."""
    loss = torch.nn.functional.cross_entropy(net(image, words), target)
    loss.backward()
    return [loss.detach(), *(each.grad for each in net.parameters()), *net.buffers()]


@pytest.mark.parametrize("parts", [2, 3])
def test_a_training_step_in_slices_has_the_bits_of_the_whole(parts: int) -> None:
    torch.manual_seed(0)
    net = Net()
    other = copy_module.deepcopy(net)
    given = (torch.randn(6, 3, 16, 16), torch.randint(0, 9, (6, 16)), torch.randint(0, 5, (96,)))
    expected = step(net, *given)
    with InSlices(parts) as mode:
        found = step(other, *given)
    assert all(map(equal_bits, found, expected))
    names = ("relu_", "gelu", "max_pool2d_with_indices_backward", "native_batch_norm", "cat", "nll_loss_forward")
    assert {f"aten.{name}.default" for name in names} <= mode.cut
    assert len(mode.cut) > 25


# -- sums are gradient accumulation -----------------------------------------------------------------------------------


def accumulate(module: torch.nn.Module, some: torch.Tensor, grad: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Return the parameters' gradients after a backward pass for each part of a batch."""
    module.zero_grad()
    for part, part_grad in zip(some.split(sizes), grad.split(sizes), strict=True):
        module(part).backward(part_grad)
    return [each.grad for each in module.parameters() if each.grad is not None]


def find_backward(module: torch.nn.Module, some: torch.Tensor, grad: torch.Tensor, name: str) -> tuple[Any, Any, Any]:
    """Return the call of an op in a module's backward pass."""
    found = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func) == name:
                found.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        module(some).backward(grad)
    return found[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("module", "sizes", "name"),
    [
        (torch.nn.Conv2d(6, 8, 3, padding=1), (10, 6, 9, 8), "convolution_backward"),
        (torch.nn.Conv2d(6, 9, 3, groups=3, bias=False), (10, 6, 9, 8), "convolution_backward"),
        (torch.nn.ConvTranspose2d(6, 8, 3, stride=2), (10, 6, 5, 6), "convolution_backward"),
        (torch.nn.LayerNorm(24), (10, 24), "native_layer_norm_backward"),
        (torch.nn.GroupNorm(3, 6), (10, 6, 5, 5), "native_group_norm_backward"),
    ],
    ids=str,
)
def test_a_sum_has_the_bits_of_gradient_accumulation(
    module: torch.nn.Module, sizes: tuple[int, ...], name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    module = module.to(dtype)
    some = torch.randn(sizes).to(dtype)
    grad = torch.randn_like(module(some))
    op, args, kwargs = find_backward(module, some, grad, f"aten.{name}.default")
    (passes,) = [each for each in find_passes(op, args, kwargs) if any(part.sums for part in each)]
    for parts in (1, 3, 10):
        with torch.no_grad():
            found = run_whole(op, args, kwargs, passes, parts)
        slices = [end - begin for ((begin, end),) in iterate_slices(passes[0], (parts,))]
        for each, expected in zip(found, accumulate(module, some, grad, slices), strict=True):
            assert equal_bits(each, expected)


def test_a_linear_layers_gradient_is_summed_over_its_batch() -> None:
    torch.manual_seed(1)
    module = torch.nn.Linear(7, 5, bias=False)
    some, grad = torch.randn(12, 7), torch.randn(12, 5)
    op, args, kwargs = find_backward(module, some, grad, "aten.mm.default")
    (passes,) = [each for each in find_passes(op, args, kwargs) if each[0].sums]
    with torch.no_grad():
        (found,) = run_whole(op, args, kwargs, passes, 4)
    assert equal_bits(found, accumulate(module, some, grad, [3, 3, 3, 3])[0])
    assert not probe_passes(op, args, kwargs, passes, 4).is_exact


@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("batch", [1, 5, 1000, 5000])
def test_a_loss_in_slices_has_the_bits_of_the_whole(batch: int, reduction: int) -> None:
    """Adding up the losses of slices would not: the whole op sums in blocks of another size."""
    op = aten.nll_loss_forward.default
    target = torch.randint(0, 7, (batch,))
    target[::9] = -100
    args = (torch.randn(batch, 7), target, None, reduction, -100)
    (partial, *summed) = find_passes(op, args, {}, with_partial=True)
    assert partial[0].is_partial
    assert probe_passes(op, args, {}, partial, 3) is Exactness.PROVEN
    assert all(map(equal_bits, run_whole(op, args, {}, partial, 3), run(op, args, {})))
    assert find_passes(op, args, {}) == tuple(summed)
    if batch == 5000 and summed:
        assert probe_passes(op, args, {}, summed[0], 3) is Exactness.INEXACT
    target[-1] = 7
    for call in (lambda: run(op, args, {}), lambda: run_whole(op, args, {}, partial, 3)):
        with pytest.raises(IndexError, match=r"Target 7 is out of bounds\."):
            call()


# -- slices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "multiple"), [(10, 1), (10, 4), (1, 1), (7, 7), (3, 5)])
def test_slices_cover_a_loop_once(length: int, multiple: int) -> None:
    loop = Loop(length=length, multiple=multiple, reads=(0,), writes=(0,))
    for parts in (1, 2, 3, 100):
        slices = [bounds[0] for bounds in iterate_slices(SlicePass((loop,), (0,), (0,)), (parts,))]
        assert [index for begin, end in slices for index in range(begin, end)] == list(range(length))
        assert all(begin % multiple == 0 and begin < end for begin, end in slices)
        assert len(slices) == min(parts, math.ceil(length / multiple))


def test_nested_loops_begin_with_the_outer_one() -> None:
    loop = Loop(length=2, multiple=1, reads=(0,), writes=(0,))
    found = list(iterate_slices(SlicePass((loop, loop), (0,), (0,)), (2, 2)))
    assert found == [((0, 1), (0, 1)), ((0, 1), (1, 2)), ((1, 2), (0, 1)), ((1, 2), (1, 2))]


def test_empty_slices_and_empty_batches() -> None:
    some, weight = torch.randn(4, 3, 5, 5), torch.randn(2, 3, 3, 3)
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    args = (torch.randn(4, 2, 5, 5), some, weight, [2], *options, [True, True, True])
    op = aten.convolution_backward.default
    (exact, *_, summed) = find_passes(op, args, {})
    (grad,) = run_slice(op, args, {}, exact[0], ((2, 2),), [args[0][2:2], weight])
    assert grad.shape == (0, 3, 5, 5)
    found = run_slice(op, args, {}, summed[0], ((4, 4),), [args[0][4:], some[4:], weight])
    assert [tuple(each.shape) for each in found] == [(0, 3, 5, 5), (2, 3, 3, 3), (2,)]
    assert not any(each.any() for each in found)
    empty = (torch.randn(0, 2, 5, 5), some[:0], weight, [2], *options, [True, True, True])
    for passes in find_passes(op, empty, {}):
        for each, expected in zip(run_whole(op, empty, {}, passes, 3), run(op, empty, {}), strict=True):
            assert equal_bits(each, expected)


def test_only_the_slice_is_read() -> None:
    """The whole tensors' memory may be elsewhere: a slice gets the same results if they hold other numbers."""
    args = (torch.randn(4, 2, 5, 5), torch.randn(4, 3, 5, 5), torch.randn(2, 3, 3, 3), [2])
    args = (*args, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    op = aten.convolution_backward.default
    meta = tuple(each.to("meta") if isinstance(each, torch.Tensor) else each for each in args)
    expected = run(op, args, {})
    slice_pass = find_passes(op, meta, {})[0][0]
    (found,) = run_slice(op, args, {}, slice_pass, ((0, 4),), [args[0], args[2]])
    assert equal_bits(found, expected[0])
    nan = tuple(torch.full_like(each, math.nan) if isinstance(each, torch.Tensor) else each for each in args)
    (found,) = run_slice(op, nan, {}, slice_pass, ((0, 4),), [args[0], args[2]])
    assert equal_bits(found, expected[0])


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_cut_along_a_dependent_dimension_is_refused() -> None:
    some = torch.randn(4, 5, 6)
    assert find_passes_along(aten._softmax.default, (some, 1, False), {}, 2)
    with pytest.raises(ValueError, match=r"_softmax.default cannot be cut along dimension 1 .* only along 0, 2"):
        find_passes_along(aten._softmax.default, (some, 1, False), {}, 1)
    with pytest.raises(ValueError, match="it has no rule"):
        find_passes_along(aten.cumsum.default, (some, 1), {}, 0)
    loop = Loop(length=5, multiple=1, reads=(1,), writes=(1,))
    wrong = (SlicePass((loop,), (0,), (0,)),)
    for call in (run_whole, is_exact):
        with pytest.raises(ValueError, match=r"its slices are not known to be independent"):
            call(aten._softmax.default, (some, 1, False), {}, wrong, 2)
    with pytest.raises(ValueError, match="it has no rule for these arguments"):
        run_whole(aten.cumsum.default, (some, 1), {}, wrong, 2)


def test_slices_outside_a_loop_and_of_other_shapes_are_refused() -> None:
    some = torch.randn(4, 5)
    (slice_pass,) = find_passes(aten.relu.default, (some,), {})[0]
    for bounds in (((0, 5),), ((3, 2),), ((-1, 2),), ()):
        with pytest.raises(ValueError, match=r"not within a loop of 4|needs as many bounds"):
            run_slice(aten.relu.default, (some,), {}, slice_pass, bounds, [some])
    with pytest.raises(ValueError, match=r"reads \(2, 5\) of its tensor 0 in this slice, not \(4, 5\)"):
        run_slice(aten.relu.default, (some,), {}, slice_pass, ((0, 2),), [some])
    uneven = dataclasses.replace(slice_pass, loops=(dataclasses.replace(slice_pass.loops[0], multiple=2),))
    with pytest.raises(ValueError, match="begin and end at multiples of 2"):
        run_slice(aten.relu.default, (some,), {}, uneven, ((1, 2),), [some[1:2]])
    with pytest.raises(ValueError, match="positive"):
        list(iterate_slices(slice_pass, (0,)))


def test_calls_that_cannot_be_cut() -> None:
    some = torch.randn(4, 4)
    for op, args in (
        (aten.native_dropout.default, (some, 0.5, True)),
        (aten.bernoulli.default, (some,)),
        (aten.nll_loss_forward.default, (some, torch.zeros(4, dtype=torch.long), None, 1, -100)),
        (aten.relu.default, (torch.tensor(1.0),)),
        (aten.convolution_backward.default, (some, *CONVOLUTION[:2], None, *CONVOLUTION[3:], [False] * 3)),
        (aten.copy_.default, (some, some.to("meta"))),
        (aten.mul.Tensor, (some.int(), torch.tensor(0.5))),
        (aten.mul.Tensor, (some.to(torch.complex64).conj(), some)),
        (aten.add_.Tensor, (some, some.t())),  # another slice may have written what this one reads
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (*[torch.randn(2, 2, 3, 4)] * 3, 0.5)),
    ):
        assert find_passes(op, args, {}) == (), op
    assert find_passes(aten.add_.Tensor, (some, some), {})
    assert find_passes(aten._to_copy.default, (some,), {"device": "meta"}) == ()


# -- probes -----------------------------------------------------------------------------------------------------------

CONVOLUTION = (torch.randn(8, 4, 6, 6), torch.randn(4, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


@pytest.fixture
def wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that cuts running products along their own dimension."""
    rule = dataclasses.replace(list_rules()["aten.relu.default"])
    monkeypatch.setitem(list_rules(), "aten.cumprod.default", rule)


def test_a_probe_finds_a_rule_that_is_wrong(wrong_rule: None) -> None:
    args = (torch.randn(6, 5), 0)
    wrong, right = find_passes(aten.cumprod.default, args, {})
    assert probe_passes(aten.cumprod.default, args, {}, wrong, 2) is Exactness.INEXACT
    assert probe_passes(aten.cumprod.default, args, {}, right, 2) is Exactness.PROVEN


def test_a_probe_within_a_limit_compares_fewer_slices(tmp_path: pathlib.Path) -> None:
    store = ExactnessStore(tmp_path)
    some = torch.randn(64, 100)
    (passes, *_) = find_passes(aten.relu.default, (some,), {})
    whole = 3 * some.numel() * 4
    for limit, expected in (
        (whole, Exactness.PROVEN),
        (whole // 2, Exactness.PROVEN_ON_SMALLER_BATCH),
        (whole // 8, Exactness.TOO_LARGE),
    ):
        assert probe_passes(aten.relu.default, (some,), {}, passes, 8, limit_bytes=limit) is expected
    for limit, expected in ((whole // 8, Exactness.TOO_LARGE), (whole, Exactness.PROVEN)):
        found = probe_passes(aten.relu.default, (some,), {}, passes, 8, store=store, limit_bytes=limit)
        assert found is expected
    passes = find_passes(aten.convolution.default, CONVOLUTION, {})[0]
    answer = probe_passes(aten.convolution.default, CONVOLUTION, {}, passes, 4, limit_bytes=9_000)
    assert answer in (Exactness.PROVEN_ON_SMALLER_BATCH, Exactness.INEXACT)
    args = (torch.randn(8, 4, 6, 6), *CONVOLUTION[:2], None, *CONVOLUTION[3:], [True, True, False])
    passes = find_passes(aten.convolution_backward.default, args, {})[0]
    answer = probe_passes(aten.convolution_backward.default, args, {}, passes, 4, limit_bytes=16_000)
    assert answer is Exactness.TOO_LARGE  # few channels


def test_ops_too_small_to_be_compared_in_part_are_compared_whole(tmp_path: pathlib.Path) -> None:
    """Two of three slices of this batch do not fit the probe, and one alone tells nothing."""
    args = (torch.randn(6, 8, 16, 16), torch.randn(6, 3, 16, 16), torch.randn(8, 3, 3, 3), None, [1, 1], [1, 1], [1, 1])
    args = (*args, False, [0, 0], 1, [True, False, False])
    passes = find_passes(aten.convolution_backward.default, args, {})[0]

    def probe(limit_bytes: float = 48_000, folder: str | None = None) -> Exactness:
        op = aten.convolution_backward.default
        return probe_passes(op, args, {}, passes, 3, limit_bytes=limit_bytes, folder=folder)

    assert probe() is Exactness.TOO_LARGE
    assert probe(folder=str(tmp_path)) is probe(math.inf)


def test_products_are_compared_as_a_whole(tmp_path: pathlib.Path) -> None:
    """Kernels add the products of a few rows in another order than those of many, at sizes that no rule knows."""
    some, other, parts = torch.randn(1024, 2048), torch.randn(2048, 768), 8
    passes = find_passes(aten.mm.default, (some, other), {})[0]

    def probe(folder: pathlib.Path | None) -> Exactness:
        where = None if folder is None else str(folder)
        return probe_passes(aten.mm.default, (some, other), {}, passes, parts, limit_bytes=4 << 20, folder=where)

    assert probe(tmp_path) is probe_passes(aten.mm.default, (some, other), {}, passes, parts)
    assert not list(tmp_path.iterdir())
    assert probe(None) is probe(tmp_path / "missing") is Exactness.TOO_LARGE


def test_memory_in_files_is_not_counted(tmp_path: pathlib.Path) -> None:
    native = library.load()
    scope = native.make_scope()
    former = native.enter_scope(scope)
    try:
        with memory_in_files(str(tmp_path)):
            large, small = torch.ones(1 << 20), torch.ones(1 << 9)
            with memory_in_files(None):
                other = torch.ones(1 << 19)
        assert scope.live_bytes == small.nbytes + other.nbytes
        assert large.sum() == 1 << 20
        del large
        assert scope.live_bytes == small.nbytes + other.nbytes
    finally:
        native.enter_scope(former)
        scope.close()
    with memory_in_files(str(tmp_path / "missing")), pytest.raises(RuntimeError, match="No such file"):
        torch.ones(1 << 20)


def test_refused_memory_is_not_logged_as_a_fault_of_fake_tensors(caplog: pytest.LogCaptureFixture) -> None:
    """Kernels of fake tensors allocate a few bytes."""
    native = library.load()
    scope = native.make_scope()
    args = (torch.ones(4, 8), [8], torch.ones(8), torch.ones(8), 1e-5)
    refusal = Infeasible(needed_bytes=2, budget_bytes=1, op="", is_whole_step=False)

    def refuse(*_: int) -> bool:
        raise refusal

    scope.set_make_room(refuse)
    former = native.enter_scope(scope)
    try:
        scope.limit_bytes = 0
        with pytest.raises(Infeasible):
            make_results(aten.native_layer_norm.default, args, {})
    finally:
        native.enter_scope(former)
        scope.close()
    assert not caplog.records


def test_a_smaller_probe_still_finds_a_wrong_rule(wrong_rule: None) -> None:
    args = (torch.randn(64, 5), 0)
    (wrong, _) = find_passes(aten.cumprod.default, args, {})
    limit = 2 * 64 * 5 * 4
    assert probe_passes(aten.cumprod.default, args, {}, wrong, 16, limit_bytes=limit) is Exactness.INEXACT


@pytest.mark.parametrize("share", [1 / 2, 1 / 8, 1 / 32])
@pytest.mark.parametrize("parts", [4, 27, 40])
def test_a_smaller_probe_claims_no_more_than_that_of_the_whole_op(parts: int, share: float) -> None:
    """Along adjacent elements, kernels compute a few in another way than many."""
    some, channel = torch.randn(256, 64), torch.rand(64) + 0.1
    backward = (torch.randn(256, 64), some, *([channel] * 5), True, 1e-5, [True, True, True])
    product = (torch.randn(512, 200), torch.randn(200, 96))
    for op, args in ((aten.native_batch_norm_backward.default, backward), (aten.mm.default, product)):
        limit = share * 2 * sum(each.numel() * 4 for each in args if isinstance(each, torch.Tensor))
        for passes in find_passes(op, args, {}):
            smaller = probe_passes(op, args, {}, passes, parts, limit_bytes=limit)
            assert not smaller.is_exact or probe_passes(op, args, {}, passes, parts).is_exact


@pytest.mark.parametrize(
    ("images", "channels", "is_enough"), [(2, 16, True), (64, 16, True), (2, 1, True), (64, 1, False)]
)
def test_few_sums_of_16_bits_are_compared_often(images: int, channels: int, is_enough: bool) -> None:
    """A convolution's bias gradient has one element a channel, and most other orders of its sum round to the same."""
    x = torch.empty(images, 16, 48, 48, dtype=torch.bfloat16, device="meta")
    gradient = torch.empty(images, channels, 48, 48, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(channels, 16, 3, 3, dtype=torch.bfloat16, device="meta")
    args = (gradient, x, weight, [channels], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, True])
    call = bind(aten.convolution_backward.default, args, {})
    results = [weight, torch.empty(channels, dtype=torch.bfloat16, device="meta")]
    ties = [each for each in _list_values(call, results) if isinstance(each, Ties)]
    assert len(ties) * channels >= 400
    assert may_tell(call, results) is is_enough


def test_a_probe_leaves_arguments_and_random_state_as_they_are() -> None:
    state = torch.random.get_rng_state()
    some = torch.randn(4, 3, 2, 2)
    torch.random.set_rng_state(state)
    statistics = (torch.zeros(3), torch.ones(3))
    args = (some, None, None, *statistics, True, 0.1, 1e-5)
    before = copy(args)
    passes = find_passes(aten.native_batch_norm.default, args, {})[0]
    assert is_exact(aten.native_batch_norm.default, args, {}, passes, 3)
    (passes, *_) = find_passes(aten.relu_.default, (some,), {})
    assert is_exact(aten.relu_.default, (some,), {}, passes, 3)
    assert all(torch.equal(args[index], before[index]) for index in (0, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_answers_are_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = aten.convolution.default
    passes = find_passes(op, CONVOLUTION, {})[1]
    store = ExactnessStore(tmp_path)
    answer = probe_passes(op, CONVOLUTION, {}, passes, 2, store=store)
    again = ExactnessStore(tmp_path)

    def fail(*_: Any) -> None:
        raise AssertionError("probed twice")

    monkeypatch.setattr("elbowroom.slicing.probe._probe", fail)
    assert probe_passes(op, CONVOLUTION, {}, passes, 2, store=again) is answer
    wide = (torch.randn(8, 4, 6, 7), *CONVOLUTION[1:])
    strided = (CONVOLUTION[0].to(memory_format=torch.channels_last), *CONVOLUTION[1:])
    for args, parts in ((wide, 2), (strided, 2), (CONVOLUTION, 3), ((*CONVOLUTION[:3], [2, 2], *CONVOLUTION[4:]), 2)):
        with pytest.raises(AssertionError, match="probed twice"):
            probe_passes(op, args, {}, find_passes(op, args, {})[1], parts, store=again)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(AssertionError, match="probed twice"):
        probe_passes(op, CONVOLUTION, {}, passes, 2, store=again)


@pytest.mark.parametrize(("op", "first", "second", "are_alike"), [
    ("addcdiv_", -0.0123, -0.0345, True),  # step sizes
    ("addcdiv_", -0.0123, 0.0345, False),
    ("addcdiv_", -0.0123, -0.5, False),  # a product with it needs no rounding
    ("addcdiv_", -0.0123, -1e-30, False),
    ("pow", 2.1, 2.2, False),  # the kernel depends on it
])  # fmt: skip
def test_a_number_that_differs_from_step_to_step_is_no_new_question(
    op: str, first: float, second: float, are_alike: bool
) -> None:
    tensor = torch.ones(64, 64)

    def describe(number: float) -> str:
        if op == "pow":
            call = bind(torch.ops.aten.pow.Tensor_Scalar, (tensor, number), {})
        else:
            call = bind(torch.ops.aten.addcdiv_.default, (tensor, tensor.clone(), tensor.clone()), {"value": number})
        passes = find_passes(call.op, *call.order(call.values))[0]
        return describe_pass(call, passes[0], (4,))

    assert (describe(first) == describe(second)) is are_alike


def test_a_probe_of_many_slices_compares_some(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def run(*args: Any) -> tuple[torch.Tensor, ...]:
        seen.append(1)
        return run_slice(*args)

    monkeypatch.setattr(calls, "run_slice", run)
    args = (torch.ones(50_000, 64),)
    passes = find_passes(torch.ops.aten.sqrt.default, args, {})[0]
    assert is_exact(torch.ops.aten.sqrt.default, args, {}, passes, lambda each: (each.loops[0].length,))
    assert 0 < len(seen) <= 2 * MOST_SLICES  # two draws


def test_two_processes_keep_each_others_answers(tmp_path: pathlib.Path) -> None:
    first, second = ExactnessStore(tmp_path), ExactnessStore(tmp_path)
    first.add("a", Exactness.PROVEN)
    second.add("b", Exactness.INEXACT)
    third = ExactnessStore(tmp_path)
    assert (third.find("a"), third.find("b"), third.find("c")) == (Exactness.PROVEN, Exactness.INEXACT, None)
    assert [each.name for each in tmp_path.iterdir()] == ["exactness.json"]


@pytest.mark.parametrize(
    "contents",
    [b"", b"\xff\xfe", b"[]", b"{}", b"[" * 100_000, b'{"format": 1, "answers": {}}', b'{"answers": {"a": "proven"}}'],
)
def test_a_corrupt_file_is_ignored(tmp_path: pathlib.Path, contents: bytes) -> None:
    (tmp_path / "exactness.json").write_bytes(contents)
    store = ExactnessStore(tmp_path)
    assert store.find("a") is None
    store.add("a", Exactness.PROVEN)
    assert ExactnessStore(tmp_path).find("a") is Exactness.PROVEN


def test_answers_that_others_may_have_written_are_ignored(tmp_path: pathlib.Path) -> None:
    ExactnessStore(tmp_path).add("a", Exactness.PROVEN)
    path = tmp_path / "exactness.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "answers": {"a": "certain"}}))
    assert ExactnessStore(tmp_path).find("a") is None
    path.write_text(json.dumps(document))
    path.chmod(0o666)
    assert ExactnessStore(tmp_path).find("a") is None


def test_a_store_that_cannot_be_written_is_kept_in_memory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    store = ExactnessStore(tmp_path / "file")
    store.add("a", Exactness.PROVEN)
    assert store.find("a") is Exactness.PROVEN
