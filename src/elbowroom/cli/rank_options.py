"""Options of `elbowroom simulate --ranks`: how many processes, on which network, and what they divide."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

import typer

from elbowroom.cli.parameters import AMOUNTS, check_positive
from elbowroom.cli.sources import read_amount
from elbowroom.errors import UsageError
from elbowroom.hardware.shipped import list_networks, load_network
from elbowroom.ir import files
from elbowroom.ir.network import Algorithm, Network
from elbowroom.ir.parallelism import MicroBatchOrder, Parallel, Parallelism, ShardDtype

_PANEL = "Several ranks"
Ranks = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        rich_help_panel=_PANEL,
        help="Processes, each with a device of its own: a number, or several such as 8,64,1024.",
    ),
]
NetworkName = Annotated[
    str | None,
    typer.Option(
        "--network",
        rich_help_panel=_PANEL,
        help=f"Network that joins them: {', '.join(list_networks())}, or the file of one.",
        autocompletion=lambda: list(list_networks()),
    ),
]
Division = Annotated[
    Parallel | None,
    typer.Option(
        "--parallel",
        rich_help_panel=_PANEL,
        help="What they share. data: the batch. sharded: also the model's state. pipelined: its layers. Default: data.",
    ),
]
Collectives = Annotated[
    Algorithm | None,
    typer.Option(
        "--algorithm",
        rich_help_panel=_PANEL,
        help="Algorithm of collectives. Default: auto, the faster of ring and tree.",
    ),
]
BucketBytes = Annotated[
    str | None,
    typer.Option(
        "--bucket",
        rich_help_panel=_PANEL,
        help=f"Gradients reduced together, for data: {AMOUNTS.partition(',')[0]}. Default: 1MiB, then 25MiB.",
    ),
]
BucketView = Annotated[
    bool | None,
    typer.Option(
        "--gradient-as-bucket-view",
        rich_help_panel=_PANEL,
        show_default=False,
        help="Gradients are views of their buckets, for data.",
    ),
]
Reshard = Annotated[
    bool | None,
    typer.Option(
        "--reshard/--no-reshard",
        rich_help_panel=_PANEL,
        show_default=False,
        help="Free gathered weights after the forward pass, for sharded. Default: --reshard.",
    ),
]
ShardDtypeName = Annotated[
    ShardDtype | None,
    typer.Option(
        "--shard-dtype",
        rich_help_panel=_PANEL,
        help="Data type of shards and of the sums of gradients in mixed precision, for sharded; gathered weights "
        "have that of the trace.",
    ),
]
StageCount = Annotated[
    int | None,
    typer.Option(
        "--stages", callback=check_positive, rich_help_panel=_PANEL, help="Parts of the model, for pipelined."
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        "--micro-batches",
        callback=check_positive,
        rich_help_panel=_PANEL,
        help="Micro-batches, of the trace's size, that are accumulated before each update.",
    ),
]
ScheduleName = Annotated[
    MicroBatchOrder | None,
    typer.Option("--schedule", rich_help_panel=_PANEL, help="Order of micro-batches, for pipelined. Default: 1f1b."),
]

MOST_COUNTS = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """The options as they were given; None for one that was not."""

    ranks: str | None
    network: str | None
    parallel: Parallel | None
    algorithm: Algorithm | None
    bucket: str | None
    bucket_view: bool | None
    reshard: bool | None
    shard_dtype: ShardDtype | None
    stages: int | None
    micro_batches: int | None
    schedule: MicroBatchOrder | None

    def check(self) -> None:
        """Check the options before anything is read.

        Raises:
            UsageError: an option without `--ranks`, or without what it needs, or for another kind of parallelism.
        """
        given = {_name(field.name) for field in dataclasses.fields(self) if getattr(self, field.name) is not None}
        if self.ranks is None:
            if given:
                raise UsageError(f"{', '.join(sorted(given))} belongs to --ranks: the number of processes of the job")
            return
        self.list_counts()
        if self.network is None:
            raise UsageError(
                f"--ranks needs --network: {', '.join(list_networks())}, or the file of a network "
                "(docs: Simulating many ranks)"
            )
        kind = self._kind
        for name, owner in _OWNERS.items():
            if getattr(self, name) is not None and owner is not kind:
                raise UsageError(f"{_name(name)} belongs to --parallel {owner}, and this job is {kind}")
        if kind is Parallel.PIPELINED and (self.stages is None or self.micro_batches is None):
            raise UsageError(
                "--parallel pipelined needs --stages and --micro-batches, such as --stages 8 --micro-batches 32"
            )

    def list_counts(self) -> tuple[int, ...]:
        """Return the numbers of ranks.

        Raises:
            UsageError: `--ranks` is not a list of numbers.
        """
        parts = [part.strip() for part in (self.ranks or "").split(",")]
        if len(parts) > MOST_COUNTS or not all(part.isdecimal() and 0 < int(part) < 1 << 31 for part in parts):
            raise UsageError(
                f"--ranks: {self.ranks!r} is not a number of ranks from 1 to {(1 << 31) - 1}, or up to {MOST_COUNTS} "
                "of them such as 8,64,1024"
            )
        return tuple(dict.fromkeys(map(int, parts)))

    def list_parallelisms(self) -> tuple[Parallelism, ...]:
        """Return what to simulate, for each number of ranks.

        Raises:
            UsageError: an option has an impossible value.
        """
        return tuple(
            Parallelism(
                kind=self._kind,
                ranks=ranks,
                algorithm=self.algorithm or Algorithm.AUTO,
                bucket_bytes=None if self.bucket is None else read_amount("--bucket", self.bucket),
                gradient_as_bucket_view=bool(self.bucket_view),
                reshard_after_forward=self.reshard is not False,
                shard_dtype=self.shard_dtype,
                stages=self.stages or 1,
                micro_batches=self.micro_batches or 1,
                schedule=self.schedule or MicroBatchOrder.ONE_F_ONE_B,
            )
            for ranks in self.list_counts()
        )

    def find_network(self) -> Network:
        """Return the network that `--network` names.

        Raises:
            UsageError: there is no such network or file.
            TraceError: the file is damaged or of a newer format.
        """
        assert self.network is not None  # as `check` has found
        if os.path.exists(self.network) or self.network.endswith((".json", ".gz")) or os.sep in self.network:
            return files.load(Network, self.network)
        return load_network(self.network)

    @property
    def _kind(self) -> Parallel:
        return self.parallel or (Parallel.DATA if self.stages is None else Parallel.PIPELINED)


_OWNERS = {
    "bucket": Parallel.DATA,
    "bucket_view": Parallel.DATA,
    "reshard": Parallel.SHARDED,
    "shard_dtype": Parallel.SHARDED,
    "stages": Parallel.PIPELINED,
    "micro_batches": Parallel.PIPELINED,
    "schedule": Parallel.PIPELINED,
}


def _name(field: str) -> str:
    return "--gradient-as-bucket-view" if field == "bucket_view" else "--" + field.replace("_", "-")
