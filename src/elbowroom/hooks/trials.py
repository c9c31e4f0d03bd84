"""What an op allocates, found before it runs: on fake tensors where it knows them, from its arguments where not."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from elbowroom.cost.workspace import estimate_workspace
from elbowroom.errors import ElbowroomError
from elbowroom.hooks.hidden import Unwatched, silenced
from elbowroom.hooks.kinds import Kind
from elbowroom.hooks.processor import find_isa
from elbowroom.hooks.replayable import iterate_tensors
from elbowroom.ir.trace import Op, View

logger = logging.getLogger(__name__)

BLOCK_BYTES = {"cpu": 64, "cuda": 512}
"""What PyTorch's allocators round small blocks up to."""

_KNOWN_SPACES = ("aten", "prim", "prims")

_OUTPUTS = {"_unique2": 4, "unique_dim": 4, "unique_consecutive": 4, "allclose": 0}
"""Results, of which each may have as many elements as the argument, and one more for sorting."""

_DENSE = {"_sparse_addmm", "addmm"}
"""Their result is dense, though one of their matrices is sparse."""

FAKES = logging.getLogger("torch._subclasses.fake_tensor")
"""PyTorch prints where an op fails on fake tensors, which is nothing that anybody has to know."""


class Trials:
    """Of ops on one kind of device."""

    def __init__(self, device_type: str) -> None:
        self._device_type, self._block_bytes = device_type, BLOCK_BYTES[device_type]
        self._isa = find_isa() if device_type == "cpu" else "AVX512"
        self._told: set[Any] = set()
        # Otherwise an op without a fake kernel runs for real, on zeros, and allocates.
        self._fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    def run(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        """Bytes of an op's results, and what it allocates inside itself beyond them; both at most."""
        func = kind.func
        given: list[tuple[torch.Tensor, int]] = []

        def fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.layout is not torch.strided:
                    made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                else:
                    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                given.append((made, made.untyped_storage().nbytes()))
                return made
            if isinstance(value, (list, tuple)):
                return type(value)(map(fake, value))
            return value

        tensors = list(iterate_tensors((*args, *kwargs.values())))
        if not all(map(_is_strided, tensors)) and func._opname not in _DENSE:
            return self._bound(kind, tensors, args)
        try:
            # Modes that are there would see the op on trial.
            with Unwatched(), _disable_current_modes(), silenced(FAKES), self._fake:
                result = func(*map(fake, args), **{name: fake(value) for name, value in kwargs.items()})
        except (MemoryError, ElbowroomError):
            raise  # which tells nothing about the op
        except Exception:
            self._tell(func)
            return self._bound(kind, tensors, args)  # its results depend on values, or it knows no fake tensors
        if not all(map(_is_strided, iterate_tensors(result))):
            return self._bound(kind, tensors, args)
        known = {id(tensor.untyped_storage()) for tensor, _ in given}
        made = [
            each
            for each in iterate_tensors(result)
            if each.device.type == self._device_type and id(each.untyped_storage()) not in known
        ]
        grown = sum(max(0, tensor.untyped_storage().nbytes() - before) for tensor, before in given)
        blocks = {id(each.untyped_storage()): int(each.untyped_storage().nbytes()) for each in made}
        return sum(map(self._round_up, blocks.values())) + grown, self._find_workspace(kind, tensors, made, args)

    def _tell(self, func: Any) -> None:
        """Say once of an op from outside of PyTorch that it is guessed at."""
        if func.namespace not in _KNOWN_SPACES and func not in self._told:
            self._told.add(func)
            logger.warning(
                "%s does not run on fake tensors, so what it allocates is a guess from what it is given; "
                "torch.library.register_fake tells",
                func,
            )

    def _bound(self, kind: Kind, tensors: list[torch.Tensor], args: tuple[Any, ...]) -> tuple[int, int]:
        """Positions of all elements, which is the most that selecting among them gives."""
        if kind.count_results is not None and _is_strided(tensors[0]):
            return self._round_up(8 * kind.count_results(tensors[0])), 0
        if kind.func._opname == "_grouped_mm":  # fakes know it in bfloat16 alone
            return self._round_up(_count_groups(*tensors[:3])), self._find_workspace(kind, tensors, [], args)
        most = _OUTPUTS.get(kind.func._opname, 1) * sum(
            tensor.numel() * max(8, tensor.element_size()) * max(1, tensor.dim()) for tensor in tensors
        )
        strided = [each for each in tensors if _is_strided(each)]
        return 0, self._round_up(most) + self._find_workspace(kind, strided, [], args)

    def _find_workspace(
        self, kind: Kind, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], args: tuple[Any, ...]
    ) -> int:
        views = [_view(tensor, place) for place, tensor in enumerate((*given, *made))]
        reads, writes = tuple(views[: len(given)]), tuple(views[len(given) :])
        op = Op(tick=0, name=kind.name, reads=reads, writes=writes, flops=0, barrier="")
        isa = self._isa if torch._C._get_mkldnn_enabled() else ""  # PyTorch's own kernels are at work without
        workspace_bytes = estimate_workspace(op, isa=isa, is_dilated=_is_dilated(kind.func, args))
        copied_bytes = 0 if kind.count_copied is None else kind.count_copied(list(filter(_is_strided, given)))
        return self._round_up(workspace_bytes + copied_bytes)

    def _round_up(self, nbytes: int) -> int:
        return -(-nbytes // self._block_bytes) * self._block_bytes


def _is_dilated(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the windows of a convolution have gaps, or some lie in the padding altogether."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    weight, padding, dilation = (given.get(name) for name in ("weight", "padding", "dilation"))
    if isinstance(dilation, (list, tuple)) and any(each != 1 for each in dilation):
        return True
    # Without gradients PyTorch may call it by another name, where "same" is a padding as well.
    if not isinstance(padding, (list, tuple)) or not isinstance(weight, torch.Tensor):
        return False
    return any(map(operator.ge, padding, weight.shape[2:]))


def _count_groups(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None = None) -> int:
    """Bytes of the products of matrices in groups. Rows end at a multiple of 16 bytes."""
    groups = 1
    if left.dim() == right.dim():  # else the groups are rows or columns of the result
        groups = left.shape[0] if left.dim() == 3 else 1 if ends is None else ends.numel()
    return groups * left.shape[-2] * (right.shape[-1] * left.element_size() + 16)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _view(tensor: torch.Tensor, storage: int) -> View:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return View(storage=storage, version=0, dtype=dtype, shape=tuple(map(int, tensor.shape)))
