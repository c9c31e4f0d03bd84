"""The cost room: prices of hand-made traces, by hand and by property. No torch."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.cost.price import price
from elbowroom.cost.roofline import count_moved_bytes, estimate_seconds, find_kind, find_rate, index_rates
from elbowroom.cost.shapes import element_bytes, touches_no_bytes
from elbowroom.cost.transfers import drag_seconds, offload_seconds, reload_seconds
from elbowroom.cost.workspace import estimate_workspace
from elbowroom.errors import TraceError
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.costs import Measurements
from elbowroom.ir.digest import digest
from elbowroom.ir.hardware import HardwareProfile, Link, Rate, Tier
from elbowroom.ir.trace import Op, Role, Storage, Trace, View

LINK = Link(
    upper="ram",
    lower="disk",
    out_latency_seconds=1e-3,
    out_bytes_per_second=1e9,
    back_latency_seconds=2e-3,
    back_bytes_per_second=5e8,
    half_duplex=True,
    drag_seconds_per_byte=5e-11,
    source="made up",
)
PROFILE = HardwareProfile(
    name="paper machine",
    device="cpu",
    isa="AVX512",
    rates=(
        Rate(kind="matmul", dtype="float32", per_second=1e11, source="made up"),
        Rate(kind="convolution", dtype="float32", per_second=5e10, source="made up"),
        Rate(kind="elementwise", dtype="float32", per_second=1e10, source="made up"),
        Rate(kind="elementwise", dtype="bfloat16", per_second=8e9, source="made up"),
    ),
    tiers=(Tier(name="ram", capacity_bytes=1 << 33), Tier(name="disk", capacity_bytes=1 << 36)),
    links=(LINK,),
    op_latency_seconds=1e-6,
    hook_seconds=1e-6,
    alignment_bytes=64,
)


def view(storage: int, shape: tuple[int, ...], *, version: int = 0, dtype: str = "float32") -> View:
    return View(storage=storage, version=version, dtype=dtype, shape=shape)


def make_op(name: str, reads: tuple[View, ...], writes: tuple[View, ...], flops: int = 0) -> Op:
    return Op(tick=0, name=name, reads=reads, writes=writes, flops=flops, barrier="")


def make_trace(*ops: Op) -> Trace:
    sizes: dict[int, int] = {}
    for op in ops:
        for each in op.reads + op.writes:
            nbytes = math.prod(each.shape) * element_bytes(each.dtype)
            sizes[each.storage] = max(sizes.get(each.storage, 0), nbytes)
    storages = tuple(
        Storage(id=index, nbytes=sizes.get(index, 0), role=Role.ACTIVATION, created=-1, released=len(ops), label="")
        for index in range(max(sizes, default=-1) + 1)
    )
    placed = tuple(dataclasses.replace(op, tick=tick) for tick, op in enumerate(ops))
    return Trace(name="made", device="cpu", ops=placed, storages=storages, saves=(), needs=(), end=len(ops))


RELU = make_op("aten.relu.default", (view(0, (1000, 1000)),), (view(1, (1000, 1000)),))
PRODUCT = make_op(
    "aten.mm.default", (view(0, (1000, 1000)), view(2, (1000, 1000))), (view(3, (1000, 1000)),), flops=2 * 10**9
)
TRANSPOSED = make_op("aten.t.default", (view(0, (1000, 1000)),), (view(0, (1000, 1000)),))
TRACE = make_trace(RELU, PRODUCT, TRANSPOSED)


def seconds_of(op: Op, profile: HardwareProfile = PROFILE) -> float:
    return estimate_seconds(op, make_trace(op).storages, index_rates(profile), profile)


def test_each_op_takes_the_longer_of_its_flops_and_its_bytes() -> None:
    costs = price(TRACE, PROFILE)
    assert costs.op_seconds == pytest.approx((1e-6 + 8e6 / 1e10, 1e-6 + 2e9 / 1e11, 1e-6))
    # A product of a vector is bound by the bytes of its matrix.
    thin = make_op("aten.mm.default", (view(0, (1, 4000)), view(1, (4000, 4000))), (view(2, (1, 4000)),), 32_000_000)
    assert seconds_of(thin) == pytest.approx(1e-6 + (64_000_000 + 32_000) / 1e10)


def test_launches_hide_behind_work_only_where_the_program_runs_ahead() -> None:
    cuda = dataclasses.replace(PROFILE, device="cuda")
    assert seconds_of(RELU, cuda) == pytest.approx(8e-4)
    assert seconds_of(RELU) == pytest.approx(8e-4 + 1e-6)


def test_what_names_bytes_without_touching_them_costs_only_its_launch() -> None:
    for name in ("aten.view.default", "aten.slice.Tensor", "aten.detach.default", "custom.shift.default"):
        assert touches_no_bytes(make_op(name, (view(0, (9, 9), version=3),), (view(0, (81,), version=3),)))
    assert touches_no_bytes(make_op("aten.empty.memory_format", (), (view(0, (1 << 20,)),)))
    in_place = make_op("aten.relu_.default", (view(0, (1000, 1000)),), (view(0, (1000, 1000), version=1),))
    assert not touches_no_bytes(in_place)
    assert seconds_of(in_place) == pytest.approx(1e-6 + 8e6 / 1e10)
    transposed = make_op("aten.t.default", (view(0, (1000, 1000)),), ())  # as traces have it
    assert seconds_of(transposed) == pytest.approx(1e-6)
    compared = make_op("aten.equal.default", (view(0, (1000, 1000)), view(1, (1000, 1000))), ())
    assert seconds_of(compared) == pytest.approx(1e-6 + 8e6 / 1e10)
    # An op without results (a check, a read of one number) is not a view.
    assert not touches_no_bytes(make_op("aten._assert_async.msg", (view(0, (4,)),), ()))


def test_bytes_are_those_that_are_there() -> None:
    def moved(op: Op, *sizes: int) -> int:
        storages = [
            Storage(id=index, nbytes=nbytes, role=Role.ACTIVATION, created=-1, released=1, label="")
            for index, nbytes in enumerate(sizes)
        ]
        return count_moved_bytes(op, storages)

    expanded = make_op("aten.mul.Tensor", (view(0, (100, 100)), view(1, (100, 100))), (view(2, (100, 100)),))
    assert moved(expanded, 40_000, 400, 40_000) == 80_400
    square = make_op("aten.mul.Tensor", (view(0, (10,)), view(0, (10,))), (view(1, (10,)),))
    assert moved(square, 40, 40) == 80
    table = make_op(
        "aten.embedding.default", (view(0, (50_000, 64)), view(1, (8,), dtype="int64")), (view(2, (8, 64)),)
    )
    assert moved(table, 12_800_000, 64, 2048) == 2 * 2048 + 64


@pytest.mark.parametrize(
    ("name", "flops", "kind"),
    [
        ("aten.convolution.default", 1, "convolution"),
        ("aten.convolution_backward.default", 0, "convolution"),
        ("aten.cudnn_convolution.default", 0, "convolution"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", 0, "attention"),
        ("aten.addmm.default", 0, "matmul"),
        ("aten.bmm.default", 0, "matmul"),
        ("aten.mkldnn_rnn_layer.default", 0, "matmul"),
        ("mine.fused_product.default", 10, "matmul"),
        ("aten.add.Tensor", 0, "elementwise"),
        ("aten.native_batch_norm.default", 0, "elementwise"),
    ],
)
def test_kinds(name: str, flops: int, kind: str) -> None:
    assert find_kind(make_op(name, (), (), flops)) == kind


def test_a_rate_that_was_not_measured_is_taken_from_its_nearest() -> None:
    rates = index_rates(PROFILE)
    assert find_rate(rates, "attention", "float32") == 1e11
    assert find_rate(rates, "convolution", "bfloat16") == 5e10
    assert find_rate(rates, "matmul", "float64") == 5e10
    assert find_rate(rates, "elementwise", "bfloat16") == 8e9
    assert find_rate(rates, "elementwise", "int64") == 1e10


def test_flops_that_were_not_counted_are_guessed_from_shapes() -> None:
    uncounted = dataclasses.replace(PRODUCT, flops=0)
    assert seconds_of(uncounted) == pytest.approx(seconds_of(PRODUCT))
    heads = view(0, (2, 12, 128, 64)), view(1, (2, 12, 256, 64)), view(2, (2, 12, 256, 64))
    attention = make_op("aten._scaled_dot_product_flash_attention.default", heads, (view(3, (2, 12, 128, 64)),))
    assert seconds_of(attention) == pytest.approx(1e-6 + 2 * 2 * 2 * 12 * 128 * 256 * 64 / 1e11)


def test_measurements_replace_estimates_op_by_op() -> None:
    measured = Measurements(op_seconds=(0.0, 0.25, 0.5), workspace_bytes=(0, 7, 9), step_seconds=2.0, stall_seconds=0.5)
    costs = price(TRACE, PROFILE, measured)
    assert costs.op_seconds == (0.0, 0.25, 0.5)
    assert costs.workspace_bytes == (0, 7, 9)
    assert costs.overhead_seconds == pytest.approx(0.75)
    assert costs.measured and not price(TRACE, PROFILE).measured
    assert price(TRACE, PROFILE).overhead_seconds == 0
    untimed = dataclasses.replace(measured, step_seconds=0.0)
    assert price(TRACE, PROFILE, untimed).overhead_seconds == 0


def test_costs_carry_the_trace_and_the_machine() -> None:
    costs = price(TRACE, PROFILE)
    assert costs.trace_digest == digest(TRACE)
    assert price(TRACE, PROFILE, trace_digest="known").trace_digest == "known"
    assert (costs.profile_name, costs.link, costs.alignment_bytes, costs.hook_seconds) == (
        "paper machine",
        LINK,
        64,
        1e-6,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"op_seconds": (0.1, 0.1)},
        {"workspace_bytes": (1, 2, 3, 4)},
        {"op_seconds": (0.1, -0.1, 0.1)},
        {"op_seconds": (0.1, math.nan, 0.1)},
        {"workspace_bytes": (1, -1, 1)},
        {"step_seconds": math.inf},
    ],
)
def test_measurements_of_something_else_are_refused(change: dict[str, object]) -> None:
    right = Measurements(op_seconds=(0.1,) * 3, workspace_bytes=(1,) * 3, step_seconds=1.0, stall_seconds=0.0)
    price(TRACE, PROFILE, right)
    with pytest.raises(TraceError):
        price(TRACE, PROFILE, dataclasses.replace(right, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"links": ()},
        {"links": (dataclasses.replace(LINK, back_bytes_per_second=0.0),)},
        {"rates": ()},
        {"rates": PROFILE.rates[:2]},
        {"rates": PROFILE.rates[2:]},
        {"rates": (*PROFILE.rates[1:], dataclasses.replace(PROFILE.rates[0], per_second=0.0))},
    ],
)
def test_profiles_that_cannot_price_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(TraceError):
        price(TRACE, dataclasses.replace(PROFILE, **change))


def test_transfers() -> None:
    assert offload_seconds(LINK, 10**9) == pytest.approx(1.001)
    assert reload_seconds(LINK, 10**9) == pytest.approx(2.002)
    assert offload_seconds(LINK, 0) == reload_seconds(LINK, 0) == 0
    assert drag_seconds(LINK, 10**9) == pytest.approx(0.05)
    with pytest.raises(TraceError):
        offload_seconds(dataclasses.replace(LINK, out_bytes_per_second=0.0), 1)


def convolution(batch: int, channels: int, size: int, outputs: int, kernel: int, dtype: str = "float32") -> Op:
    return make_op(
        "aten.convolution.default",
        (
            view(0, (batch, channels, size, size), dtype=dtype),
            view(1, (outputs, channels, kernel, kernel), dtype=dtype),
        ),
        (view(2, (batch, outputs, size, size), dtype=dtype),),
    )


# Measured with torch.profiler on a CPU, two threads; the estimate is never below, and here never far above.
@pytest.mark.parametrize(
    ("op", "measured_bytes", "slack"),
    [
        (convolution(8, 64, 224, 64, 3), 102_907_904, 1.1),
        (convolution(2, 16, 112, 64, 1, "bfloat16"), 7_227_520, 1.6),
        (
            make_op(
                "aten.convolution_backward.default",
                (view(0, (8, 64, 224, 224)), view(1, (8, 64, 224, 224)), view(2, (64, 64, 3, 3))),
                (view(3, (8, 64, 224, 224)), view(4, (64, 64, 3, 3)), view(5, (64,))),
            ),
            205_676_928,
            1.25,
        ),
        (
            make_op(
                "aten.native_batch_norm_backward.default",
                (view(0, (8, 256, 56, 56)), view(1, (8, 256, 56, 56)), view(2, (256,))),
                (view(3, (8, 256, 56, 56)), view(4, (256,)), view(5, (256,))),
            ),
            25_690_112,
            1.01,
        ),
        (
            make_op(
                "aten._scaled_dot_product_flash_attention_for_cpu.default",
                tuple(view(index, (2, 4, 512, 64), dtype="bfloat16") for index in range(3)),
                (view(3, (2, 4, 512, 64), dtype="bfloat16"), view(4, (2, 4, 512))),
            ),
            427_008,
            1.01,
        ),
        (
            make_op(
                "aten.mkldnn_rnn_layer.default",
                (view(0, (64, 16, 256)), view(1, (2048, 256)), view(2, (2048, 512)), view(3, (2048,))),
                (view(4, (64, 16, 512)), view(5, (1 << 20,), dtype="uint8")),
            ),
            14_881_336,
            1.1,
        ),
        (
            make_op(
                "aten.add.Tensor",
                (view(0, (2, 197, 768), dtype="bfloat16"), view(1, (2, 197, 768))),
                (view(2, (2, 197, 768)),),
            ),
            1_210_368,
            1.01,
        ),
        (
            make_op(
                "aten.mean.dim", (view(0, (8, 256, 384), dtype="bfloat16"),), (view(1, (256, 384), dtype="bfloat16"),)
            ),
            3_538_944,
            1.01,
        ),
        (
            make_op(
                "aten.kthvalue.default",
                (view(0, (512, 300)),),
                (view(1, (512,)), view(2, (512,), dtype="int64")),
            ),
            1_843_200,
            1.01,
        ),
        (
            make_op(
                "aten.isin.Tensor_Tensor",
                (view(0, (100_000,), dtype="int64"), view(1, (50_000,), dtype="int64")),
                (view(2, (100_000,), dtype="bool"),),
            ),
            5_600_000,
            1.01,
        ),
        (make_op("aten.allclose.default", (view(0, (1000, 1)), view(1, (1, 1000))), ()), 12_004_000, 1.35),
        (
            make_op("aten._euclidean_dist.default", (view(0, (3000, 300)), view(1, (30, 300))), (view(2, (3000, 30)),)),
            6_888_240,
            1.01,
        ),
        (
            make_op("aten._euclidean_dist.default", (view(0, (512, 300)), view(1, (200, 300))), (view(2, (512, 200)),)),
            860_096,
            1.01,
        ),
        (make_op("aten.clone.default", (view(0, (300, 512)),), (view(1, (300, 512)),)), 14_400, 1.01),
    ],
)
def test_workspaces_cover_what_was_measured(op: Op, measured_bytes: int, slack: float) -> None:
    assert measured_bytes <= estimate_workspace(op) <= slack * measured_bytes


def backward(op: Op) -> Op:
    source, weight, *_ = op.reads
    made = dataclasses.replace(source, storage=3), dataclasses.replace(weight, storage=4)
    return make_op("aten.convolution_backward.default", (op.writes[0], source, weight), made)


@pytest.mark.parametrize(
    ("op", "is_dilated", "measured_bytes", "slack"),
    [
        # All windows: nine times the input, for the whole batch.
        (convolution(4, 128, 28, 32, 3, "bfloat16"), False, 7_225_344, 1.2),
        (convolution(1, 32, 96, 20, 7, "float64"), False, 115_605_504, 1.1),
        # A kernel larger than the images, and one with gaps, whose windows look the same.
        (backward(convolution(6, 128, 2, 32, 3)), False, 1_219_840, 1.2),
        (backward(convolution(2, 2048, 16, 256, 3)), True, 188_743_936, 1.2),
    ],
)
def test_workspaces_without_avx_512_cover_what_was_measured(
    op: Op, is_dilated: bool, measured_bytes: int, slack: float
) -> None:
    found = estimate_workspace(op, isa="AVX2", is_dilated=is_dilated)
    assert measured_bytes <= found <= slack * measured_bytes
    # Where the processor is not known, all that may be counts.
    assert estimate_workspace(op, isa="") >= estimate_workspace(op, isa="AVX512")


def test_most_ops_allocate_nothing_of_size() -> None:
    assert estimate_workspace(TRANSPOSED) == 0
    assert estimate_workspace(RELU) <= 64
    assert estimate_workspace(PRODUCT) <= 64
    # What is not known at all is taken to copy what it touches.
    assert estimate_workspace(dataclasses.replace(RELU, name="mine.anything.default")) == 8_000_000


MIB = 1 << 20
TENSOR_CORES = {("convolution", "float32"): 2.0, ("convolution", "float16"): 4.0, ("matmul", "float32"): 1.0}
NO_TENSOR_CORES = {("convolution", "float32"): 2.0, ("convolution", "float16"): 2.0, ("matmul", "float32"): 3.0}


@pytest.mark.parametrize(
    ("op", "rates", "expected_bytes"),
    [
        # In another layout: input and result of 12.25 MiB each in half precision, and a weight.
        (convolution(8, 64, 112, 64, 3, "float16"), TENSOR_CORES, 2 * 12.25 * MIB + 64 * 64 * 9 * 2),
        (convolution(8, 64, 112, 64, 3), TENSOR_CORES, 2 * 24.5 * MIB + 64 * 64 * 9 * 4),
        # The second convolution of VGG-16 with 424 images would like 10.4 GiB of copies.
        (convolution(424, 64, 224, 64, 3), TENSOR_CORES, 1024 * MIB),
        (convolution(424, 64, 224, 64, 3), NO_TENSOR_CORES, 128 * MIB),
        (convolution(424, 64, 224, 64, 3, "float16"), NO_TENSOR_CORES, 128 * MIB),
        (convolution(424, 64, 224, 64, 3, "bfloat16"), NO_TENSOR_CORES, 128 * MIB),
    ],
)
def test_cudnn_copies_for_tensor_cores_within_a_limit(
    op: Op, rates: dict[tuple[str, str], float], expected_bytes: float
) -> None:
    assert estimate_workspace(op, rates) == expected_bytes
    source, weight, *_ = op.reads
    made = dataclasses.replace(source, storage=3), dataclasses.replace(weight, storage=4)
    backward = make_op("aten.convolution_backward.default", (op.writes[0], source, weight), made)
    assert estimate_workspace(backward, rates) == expected_bytes


@pytest.mark.parametrize(("name", "most_bytes"), [("v100", 128 * MIB), ("p100", 128 * MIB), ("a100", 1024 * MIB)])
def test_shipped_cuda_devices_take_little_for_convolutions(name: str, most_bytes: int) -> None:
    trace = make_trace(convolution(424, 64, 224, 64, 3))
    assert price(trace, load_shipped(name), trace_digest="known").workspace_bytes == (most_bytes,)
    assert price(trace, PROFILE, trace_digest="known").workspace_bytes[0] > 5000 * MIB


sizes = some.integers(1, 300)
names = some.sampled_from(
    [
        "aten.convolution.default",
        "aten.convolution_backward.default",
        "aten.mm.default",
        "aten.add.Tensor",
        "aten.sum.dim_IntList",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        "aten.mkldnn_rnn_layer_backward.default",
        "aten.native_group_norm.default",
        "aten.sort.default",
        "aten.never_heard_of.default",
        "mine.op",
    ]
)
shapes = some.lists(sizes, max_size=5).map(tuple)
dtypes = some.sampled_from(["float32", "bfloat16", "float64", "int64", "bool", "float8_e4m3fn", "complex64"])
views = some.builds(view, some.integers(0, 4), shapes, version=some.integers(0, 1), dtype=dtypes)
ops = some.builds(
    make_op,
    names,
    some.lists(views, max_size=5).map(tuple),
    some.lists(views, max_size=3).map(tuple),
    some.integers(0, 10**12),
)


@given(some.lists(ops, max_size=4))
def test_any_trace_has_a_price(made: list[Op]) -> None:
    trace = make_trace(*made)
    costs = price(trace, PROFILE, trace_digest="known")
    assert len(costs.op_seconds) == len(costs.workspace_bytes) == len(trace.ops)
    assert all(math.isfinite(seconds) and seconds >= PROFILE.op_latency_seconds for seconds in costs.op_seconds)
    assert all(isinstance(nbytes, int) and nbytes >= 0 for nbytes in costs.workspace_bytes)


@given(ops, some.floats(1.1, 100))
def test_a_faster_machine_is_never_slower(op: Op, factor: float) -> None:
    faster = dataclasses.replace(
        PROFILE,
        rates=tuple(dataclasses.replace(rate, per_second=rate.per_second * factor) for rate in PROFILE.rates),
    )
    assert seconds_of(op, faster) <= seconds_of(op)


@given(some.integers(1, 8), some.integers(1, 200), some.integers(1, 64), some.sampled_from([1, 3]))
def test_a_larger_batch_takes_no_less_workspace(batch: int, channels: int, size: int, kernel: int) -> None:
    # Images are alike: twice the batch is at most twice the bytes.
    one = estimate_workspace(convolution(batch, channels, size, channels, kernel))
    two = estimate_workspace(convolution(2 * batch, channels, size, channels, kernel))
    assert one <= two <= 2 * one


def test_pricing_takes_no_torch() -> None:
    program = "import sys, elbowroom.cost.price, elbowroom.hardware.shipped; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
