"""`elbowroom demo`: real models trained plainly, then within a budget, with the same losses."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from elbowroom._folders import hold_temporary
from elbowroom.cli.parameters import Json, WorkloadOptions, with_workload_options
from elbowroom.cli.sources import read_amount
from elbowroom.cli.terminal import Terminal, open_terminal
from elbowroom.ir import files
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from elbowroom.cli.demonstration.results import Result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model of the demo.

    Attributes:
        budget: an amount of memory such as "50%peak", or "halfway" between the smallest feasible budget and the plain
            peak.
        steps: number of steps; two are captured, and the others are timed.
        patience_seconds: limit on the time of the plain steps; slow machines run fewer.
    """

    spec: str
    options: dict[str, int]
    budget: str
    steps: int
    patience_seconds: float


# The numbers of steps are chosen to take six minutes on two cores.
PARTS = (
    Part(
        spec="torchvision:resnet50",
        options={"batch": 16, "image_size": 224},
        budget="50%peak",
        steps=7,
        patience_seconds=35,
    ),
    Part(
        spec="transformers:gpt2",
        options={"batch": 4, "sequence_length": 512},
        budget="halfway",
        steps=6,
        patience_seconds=60,
    ),
)


def register(app: typer.Typer) -> None:
    """Add this command, and the one that its processes run, to the program."""
    app.command()(demo)
    app.command("demo-part", hidden=True)(with_workload_options(run_one))


def demo(as_json: Json = False) -> None:
    """Train ResNet-50 and GPT-2, each plain and within a budget, and compare (up to six minutes on two cores)."""
    from elbowroom.cli.demonstration.processes import run_part
    from elbowroom.cli.demonstration.results import find_problems, tabulate

    begin = time.perf_counter()
    with open_terminal(as_json) as terminal, hold_temporary("elbowroom-demo-") as folder:
        profile = folder / "profile.json"
        terminal.note(f"1/{1 + 2 * len(PARTS)}  measuring this machine")
        run_part(["probe", "--output", str(profile)])
        results = [_train(terminal, index, part, profile) for index, part in enumerate(PARTS)]
        seconds, device = time.perf_counter() - begin, results[0].plain["device"]
        problems = find_problems(results)
        terminal.show()
        terminal.show(tabulate(results))
        for problem in problems:
            terminal.show(Text(problem, style="bold red"))
        for remark in filter(None, (result.remark for result in results)):
            terminal.show(Text(remark))
        terminal.show(f"on {device}, in {format_seconds(seconds)}")
        terminal.write_document(
            "demo",
            seconds=seconds,
            device=device,
            problems=problems,
            results=[result.fields() for result in results],
        )
    if problems:
        raise typer.Exit(1)


def _train(terminal: Terminal, index: int, part: Part, profile: Path) -> Result:
    """Train one model plain and then within its budget, each in its own process."""
    from elbowroom.cli.demonstration.processes import run_part
    from elbowroom.cli.demonstration.results import Result

    stages = 1 + 2 * len(PARTS)
    common = ["demo-part", part.spec, "--profile", str(profile)]
    for name, value in part.options.items():
        common += [f"--{name.replace('_', '-')}", str(value)]
    terminal.note(f"{2 + 2 * index}/{stages}  {part.spec}, plain")
    alone = ["--steps", str(part.steps), "--patience", str(part.patience_seconds)]
    alone += ["--floor"] if part.budget == "halfway" else []
    plain = run_part([*common, *alone])["result"]
    budget_bytes = choose_budget(part.budget, plain["peak_bytes"], plain["smallest_budget_bytes"])
    terminal.note(f"{3 + 2 * index}/{stages}  {part.spec}, within {format_bytes(budget_bytes)}")
    limits = ["--steps", str(len(plain["losses"])), "--budget", str(budget_bytes)]
    within = run_part([*common, *limits])["result"]
    again = None
    if plain["losses"] != within["losses"]:
        terminal.note(f"{part.spec}: the losses differ; does plain PyTorch repeat itself?")
        again = run_part([*common, *limits[:2]])["result"]["losses"]
    return Result(spec=part.spec, budget_bytes=budget_bytes, plain=plain, within=within, losses_again=again)


def choose_budget(budget: str, plain_peak_bytes: int, smallest_bytes: int) -> int:
    """Return the budget of a part in bytes."""
    if budget == "halfway":
        # If the two are close, measured and forecast bytes may be in the wrong order.
        return max(smallest_bytes, (smallest_bytes + plain_peak_bytes) // 2)
    return read_amount("--budget", budget, peak_bytes=plain_peak_bytes)


def run_one(
    spec: str,
    profile: Annotated[Path, typer.Option("--profile")],
    steps: Annotated[int, typer.Option("--steps", min=1)],
    budget: Annotated[int, typer.Option("--budget", help="0 for plain PyTorch.")] = 0,
    patience: Annotated[float, typer.Option("--patience", help="Seconds that all plain steps may take.")] = 60,
    floor: Annotated[bool, typer.Option("--floor")] = False,
    *,
    options: WorkloadOptions,
    as_json: Json = False,
) -> None:
    """Run one process of the demo."""
    from elbowroom.cli.demonstration import jobs

    with open_terminal(as_json) as terminal:
        hardware = files.load(HardwareProfile, profile)
        if budget:
            result = jobs.run_within(terminal, spec, options, steps, hardware, budget)
        else:
            result = jobs.run_plain(terminal, spec, options, steps, hardware, patience_seconds=patience, floor=floor)
        terminal.write_document("demo-part", result=result)
