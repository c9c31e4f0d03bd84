"""What people use to train within less memory, each as a change of a workload, by name: "checkpoint:size=2".

A contender is a family, and a parameter after a colon. `FAMILIES` lists them; `list_contenders` gives the names that
make sense for a model.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from peer_models import PeerModel, with_forward, with_optimizer
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from elbowroom.workloads import Workload

Change = Callable[[Workload, PeerModel, str], Workload]

KEEPABLE = {
    "attention": ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math_for_cpu"),
    "compute": ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "mkldnn_convolution"),
}
BUDGETS = {"aot_eager": ("0.5", "0.25"), "inductor": ("0.5", "0.25")}


class BlockGroup(nn.Module):
    """Consecutive blocks, each with the output of the one before, and all with the same other arguments."""

    def __init__(self, blocks: list[nn.Module], run: Callable[..., Any] | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._chain(*args, **kwargs) if self.run is None else self.run(self._chain, *args, **kwargs)

    def _chain(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            inputs = block(inputs[0] if isinstance(inputs, tuple) else inputs, *args, **kwargs)
        return inputs


def group_blocks(workload: Workload, model: PeerModel, size: int, run: Callable[..., Any]) -> list[BlockGroup]:
    """Replace the blocks of a model by groups of at most `size` that `run` calls. Returns the groups."""
    groups = []
    for path in model.containers:
        container = workload.model.get_submodule(path)
        assert isinstance(container, nn.Sequential | nn.ModuleList)
        children = list(container)
        del container[:]
        for begin in range(0, len(children), size):
            groups.append(BlockGroup(children[begin : begin + size], run))
            container.append(groups[-1])
    return groups


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose inside is computed again in the backward pass."""
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def use_checkpoint(workload: Workload, model: PeerModel, parameter: str) -> Workload:
    """Checkpoint groups of blocks ("size=2"), each n-th block ("every=2"), or the first n ("first=5")."""
    key, _, number = parameter.partition("=")
    count = int(number)
    groups = group_blocks(workload, model, count if key == "size" else min(model.sizes), recompute)
    for index, group in enumerate(groups):
        if not {"size": True, "every": index % count == 0, "first": index < count}[key]:
            group.run = None
    return workload


def use_selective(workload: Workload, model: PeerModel, parameter: str) -> Workload:
    """Checkpoint each block, but keep results of attention, of matmuls and convolutions too, or of half of these."""
    for module in workload.model.modules() if model.writes_kept else ():
        if hasattr(module, "inplace"):
            module.inplace = False  # what is kept may not be written to
    names = KEEPABLE["attention"] if parameter == "attention" else KEEPABLE["attention"] + KEEPABLE["compute"]
    kept = {getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)}

    def make_contexts() -> Any:
        counts = {False: 0, True: 0}

        def choose(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if getattr(op, "overloadpacket", op) not in kept:
                return CheckpointPolicy.PREFER_RECOMPUTE
            counts[context.is_recompute] += 1
            if parameter == "half" and counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(choose)

    group_blocks(workload, model, max(model.sizes) if model.sizes[0] > 1 else 1,
                 functools.partial(recompute, context_fn=make_contexts))  # fmt: skip
    return workload


def use_compile(workload: Workload, _: PeerModel, parameter: str) -> Workload:
    """Compile the model ("aot_eager=0.5": the backend and the activation memory budget)."""
    backend, _, budget = parameter.partition("=")
    torch._functorch.config.activation_memory_budget = float(budget)
    workload.model.compile(backend=backend)
    return workload


def _within(workload: Workload, make: Callable[[], AbstractContextManager[Any]]) -> Workload:
    def forward() -> torch.Tensor:
        with make():
            return workload.forward()

    return with_forward(workload, forward)


def use_save_on_cpu(workload: Workload, *_: object) -> Workload:
    """Run the forward pass under `torch.autograd.graph.save_on_cpu`."""
    return _within(workload, torch.autograd.graph.save_on_cpu)


def use_files(workload: Workload, *_: object) -> Workload:
    """Write what autograd saves to files, as PyTorch's tutorial on saved-tensor hooks does; parameters stay.

    Source: PyTorch tutorials, "Hooks for autograd saved tensors", "Saving tensors to disk".
    """
    folder = tempfile.TemporaryDirectory(prefix="saved-tensors-")
    names: Iterator[int] = iter(range(1 << 62))

    class SavedFile:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.path = pathlib.Path(folder.name) / str(next(names))
            torch.save(tensor, self.path)

        def __del__(self) -> None:
            self.path.unlink(missing_ok=True)

    def pack(tensor: torch.Tensor) -> Any:
        stays = tensor.numel() < 1000 or (tensor.is_leaf and tensor.requires_grad)
        return tensor if stays else SavedFile(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        found: torch.Tensor = torch.load(packed.path) if isinstance(packed, SavedFile) else packed
        return found

    return _within(workload, lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))


def use_trl(workload: Workload, *_: object) -> Workload:
    """Run the forward pass under TRL's `OffloadActivations`, as its trainers do with `activation_offloading=True`."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    context = get_act_offloading_ctx_manager(model=workload.model, use_streams=torch.cuda.is_available())
    return _within(workload, lambda: context)


def use_torchao(workload: Workload, *_: object) -> Workload:
    """Let torchao's `CPUOffloadOptimizer` hold the optimizer's state."""
    from torchao.optim import CPUOffloadOptimizer

    own = workload.optimizer
    return with_optimizer(workload, CPUOffloadOptimizer(workload.model.parameters(), type(own), **_list_figures(own)))


def _list_figures(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the arguments of a workload's optimizer that are not its defaults."""
    return {name: optimizer.defaults[name] for name in ("lr", "momentum") if name in optimizer.defaults}


def use_fsdp(workload: Workload, model: PeerModel, _: str) -> Workload:
    """Shard blocks and model by FSDP2 over one gloo rank with `CPUOffloadPolicy`."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    own = workload.optimizer
    blocks = [each for path in model.containers for each in workload.model.get_submodule(path).children()]
    for block in blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(workload.model, mesh=mesh, offload_policy=policy)
    return with_optimizer(workload, type(own)(workload.model.parameters(), **_list_figures(own)))


def use_nothing(workload: Workload, *_: object) -> Workload:
    """Leave the workload as it is."""
    return with_forward(workload, workload.forward)


FAMILIES: dict[str, Change] = {
    "plain": use_nothing,
    "checkpoint": use_checkpoint,
    "selective": use_selective,
    "compile": use_compile,
    "save_on_cpu": use_save_on_cpu,
    "files": use_files,
    "trl": use_trl,
    "torchao": use_torchao,
    "fsdp": use_fsdp,
}
LABELS = {
    "plain": "plain",
    "checkpoint": "torch.utils.checkpoint",
    "selective": "selective checkpointing",
    "aot_eager": "torch.compile, aot_eager",
    "inductor": "torch.compile, inductor",
    "save_on_cpu": "save_on_cpu",
    "files": "saved tensors in files",
    "trl": "TRL OffloadActivations",
    "torchao": "torchao CPUOffloadOptimizer",
    "fsdp": "FSDP2 with CPUOffloadPolicy",
    "elbowroom": "Elbowroom",
    "elbowroom-inductor": "Elbowroom, inductor",
}


def find_role(contender: str) -> str:
    """Return the key of a contender in LABELS."""
    family, _, parameter = contender.partition(":")
    return parameter.partition("=")[0] if family == "compile" else family


def list_contenders(model: PeerModel, families: tuple[str, ...]) -> list[str]:
    """Return the names of contenders that are tried on a model, plain first."""
    has_attention = len(model.containers) == 1
    parameters = {
        "checkpoint": [*(f"size={size}" for size in model.sizes), "every=2"],
        "selective": ["attention" if has_attention else "half", "compute"],
        "compile": [f"{backend}={budget}" for backend, budgets in BUDGETS.items() for budget in budgets],
        "fsdp": ["blocks"],
    }
    return [
        f"{family}:{parameter}" if parameter else family
        for family in FAMILIES
        if family in families
        for parameter in parameters.get(family, [""])
    ]


def change(workload: Workload, model: PeerModel, contender: str) -> Workload:
    """Return the workload as a contender trains it."""
    family, _, parameter = contender.partition(":")
    return FAMILIES[family](workload, model, parameter)
