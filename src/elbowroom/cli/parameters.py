"""Options that several commands share, each declared once."""

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


def check_positive(value: int | None) -> int | None:
    """Return the number of an option. (`min=1` would widen a column of the help so much that names are cut.)

    Raises:
        typer.BadParameter: it is less than 1.
    """
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} is less than 1")
    return value


AMOUNTS = "8GiB or 8G (1024), 8GB (1000), 60% of device memory, or 60%peak for 60% of the peak without a plan"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
SPECS = (
    "torchvision:NAME, timm:NAME, transformers:NAME, or package.module:function that returns (model, optimizer, step)."
)
Spec = Annotated[str, typer.Argument(metavar="SPEC", help=SPECS)]
ScriptOrSpec = Annotated[
    str,
    typer.Argument(metavar="SCRIPT|SPEC", help=f"A Python file or module to run as it is; or a workload: {SPECS}"),
]
TraceOrSpec = Annotated[
    str,
    typer.Argument(metavar="TRACE_OR_SPEC", help="A file written by `elbowroom capture`, or a SPEC to capture."),
]
Budget = Annotated[
    str,
    typer.Option("--budget", "--memory-budget", help=f"Memory that the step may use: {AMOUNTS}."),
]
Hardware = Annotated[
    str,
    typer.Option(
        "--hardware",
        help="Machine whose speed is assumed: this (measured now), a file written by `elbowroom probe`, or a shipped "
        f"profile: {', '.join(list_shipped())}.",
        autocompletion=lambda: ["this", *list_shipped()],
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        help="Memory for offloaded data in the tier below the device, e.g. 64GiB. Further data goes to disk if the "
        "hardware has one; otherwise the plan does not fit. Default: unlimited.",
    ),
]
CostsFile = Annotated[
    Path | None,
    typer.Option("--costs", help="Measured costs to use instead of --hardware, from `elbowroom run --save-costs`."),
]
Strategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        help=f"Planning strategy: {', '.join(_family.names(strategies))}. Options follow a colon: autoswap:score=doa.",
        autocompletion=lambda: list(_family.names(strategies)),
    ),
]
_MANAGES_HELP = "What may be offloaded: activations, or everything, which adds parameters, gradients and "
_MANAGES_HELP += "optimizer state."
_MANAGES = typer.Option("--manages", help=_MANAGES_HELP, autocompletion=lambda: ["activations", "everything"])
Managed = Annotated[str, _MANAGES]
ManagedByRoom = Annotated[str | None, _MANAGES]
Slicing = Annotated[
    str,
    typer.Option(
        "--slices",
        help="Ops that run in slices if the step does not fit otherwise: none; exact: those with the same bits; any: "
        "also those that add the parts of a sum in another order.",
        autocompletion=lambda: ["none", "exact", "any"],
    ),
]
SpillFolder = Annotated[
    str | None,
    typer.Option("--spill-folder", help="Folder of the spill file. Default: the system's temporary folder."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result to this file.")]
Picture = Annotated[
    Path | None, typer.Option("--picture", help="Draw the result to this .svg, .png or .pdf file; needs matplotlib.")
]

WorkloadOptions = dict[str, Any]
"""Workload options that the user gave, keyed by the parameter names of `elbowroom.workloads.build`."""


_WORKLOAD: dict[str, tuple[type, str]] = {
    "batch": (int, "Samples per batch (default 8)."),
    "image_size": (int, "Height and width of images, in pixels."),
    "sequence_length": (int, "Tokens per sample (default 128)."),
    "layers": (int, "Number of layers, instead of the model's own."),
    "dtype": (str, "float32, or bfloat16 for autocast."),
    "optimizer": (str, "adamw or sgd."),
    "device": (str, "cpu, cuda or cuda:N; default: cuda if available."),
    "seed": (int, "Random seed of weights, batch and random ops (default 0)."),
    "channels_last": (bool, "Use the channels_last memory format for images and weights."),
}


def with_workload_options(command: Callable[..., None], *, without: Sequence[str] = ()) -> Callable[..., None]:
    """Wrap a command for typer, with the workload options in place of its parameter `options`.

    Args:
        command: receives the options that were given as `WorkloadOptions`.
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
