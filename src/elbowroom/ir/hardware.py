"""HardwareProfile: speeds and capacities of one machine."""

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
        source: "measured", or a datasheet and section.
    """

    kind: str
    dtype: str
    per_second: float
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Connection of two adjacent tiers.

    Attributes:
        upper, lower: tier names; `out` is upper to lower, `back` lower to upper.
        *_latency_seconds, *_bytes_per_second: of a single transfer.
        half_duplex: whether both directions share one lane.
        drag_seconds_per_byte: compute time lost per byte moved, where copies compete for cores or bandwidth.
        source: as in `Rate`.
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
    """One level of the memory hierarchy. `capacity_bytes` is its total size."""

    name: str
    capacity_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Speeds and capacities of one machine.

    Attributes:
        name: "this machine", "NVIDIA A100 SXM4 40GB", ...
        device: kind of the top tier, "cpu" or "cuda".
        isa: widest vector instructions of a CPU, "AVX512" or "AVX2", which determine the workspaces of its kernels;
            empty for other CPUs and for CUDA.
        tiers: top first; links[i] joins tiers[i] and tiers[i + 1].
        op_latency_seconds: minimum time of an op, launch included.
        hook_seconds: time of one saved-tensor hook.
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
