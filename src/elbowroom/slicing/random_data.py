"""Random arguments for a probe: the shapes, strides and dtypes of given tensors."""

from __future__ import annotations

import dataclasses
import enum

import torch

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import SliceRule

_POSITIVE = frozenset(
    (
        *("running_var", "rstd", "save_invstd", "save_var", "total_weight"),
        *("exp_avg_sqs", "max_exp_avg_sqs", "state_steps"),
    )
)

FAINT = 2.0**-18
"""Value that a sum of `Ties` in single precision keeps if it comes early, and loses if it comes late."""


class Values(enum.Enum):
    """Distribution of the values of floating-point tensors."""

    NORMAL = "normal"
    EXTREME = "extreme"
    POSITIVE = "positive"
    WIDE = "wide"


@dataclasses.dataclass(frozen=True)
class Ties:
    """Distribution for tensors of 16 bits: integers, a quarter of them replaced by `FAINT` or its negative.

    Kernels add such tensors up in single precision, and round the sum, which hides in which order they did. A sum of
    integers is often half-way between two numbers of 16 bits; what decides is which of the faint terms it has kept.

    Attributes:
        largest: the integers are within [-largest, largest]. Sums should be a few hundred, for bfloat16.
    """

    largest: int


def fill_reads(
    call: OpCall, rule: SliceRule, values: Values | Ties, generator: torch.Generator, device: torch.device
) -> list[torch.Tensor]:
    """Return random tensors in place of a call's `reads`, without using PyTorch's own random state."""
    made: list[torch.Tensor] = []
    for index, name in enumerate(call.names):
        end = rule.indices[name](call) if name in rule.indices else 2
        read = allocate_read(call, index, device)
        fill(flatten(read), end, Values.POSITIVE if name in _POSITIVE else values, generator)
        made.append(read)
    return made


def allocate_read(call: OpCall, index: int, device: torch.device) -> torch.Tensor:
    """Return a tensor in place of one of a call's `reads`, whose memory is aligned as that of the read is."""
    read = call.reads[index]
    skipped = call.misalignments[index] // read.element_size() if call.misalignments else 0
    memory = torch.empty(skipped + count_elements(read), dtype=read.dtype, device=device)
    return memory.as_strided(read.shape, read.stride(), skipped)


def flatten(read: torch.Tensor) -> torch.Tensor:
    """Return the elements from a tensor's first to its last in memory, gaps included."""
    return read.as_strided((count_elements(read),), (1,))


def make_statistics(call: OpCall, device: torch.device) -> dict[str, torch.Tensor]:
    """Return ones in place of running statistics that the op updates."""
    return {name: torch.ones(call[name].shape, dtype=call[name].dtype, device=device) for name in call.statistics}


def count_elements(tensor: torch.Tensor) -> int:
    """Return the elements from a tensor's first to its last in memory, gaps included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def fill(flat: torch.Tensor, end: int, values: Values | Ties, generator: torch.Generator) -> None:
    """Fill a tensor; integers are in [0, end)."""
    if not (flat.is_floating_point() or flat.is_complex()):
        flat.random_(0, max(end, 1), generator=generator)
        return
    if isinstance(values, Ties) and flat.element_size() == 2:
        _make_ties(flat, values.largest, generator)
        return
    flat.normal_(generator=generator)
    if values is Values.POSITIVE:
        flat.abs_().add_(0.1)
    elif values is Values.WIDE:
        flat.mul_(torch.empty_like(flat).uniform_(-6, 6, generator=generator).exp_())
    elif values is Values.EXTREME:
        _make_extreme(flat)


def _make_ties(flat: torch.Tensor, largest: int, generator: torch.Generator) -> None:
    flat.random_(-largest, largest + 1, generator=generator)
    is_faint = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device).random_(0, 8, generator=generator)
    flat.masked_fill_(is_faint == 0, FAINT).masked_fill_(is_faint == 1, -FAINT)


def _make_extreme(flat: torch.Tensor) -> None:
    """Spread values over a large part of the dtype's range, and set some to 0 and -0."""
    largest = torch.finfo(flat.dtype).max
    for divisor, power in ((3, 0.3), (5, -0.3), (7, 0.0), (11, -0.0)):
        chosen = flat[::divisor]
        chosen.mul_(largest**power if power else power)
