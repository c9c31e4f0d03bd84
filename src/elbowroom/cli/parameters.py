"""The options that several commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from elbowroom import _family
from elbowroom.hardware.shipped import list_shipped
from elbowroom.planner import strategies

AMOUNTS = "8GiB or 8G (1024), 8GB (1000), 60% of the device, or 60%peak of the plain step's peak"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="torchvision:NAME, timm:NAME, transformers:NAME, or package.module:function that returns "
        "(model, optimizer, step).",
    ),
]
TraceOrSpec = Annotated[
    str,
    typer.Argument(metavar="TRACE_OR_SPEC", help="A file written by `elbowroom capture`, or a SPEC as it takes."),
]
Budget = Annotated[
    str,
    typer.Option("--budget", help=f"Bytes the step may hold: {AMOUNTS}."),
]
Hardware = Annotated[
    str,
    typer.Option(
        "--hardware",
        help="What to price for: this (measured now), a file written by `elbowroom probe`, or the name of a shipped "
        f"profile: {', '.join(list_shipped())}.",
        autocompletion=lambda: ["this", *list_shipped()],
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        help="Bytes that may lie in the tier below the device: 64GiB. What is more goes to the disk behind it, or does "
        "not fit where there is none. Any amount if not given.",
    ),
]
CostsFile = Annotated[
    Path | None,
    typer.Option("--costs", help="Measured costs instead of --hardware; written by `elbowroom run --save-costs`."),
]
Strategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        help=f"What makes the plan: {', '.join(_family.names(strategies))}; options follow a colon, as in "
        "autoswap:score=doa.",
        autocompletion=lambda: list(_family.names(strategies)),
    ),
]
SpillFolder = Annotated[
    str | None,
    typer.Option("--spill-folder", help="Where the spill file lies; the system's temporary folder if not given."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result to this file.")]
Picture = Annotated[
    Path | None, typer.Option("--picture", help="Draw the result into this file (.svg, .png, .pdf); needs matplotlib.")
]

_WORKLOAD = "Workload"
Batch = Annotated[int | None, typer.Option("--batch", help="Samples in a batch (8).", rich_help_panel=_WORKLOAD)]
ImageSize = Annotated[
    int | None, typer.Option("--image-size", help="Height and width of images in pixels.", rich_help_panel=_WORKLOAD)
]
SequenceLength = Annotated[
    int | None, typer.Option("--sequence-length", help="Tokens in a sample (128).", rich_help_panel=_WORKLOAD)
]
Layers = Annotated[
    int | None, typer.Option("--layers", help="Layers instead of the model's own number.", rich_help_panel=_WORKLOAD)
]
DataType = Annotated[
    str | None, typer.Option("--dtype", help="float32, or bfloat16 for autocast.", rich_help_panel=_WORKLOAD)
]
Optimizer = Annotated[str | None, typer.Option("--optimizer", help="adamw or sgd.", rich_help_panel=_WORKLOAD)]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda or cuda:N; CUDA if there is any.", rich_help_panel=_WORKLOAD),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Of weights, batch and draws (0).", rich_help_panel=_WORKLOAD)]
ChannelsLast = Annotated[
    bool | None,
    typer.Option("--channels-last", help="Images and weights in that memory format.", rich_help_panel=_WORKLOAD),
]


def collect_options(
    batch: int | None,
    image_size: int | None,
    sequence_length: int | None,
    layers: int | None,
    dtype: str | None,
    optimizer: str | None,
    device: str | None,
    seed: int | None,
    channels_last: bool | None,
) -> dict[str, Any]:
    """The options of a workload that were given, by the names `elbowroom.workloads.build` has for them."""
    options = {
        "batch": batch,
        "image_size": image_size,
        "sequence_length": sequence_length,
        "layers": layers,
        "dtype": dtype,
        "optimizer": optimizer,
        "device": device,
        "seed": seed,
        "channels_last": channels_last,
    }
    return {name: value for name, value in options.items() if value is not None}
