"""The options that several commands share, each declared once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
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

WorkloadOptions = dict[str, Any]
"""Options of a workload that were given, by the names `elbowroom.workloads.build` has for them."""


_WORKLOAD: dict[str, tuple[type, str]] = {
    "batch": (int, "Samples in a batch (8)."),
    "image_size": (int, "Height and width of images in pixels."),
    "sequence_length": (int, "Tokens in a sample (128)."),
    "layers": (int, "Layers instead of the model's own number."),
    "dtype": (str, "float32, or bfloat16 for autocast."),
    "optimizer": (str, "adamw or sgd."),
    "device": (str, "cpu, cuda or cuda:N; CUDA if there is any."),
    "seed": (int, "Of weights, batch and draws (0)."),
    "channels_last": (bool, "Images and weights in that memory format."),
}


def with_workload_options(command: Callable[..., None], *, without: Sequence[str] = ()) -> Callable[..., None]:
    """Return a command for typer with the options of a workload in place of its parameter `options`.

    Args:
        command: takes those that were given, as `WorkloadOptions`.
        without: names of options that the command chooses itself.
    """
    declared = [name for name in _WORKLOAD if name not in without]
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if name == "options":
            parameters += [_make_parameter(each, *_WORKLOAD[each]) for each in declared]
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {name: value for name in declared if (value := given.pop(name)) is not None}
        command(**given, options=options)

    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _make_parameter(name: str, kind: Any, help_text: str) -> inspect.Parameter:
    option = typer.Option("--" + name.replace("_", "-"), help=help_text, rich_help_panel="Workload")
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
