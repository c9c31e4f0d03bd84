"""Jobs of several processes on one machine: what every rank runs, and how tests start ranks and see them end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import pathlib
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import elbowroom
from elbowroom import plan_cache
from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.room import Room
from tests.native.outside_meter import register_meter

WIDTH = 64
STEPS = 6
PLAN_BYTES = 1 << 20


@dataclasses.dataclass
class End:
    """How one rank has ended: its exit code, its result (None if it has none), and what it wrote to stderr."""

    code: int | None
    result: Any
    text: str


def run_ranks(
    folder: pathlib.Path,
    function: str,
    *args: Any,
    ranks: int = 2,
    backend: str = "gloo",
    seconds: float = 240,
    ends: Sequence[int] = (),
) -> list[End]:
    """Run a function of this module in several processes, and wait for them.

    Args:
        function: its name, or "module.name" of another module of tests. It is called with the number of the rank and
            `args`; the process group exists.
        backend: of the process group.
        seconds: after so many, those that still run are killed; their exit code is None.
        ends: ranks for which to wait; by default all. The others are killed then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # PyTorch is imported once for all ranks
    processes = [
        context.Process(target=_run, args=(rank, ranks, backend, str(folder), function, args), daemon=True)
        for rank in range(ranks)
    ]
    for each in processes:
        each.start()
    end = time.monotonic() + seconds
    for rank in ends or range(ranks):
        processes[rank].join(max(0.0, end - time.monotonic()))
    codes = [each.exitcode for each in processes]
    for each in processes:
        each.kill()
        each.join()
    found = []
    for rank, code in enumerate(codes):
        result = folder / f"result{rank}.pt"
        value = torch.load(result, weights_only=False) if result.exists() else None
        found.append(End(code, value, (folder / f"text{rank}").read_text(errors="replace")))
    return found


def _run(rank: int, ranks: int, backend: str, folder: str, function: str, args: tuple[Any, ...]) -> None:
    text = os.open(f"{folder}/text{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(text, 2)
    os.environ["ELBOWROOM_OP_TIME_STORE"] = "0"
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    try:
        module, _, name = function.rpartition(".")
        result = getattr(importlib.import_module(f"tests.{module or 'rank_jobs'}"), name)(rank, *args)
    except Exception:
        traceback.print_exc()
        os._exit(3)
    torch.save(result, f"{folder}/part{rank}.pt")
    os.replace(f"{folder}/part{rank}.pt", f"{folder}/result{rank}.pt")
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def find_device() -> torch.device:
    """The device that the ranks' process group communicates on."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


# -- models ------------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 8)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)).square().mean()


class Wide(nn.Module):
    """Layers whose updates need most of the memory beside the gradient bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


class SynchronisedNorm(nn.Module):
    """Batch norm over the batches of all ranks, which `SyncBatchNorm` does on GPUs only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed.nn

        sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
        mean, square = torch.distributed.nn.functional.all_reduce(sums) / (
            x.numel() / x.shape[1] * dist.get_world_size()
        )
        scale = self.weight / (square - mean.square() + 1e-5).sqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


class Convolutions(nn.Module):
    """A small CNN with both kinds of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), SynchronisedNorm(16), nn.ReLU())
        self.head = nn.Linear(16, 8)

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.second]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3))).square().mean()


class Experts(nn.Module):
    """A mixture of experts: each row goes to one of four, so that some may get none.

    Args:
        skips: whether those are not called then.
    """

    def __init__(self, skips: bool = True) -> None:
        super().__init__()
        self.skips = skips
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )

    def blocks(self) -> list[nn.Module]:
        return list(self.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, -2)
        share, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows) or not self.skips:
                out = out.index_add(0, rows, expert(x[rows]) * share[rows, None])
        return out.square().mean()


class ReducedInPlace(nn.Module):
    """Tensor parallelism as Megatron does it: a sum over the ranks that takes the place of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.gelu(_SumInPlace.apply(layer(x)))
        return x.square().mean()


class _SumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Decoder(nn.Module):
    """A layer whose projections are parallel over tensors, and whose norms are over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        heads = [each(y).unflatten(-1, (-1, 16)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        x = x + self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Scaled(Decoder):
    """A layer that scales a weight for each use. `fully_shard` gathers it as it was."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.mul_(1.5)
        return super().forward(x)


class Decoders(nn.Module):
    """Some layers, and a projection."""

    def __init__(self, layer: type[Decoder] = Decoder) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Buffered(nn.Module):
    """Batch norm and masks with much state that is no parameter: DistributedDataParallel sends it from rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))
        for index in range(4):
            self.register_buffer(f"mask{index}", torch.ones(512, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            mask = getattr(self, f"mask{index}")
            x = functional.gelu(norm(layer(x))) + mask
            with torch.no_grad():
                mask.mul_(0.99).add_(x.detach(), alpha=0.01)
        return x.square().mean()


class Checkpointed(Transformer):
    """A transformer that recomputes its layers by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for layer in self.layers.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def replicate(**options: Any) -> Callable[[nn.Module], nn.Module]:
    """A function that makes replicas with several buckets."""
    return lambda model: DistributedDataParallel(model, bucket_cap_mb=0.05, **options)


def shard(
    shape: tuple[int, ...] = (), names: tuple[str, ...] | None = None, **options: Any
) -> Callable[[nn.Module], nn.Module]:
    """A function that shards each block of a model, and the rest of it. `shape`, `names`: of the mesh of ranks."""

    def apply(model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(find_device().type, shape or (dist.get_world_size(),), mesh_dim_names=names)
        for block in model.blocks():  # type: ignore[operator]
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return apply


def shard_mixed(model: nn.Module) -> nn.Module:
    """Shard a model that computes in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return shard(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))(model)


def shard_ahead(model: nn.Module) -> nn.Module:
    """Shard a model that gathers the weights of the next block early."""
    shard()(model)
    blocks = model.blocks()  # type: ignore[operator]
    for one, next_one in itertools.pairwise(blocks):
        one.set_modules_to_forward_prefetch([next_one])
        next_one.set_modules_to_backward_prefetch([one])
    return model


def shard_and_replicate(model: nn.Module) -> nn.Module:
    """Shard a model over pairs of ranks, and replicate the shards."""
    return shard(shape=(dist.get_world_size() // 2, 2), names=("replicate", "shard"))(model)


def parallelize(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Spread the layers of a model over tensors and over the sequence."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )  # fmt: skip

    mesh = mesh or init_device_mesh(find_device().type, (dist.get_world_size(),))
    for layer in model.layers:  # type: ignore[union-attr]
        columns = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("query", "key", "value", "up")}
        rows = {name: RowwiseParallel(output_layouts=Shard(1), use_local_output=False) for name in ("out", "down")}
        norms = {f"norms.{index}": SequenceParallel() for index in range(2)}
        entry = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
        parallelize_module(layer, mesh, {"": entry, **columns, **rows, **norms})
    return parallelize_module(
        model, mesh, {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    )


def parallelize_and_shard(model: nn.Module) -> nn.Module:
    """Spread a model over tensors on pairs of ranks, and shard it over these."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(find_device().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize(model, mesh["tensor"])
    for block in model.blocks():  # type: ignore[operator]
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def compile_replica(model: nn.Module) -> nn.Module:
    """Make replicas whose graphs run op by op."""
    return DistributedDataParallel(torch.compile(model, backend="aot_eager"))


def compress(model: nn.Module) -> nn.Module:
    """Make replicas that send gradients in half precision. What decompresses them runs in gloo's thread on one rank."""

    def send(state, bucket):  # type: ignore[no-untyped-def]  # DDP does not take annotations that are strings
        sent = bucket.buffer().half().div_(dist.get_world_size())
        if dist.get_rank() == 0:
            time.sleep(0.01)  # rank 1 waits for this one's gradients
        future = dist.all_reduce(sent, async_op=True).get_future()
        if dist.get_rank() == 0:
            future.wait()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    replicas = replicate()(model)
    replicas.register_comm_hook(None, send)  # type: ignore[operator]
    return replicas


def compress_by_rank(model: nn.Module) -> nn.Module:
    """Make replicas that send low-rank approximations: the hook goes on in gloo's thread.

    There is one bucket: with several, gloo mixes up what the ranks send, also in plain PyTorch.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    replicas = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1)
    replicas.register_comm_hook(state, powerSGD_hook)
    return replicas


def zero(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer whose state is spread over the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-2)


@dataclasses.dataclass(frozen=True)
class RankCase:
    """A job of every rank.

    Attributes:
        shape: of a batch.
        spread: makes the model one of several ranks.
        micro_batches: of a step; all but the last are not synchronised.
        varies: whether batches of ranks differ in length.
        joins: whether rank 1 has one batch less.
        shares: whether all ranks have the same batch.
        clips: whether gradients are clipped.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    spread: Callable[[nn.Module], nn.Module]
    micro_batches: int = 1
    varies: bool = False
    joins: bool = False
    shares: bool = False
    clips: bool = False


WORDS, IMAGES = (16, 32, WIDTH), (16, 3, 24, 24)

CASES = {
    "transformer": RankCase(Transformer, WORDS, adamw, replicate()),
    "transformer, buckets hold the gradients": RankCase(
        Transformer, WORDS, adamw, replicate(gradient_as_bucket_view=True, static_graph=True)
    ),
    "static graph": RankCase(Transformer, WORDS, adamw, replicate(static_graph=True)),
    "convolutions": RankCase(Convolutions, IMAGES, sgd, replicate(gradient_as_bucket_view=True)),
    "experts": RankCase(Experts, WORDS, adamw, replicate(find_unused_parameters=True)),
    "accumulation": RankCase(
        Transformer, (8, 32, WIDTH), sgd, replicate(gradient_as_bucket_view=True), micro_batches=3
    ),
    "wide layers": RankCase(Wide, (64, 512), adamw, DistributedDataParallel, micro_batches=2),
    "uneven batches": RankCase(Transformer, WORDS, sgd, replicate(), joins=True),
    "reduced in place": RankCase(ReducedInPlace, (1024, WIDTH), sgd, lambda model: model),
}

SHARDED = {
    "sharded transformer": RankCase(Transformer, WORDS, adamw, shard()),
    "sharded transformer that stays gathered": RankCase(Transformer, WORDS, adamw, shard(reshard_after_forward=False)),
    "sharded transformer in bfloat16": RankCase(Transformer, WORDS, adamw, shard_mixed),
    "sharded convolutions": RankCase(Convolutions, IMAGES, sgd, shard()),
    "sharded experts": RankCase(functools.partial(Experts, skips=False), WORDS, adamw, shard()),
    "sharded accumulation": RankCase(Transformer, (8, 32, WIDTH), sgd, shard(), micro_batches=3),
}
CASES |= SHARDED
CASES |= {
    "buffers": RankCase(Buffered, (512, WIDTH), sgd, replicate()),
    "compressed": RankCase(Transformer, WORDS, adamw, compress, clips=True),
    "compressed by rank": RankCase(Wide, (512, 512), sgd, compress_by_rank),
    "checkpointed": RankCase(Checkpointed, WORDS, adamw, replicate()),
    "compiled": RankCase(Transformer, WORDS, adamw, compile_replica),
    "spread optimizer": RankCase(Transformer, WORDS, zero, replicate()),
    "sharded decoders": RankCase(Decoders, WORDS, adamw, shard()),
    "sharded, clipped": RankCase(Transformer, WORDS, adamw, shard(), clips=True),
    "sharded, gathered ahead": RankCase(Decoders, WORDS, adamw, shard_ahead),
    "sharded, weights scaled in place": RankCase(functools.partial(Decoders, Scaled), WORDS, adamw, shard()),
    "sharded, checkpointed": RankCase(Checkpointed, WORDS, adamw, shard()),
    "sharded and replicated": RankCase(Decoders, WORDS, adamw, shard_and_replicate),
    "tensor parallel": RankCase(Decoders, WORDS, adamw, parallelize, shares=True, clips=True),
    "tensor parallel and sharded": RankCase(Decoders, WORDS, adamw, parallelize_and_shard, shares=True),
}


@dataclasses.dataclass
class Outcome:
    """What a rank found: tensors to compare, modes and peaks of the steps, and the plan that was agreed on."""

    tensors: dict[str, torch.Tensor]
    modes: list[str] = dataclasses.field(default_factory=list)
    peaks: list[int] = dataclasses.field(default_factory=list)
    outside_peak: int = 0
    budget: int = 0
    plan: str = ""
    moved: int = 0
    error: str = ""


ELSEWHERE_BYTES = 512
"""Small tensors of DDP and `fully_shard` from before `fit`."""


Found = list[dict[tuple[str, Any], Any]]
"""What each rank found: an Outcome by the name of the job and the budget of its room, None for the plain one; and by
the names of jobs that save and load a checkpoint what came of it, without and with rooms."""


def list_cases(
    rooms: Sequence[tuple[str, int, dict[str, Any]]], quick: Collection[int], indices: Sequence[int] | None = None
) -> list[Any]:
    """Return names and budgets of rooms as parameters of a test. All but those with `quick` indices are slow."""
    import pytest  # not in the ranks

    chosen = range(len(rooms)) if indices is None else indices
    return [pytest.param(*rooms[each][:2], marks=() if each in quick else pytest.mark.slow) for each in chosen]


def run_rooms(
    folder: pathlib.Path,
    rooms: Sequence[tuple[str, int, dict[str, Any]]],
    profile: HardwareProfile,
    *,
    checkpoints: Sequence[tuple[str, str, int]] = (),
    ranks: int = 2,
) -> Found:
    """Run jobs on several ranks, each plain and in its rooms.

    Args:
        rooms: names of cases with budgets and options.
        checkpoints: names of cases that save a checkpoint, of those that go on from it, and budgets of their rooms.
    """
    plain: list[Any] = [(name, None, {}) for name in dict.fromkeys(each[0] for each in rooms)]
    ends = run_ranks(folder, "train_all", [*plain, *rooms], checkpoints, str(folder), profile, ranks=ranks)
    assert all(end.code == 0 for end in ends), "\n".join(end.text for end in ends)
    return [end.result for end in ends]


def check_resumed(found: tuple[Resumed, Resumed]) -> None:
    """Check that a job that has saved and loaded a checkpoint in rooms has the bits of one without."""
    plain, managed = found
    assert plain.tensors.keys() == managed.tensors.keys()
    assert [what for what in plain.tensors if not torch.equal(plain.tensors[what], managed.tensors[what])] == []


def check_outcome(plain: Outcome, managed: Outcome, budget: int) -> None:
    """Check that a job in a room has the bits of the plain one, and that both meters found it within its budget."""
    assert not plain.error and not managed.error
    assert plain.tensors.keys() == managed.tensors.keys()
    assert [what for what in plain.tensors if not torch.equal(plain.tensors[what], managed.tensors[what])] == []
    assert any(what.startswith("gradient of") for what in plain.tensors)
    assert 0 < max(managed.peaks) <= budget
    assert 0 < managed.outside_peak <= budget + ELSEWHERE_BYTES
    assert managed.moved > 0


class AllocatorMeter:
    """Meters the bytes of one job: on a CPU by a meter before PyTorch's allocator, on a card by the allocator."""

    def __init__(self) -> None:
        self._meter = None if find_device().type == "cuda" else register_meter()
        gc.collect()
        self._before = 0 if self._meter is None else self._meter.reset_peak()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats() if self._meter is None else self._meter.reset_peak()

    def read_peak(self) -> int:
        """Return the peak since `reset_peak`."""
        if self._meter is None:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        return int(self._meter.read_peak()) - self._before


def train(
    rank: int,
    case: RankCase,
    budget: int | None,
    profile: HardwareProfile,
    steps: int = STEPS,
    inspect: Callable[[Room], None] = lambda room: None,
    **options: Any,
) -> Outcome:
    """Train, in a room if there is a budget, which `inspect` gets after the last step."""
    torch.manual_seed(0)
    meter = AllocatorMeter()
    room: Room | None = None
    try:
        model = case.spread(case.model().to(find_device()))
        optimizer = case.optimizer(model.parameters())
        if budget is not None:
            options = {"min_offload_bytes": 1 << 10, "profile": profile} | options
            room = elbowroom.fit(model, optimizer, budget, **options)
        meter.reset_peak()
        losses = []
        batches = steps - rank if case.joins else steps
        with model.join() if case.joins else contextlib.nullcontext():  # type: ignore[operator]
            for index in range(batches):
                optimizer.zero_grad()
                with contextlib.nullcontext() if room is None else room.step():
                    losses.append(_step(rank, case, model, optimizer, index))
        peak_bytes = meter.read_peak()
        outcome = Outcome(_list_tensors(model, optimizer) | {"losses": torch.stack(losses)})
        outcome.outside_peak = peak_bytes
        if room is not None:
            inspect(room)
            records = room.journal().steps
            outcome.modes = [each.mode.value for each in records]
            outcome.peaks = [each.peak_bytes or 0 for each in records]
            outcome.budget = room.budget_bytes
            outcome.plan = "" if room._modes.agreed is None else room._modes.agreed.digest
            outcome.moved = sum(
                int(room.metrics()[f"total_{name}"]) for name in ("offloaded_bytes", "recomputed_segments")
            )
        return outcome
    finally:
        if room is not None:
            room.detach()


def _step(rank: int, case: RankCase, model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> torch.Tensor:
    for part in range(case.micro_batches):
        shape = (case.shape[0] + (rank + index) % 3, *case.shape[1:]) if case.varies else case.shape
        seed = 100 * index + 10 * part + (0 if case.shares else rank)
        batch = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(find_device())
        is_last = part == case.micro_batches - 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            is_last = True
        with contextlib.nullcontext() if is_last else model.no_sync():  # type: ignore[operator]
            loss = model(batch)
            loss.backward()
    if case.clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach().clone()


def _list_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of parameters, buffers, gradients and optimizer state; the own part of those that are sharded."""
    found = dict(model.state_dict())
    found |= {f"gradient of {name}": each.grad for name, each in model.named_parameters() if each.grad is not None}
    for position, state in enumerate(optimizer.state.values()):
        found |= {f"{key} {position}": each for key, each in state.items() if isinstance(each, torch.Tensor)}
    local = {what: each.to_local() if hasattr(each, "to_local") else each for what, each in found.items()}
    return {what: each.detach().clone() for what, each in local.items()}


def train_all(
    rank: int,
    jobs: Sequence[tuple[str, int | None, dict[str, Any]]],
    checkpoints: Sequence[tuple[str, str, int]],
    folder: str,
    profile: HardwareProfile,
) -> dict[tuple[str, Any], Any]:
    """Train cases one after the other; by name and budget. Options that are lists have a value for each rank. Then save
    and load checkpoints (`resume_all`).
    """
    found: dict[tuple[str, Any], Any] = {}
    for name, budget, options in jobs:
        own = {key: each[rank] if isinstance(each, list) else each for key, each in options.items()}
        try:
            found[name, budget] = train(rank, CASES[name], own.pop("budget", budget), profile, **own)
        except Exception as error:
            traceback.print_exc()
            found[name, budget] = Outcome({}, error=f"{type(error).__name__}: {error}")
        dist.barrier()
    return found | resume_all(rank, checkpoints, folder, profile)


# -- ranks that differ, and ranks that fail ----------------------------------------------------------------------------


def _make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = CASES["transformer"].spread(Transformer())
    return model, sgd(model.parameters())


def _refuse(call: Callable[[], Any]) -> str:
    """The error that a call raises; "" if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differ(rank: int, profile: HardwareProfile) -> dict[str, Any]:
    """Rooms of ranks that have something else each."""
    found: dict[str, Any] = {}

    def fit(budget: int = 3 << 20, changed: bool = False, **options: Any) -> None:
        model, optimizer = _make(rank)
        if changed and rank == 1:
            model.register_buffer("other", torch.ones(2))
        with elbowroom.fit(model, optimizer, budget, profile=profile, **options) as room:
            found["least budget"] = room.budget_bytes

    found["options"] = _refuse(lambda: fit(settling_steps=3 + rank))
    found["model"] = _refuse(lambda: fit(changed=True))
    found["budgets"] = _refuse(lambda: fit((3 + rank) << 20, if_ranks_differ="stop"))
    found["other budgets"] = _refuse(lambda: fit((4 - rank) << 20))
    version = elbowroom.__version__
    elbowroom.__version__ = f"{version}.{rank}"
    found["versions"] = _refuse(fit)
    elbowroom.__version__ = version
    case = dataclasses.replace(CASES["transformer"], varies=True)
    found["steps"] = _refuse(lambda: train(rank, case, 8 << 20, profile, 4, if_ranks_differ="stop"))
    found["dynamic"] = train(rank, case, 8 << 20, profile, 5, if_ranks_differ="dynamic").modes
    return found


def change_budgets(rank: int, profile: HardwareProfile) -> dict[str, Any]:
    """A room whose budget changes, and exchanges of a room that only follows its plan."""
    found: dict[str, Any] = {}
    meter = AllocatorMeter()
    model, optimizer = _make(rank)
    options: dict[str, Any] = {"min_offload_bytes": 1 << 10, "strategy": "offload_all"}
    with elbowroom.fit(model, optimizer, 4 << 20, profile=profile, **options) as room:
        agreed, calls = room._modes.agreed, [0]
        assert agreed is not None
        group = agreed._ranks.group
        enter = group._enter

        def count(what: str) -> None:
            calls[0] += 1
            enter(what)

        group._enter = count  # type: ignore[method-assign]
        for index in range(8):
            if index == 5:
                found["exchanges"] = calls[0]
                before = agreed.digest
                room.set_budget((7 << 19) - (rank << 18))
                found["plan changed"] = before != agreed.digest
                found["plan"], found["budget"] = agreed.digest, room.budget_bytes
                found["refused"] = _refuse(lambda: room.set_budget(room.budget_bytes if rank == 0 else 1000))
                found["kept"] = room.budget_bytes
            optimizer.zero_grad()
            with room.step():
                _step(rank, CASES["transformer"], model, optimizer, index)
        found["modes"] = [each.mode.value for each in room.journal().steps]
        found["peaks"] = [each.peak_bytes for each in room.journal().steps]
        meter.reset_peak()
        before = meter.read_peak()
        assert group.make_once("a plan", 0, lambda: "x" * PLAN_BYTES) == "x" * PLAN_BYTES
        found["bytes of a plan"] = meter.read_peak() - before
    return found


def change_budgets_apart(rank: int, profile: HardwareProfile) -> dict[str, Any]:
    """A budget that changes after rank 1 has run a step of another kind, and once more after the group is destroyed."""
    model, optimizer = _make(rank)
    options: dict[str, Any] = {"min_offload_bytes": 1 << 10, "strategy": "offload_all", "rank_timeout_seconds": 20}
    found: dict[str, Any] = {}
    plan_cache.GAIN = 1e9  # a kind of step is planned once it recurs
    with elbowroom.fit(model, optimizer, 4 << 20, profile=profile, **options) as room:
        agreed, varied = room._modes.agreed, dataclasses.replace(CASES["transformer"], varies=True)
        assert agreed is not None
        for index in range(18):
            optimizer.zero_grad()
            with room.step():  # for rank 0, batches of both cases are as long
                _step(rank, varied if 4 < index < 14 else CASES["transformer"], model, optimizer, 3 * index)
            if index == 13:
                found["last was agreed"] = room._cache.entries[0].is_agreed
                before = agreed.digest
                room.set_budget(7 << 19)
                found["changed"] = before != agreed.digest
        dist.barrier()
        dist.destroy_process_group()
        room.set_budget(6 << 19)
        found["budget"], found["peaks"] = room.budget_bytes, [each.peak_bytes for each in room.journal().steps]
    return found


def fail(rank: int, how: str, folder: str, profile: HardwareProfile) -> None:
    """Train until rank 1 fails in its fifth step."""
    model, optimizer = _make(rank)
    options: dict[str, Any] = {"rank_timeout_seconds": 5, "min_offload_bytes": 1 << 10, "strategy": "offload_all"}
    room = elbowroom.fit(model, optimizer, 4 << 20, profile=profile, spill_folder=folder, **options)
    for index in range(8):
        optimizer.zero_grad()
        with room.step():
            if rank == 1 and index == 4:
                _end(how)
            _step(rank, CASES["transformer"], model, optimizer, index)


def end_in_fit(rank: int, call: str, profile: HardwareProfile) -> None:
    """Have rank 1 be killed in a call while the ranks meet for the first time."""
    model, optimizer = _make(rank)
    if rank == 1:
        setattr(dist, call, lambda *args, **options: _end("is killed"))
    elbowroom.fit(model, optimizer, 4 << 20, profile=profile, rank_timeout_seconds=600)


def _end(how: str) -> None:
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how.startswith("waits"):
        if how == "waits after a refusal":
            with contextlib.suppress(Infeasible):
                torch.randn(1 << 22)
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif how == "hangs":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        torch.randn(1 << 22)


def meet(rank: int, profile: HardwareProfile) -> dict[str, Any]:
    """Several meetings of ranks, of which the last is in vain."""
    found = differ(rank, profile) | change_budgets(rank, profile)
    model, optimizer = _make(rank)
    if rank == 1:
        time.sleep(6)
    else:
        fit = functools.partial(elbowroom.fit, model, optimizer, 4 << 20, profile=profile)
        found["in vain"] = _refuse(lambda: fit(rank_timeout_seconds=2))
    return found


def survive(rank: int, profile: HardwareProfile) -> list[str]:
    """Go on after steps that have failed: the one after which ranks meet, on one rank when it was done; another on
    both, of which one takes its time. Then lose the process group.
    """
    model, optimizer = _make(rank)
    options: dict[str, Any] = {"rank_timeout_seconds": 30, "min_offload_bytes": 1 << 10, "strategy": "offload_all"}
    room = elbowroom.fit(model, optimizer, 4 << 20, profile=profile, **options)
    for index in range(7):
        optimizer.zero_grad()
        if index == 4:
            _refuse(lambda: _fail_in(room))
            time.sleep(9 * rank)
        with contextlib.suppress(ArithmeticError), room.step():
            _step(rank, CASES["transformer"], model, optimizer, index)
            if index == 2 and rank == 1:
                raise ArithmeticError("the loss is odd")
    modes = [each.mode.value for each in room.journal().steps]
    dist.barrier()
    dist.destroy_process_group()
    room.detach()
    return modes


def restart(rank: int, profile: HardwareProfile) -> list[str]:
    """Train in two attempts, as torchrun makes them with one store. The first leaves the failure of a rank there."""
    from elbowroom.ranks import rank_group

    modes = []
    for attempt in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        rank_group._numbers = itertools.count()  # as in new processes
        model, optimizer = _make(rank)
        with elbowroom.fit(model, optimizer, 4 << 20, profile=profile, rank_timeout_seconds=30) as room:
            for index in range(4):
                optimizer.zero_grad()
                time.sleep(12 * rank * attempt * (index == 1))
                with room.step():
                    _step(rank, CASES["transformer"], model, optimizer, index)
            group = room._modes.agreed._ranks.group  # type: ignore[union-attr]
            modes += [each.mode.value for each in room.journal().steps]
        group.store.set(f"{group.prefix}/failed", "9 1 ValueError: bad batch")
        dist.barrier()
    return modes


def _fail_in(room: Room) -> None:
    with room.step():
        torch.randn(1 << 22)


# -- checkpoints -------------------------------------------------------------------------------------------------------

LEAST_AWAY_BYTES = 1 << 17


@dataclasses.dataclass
class Resumed:
    """A job that has saved a checkpoint, and one that has gone on from it: tensors, and modes of its steps."""

    tensors: dict[str, torch.Tensor]
    modes: list[str] = dataclasses.field(default_factory=list)


def resume_all(
    rank: int, jobs: Sequence[tuple[str, str, int]], folder: str, profile: HardwareProfile
) -> dict[tuple[str, str], tuple[Resumed, Resumed]]:
    """Save and load checkpoints without rooms and in rooms.

    Args:
        jobs: names of the cases that save and that load, and the budget of their rooms.
    """
    return {
        (one, other): (
            _resume(rank, CASES[one], CASES[other], f"{folder}/plain, {one}", None, budget),
            _resume(rank, CASES[one], CASES[other], f"{folder}/{one}", profile, budget),
        )
        for one, other, budget in jobs
    }


def _resume(
    rank: int, before: RankCase, after: RankCase, folder: str, profile: HardwareProfile | None, budget: int
) -> Resumed:
    """Train, save, and go on with another model; both with their state away, if there is a profile for rooms."""
    import torch.distributed.checkpoint as checkpoint

    learned: dict[str, Any] = {}

    def run(case: RankCase, seed: int, steps: int, then: Callable[..., None]) -> Resumed:
        torch.manual_seed(seed)
        model = case.spread(case.model())
        optimizer = case.optimizer(model.parameters())
        options: dict[str, Any] = {"profile": profile, "min_offload_bytes": 1 << 10, "strategy": "auto:effort=0.1"}
        room = None if profile is None else elbowroom.fit(model, optimizer, budget, **options)
        with contextlib.nullcontext() if room is None else room:
            if room is not None and learned:
                room.load_state_dict(learned)
            for index in range(steps):
                _train_step(rank, case, model, optimizer, index, room)
            if room is not None:
                held_bytes = room._ledger.live_bytes
                assert held_bytes - room.move_state_out() > LEAST_AWAY_BYTES
            then(model, optimizer)
            for index in range(5, 10):
                _train_step(rank, case, model, optimizer, index, room)
            if room is not None:
                learned.update(room.state_dict())
            modes = [] if room is None else [each.mode.value for each in room.journal().steps]
            return Resumed(_list_tensors(model, optimizer), modes)

    def save(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        checkpoint.save(_collect(model, optimizer), checkpoint_id=folder)

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        checkpoint.load(state := _collect(model, optimizer), checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    run(before, 0, 3, save)
    return run(after, 1, 1, load)


def _train_step(
    rank: int, case: RankCase, model: nn.Module, optimizer: torch.optim.Optimizer, index: int, room: Room | None
) -> None:
    optimizer.zero_grad()
    with contextlib.nullcontext() if room is None else room.step():
        _step(rank, case, model, optimizer, index)


def _collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
