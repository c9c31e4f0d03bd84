"""A HardwareProfile: the speeds and capacities of one machine."""

from __future__ import annotations

import dataclasses
import reprlib

from elbowroom.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Throughput of one kind of op: `per_second` is flops for matrix-like kinds, bytes for "elementwise".

    Attributes:
        kind: "matmul", "convolution", "attention" (flops) or "elementwise" (bytes read and written).
        dtype: "float32", "bfloat16", ...
        source: where the figure comes from: "measured", or a datasheet and section.
    """

    kind: str
    dtype: str
    per_second: float
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The path between two neighbouring tiers.

    Attributes:
        upper, lower: tier names; `out` is upper to lower, `back` lower to upper.
        *_latency_seconds, *_bytes_per_second: of one transfer by itself.
        half_duplex: both directions share one lane.
        drag_seconds_per_byte: compute time lost per byte in flight, where moving takes processor time or bandwidth.
        source: where the figures come from.
    """

    upper: str
    lower: str
    out_latency_seconds: float
    out_bytes_per_second: float
    back_latency_seconds: float
    back_bytes_per_second: float
    half_duplex: bool
    drag_seconds_per_byte: float
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place where bytes can live. `capacity_bytes`: all of it, before anything is in it."""

    name: str
    capacity_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One machine.

    Attributes:
        name: "this machine", "NVIDIA A100 SXM4 40GB", ...
        device: kind of the top tier, "cpu" or "cuda".
        isa: the widest instructions of a CPU, "AVX512" or "AVX2", by which it is known what its kernels allocate; empty
            for others, and for CUDA.
        tiers: top first; links[i] joins tiers[i] and tiers[i + 1].
        op_latency_seconds: the least time any op takes, launch included.
        hook_seconds: what one saved-tensor hook costs the program.
        alignment_bytes: the device allocator rounds every block up to a multiple of this.
    """

    name: str
    device: str
    isa: str
    rates: tuple[Rate, ...]
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    op_latency_seconds: float
    hook_seconds: float
    alignment_bytes: int

    def __repr__(self) -> str:
        tiers = ", ".join(f"{tier.name} {format_bytes(tier.capacity_bytes)}" for tier in self.tiers)
        kind = f"{self.device}, {self.isa}" if self.isa else self.device
        return f"<HardwareProfile {reprlib.repr(self.name)} ({kind}): {tiers or 'no tiers'}; {len(self.rates)} rates>"
