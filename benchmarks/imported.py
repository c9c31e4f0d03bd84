"""Does the simulator predict what others measured? Public logs, the policies of the systems they come from, and theirs.

    python benchmarks/imported.py [--dtr FOLDER] [--g10 FOLDER] [--strategies auto,...] [--output FILE.json]

--dtr   a checkout of the DTR prototype, its simulator's logs unpacked in it. On every log that is of the same job as
        the prototype's measurements on a Titan V (same batch, plain peak within 5 %), `simulator/online.py` runs within
        the measured budgets. Compared are op seconds, replays included, over those without replays; and step seconds
        over plain PyTorch's. The prototype's own bookkeeping is no op, so for steps it is taken from the run within the
        largest budget, whose own step is then no prediction.
--g10   a checkout of the G10 artifact in which its program was run, so that results/MODEL/BATCH-*/statistics has a
        kernels.config (and, for G10's schedule without unified memory, a prefetch_guide.config). Compared are step
        seconds over the ideal ones with the figures that the artifact ships (example_results), which it simulated.

Of the second, FlashNeuron and G10 on the SSD alone have one tier below the card, and are carried out as they are. G10
on host and SSD side by side is approximated by one tier at the full speed of PCI Express. LRU over page faults and
DeepUM need a model of pages, which Elbowroom does not have: the LRU beside theirs moves whole blocks. Parameters stay,
so where a plan's peak is above the card's 40 GiB its seconds say nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
from typing import Any

from dtr_simulator import Score, run_online
from flashneuron import flashneuron
from vitality import follow_guide, g10
from walks import Job, lru
from writing import write_results

from elbowroom.errors import ElbowroomError
from elbowroom.importers import Imported, read_log
from elbowroom.importers.g10 import CYCLES_PER_SECOND
from elbowroom.ir.forecast import Forecast
from elbowroom.planner.problem import plan

SAME_PEAK = 0.05
CARD_BYTES = 40 << 30
SSD_BYTES_PER_SECOND = 3.2 * 2**30
SHIPPED = {"BERT_Base": "bert", "VIT": "vit", "Inceptionv3": "inception", "ResNet152": "resnet", "SENet154": "senet"}
LONG = {"BERT_Base": "BERT", "VIT": "ViT"}
"""The artifact's names in its two tables."""

Row = dict[str, Any]


# -- DTR --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One model of the prototype's measurements: its log, the plain step, and the runs within budgets."""

    name: str
    imported: Imported
    plain: dict[str, float]
    runs: list[dict[str, float]]

    def largest(self) -> dict[str, float]:
        """The run within the largest budget."""
        return max(self.runs, key=lambda run: run["memory_budget"])


def compare_dtr(folder: pathlib.Path) -> list[Row]:
    """Predicted beside measured, for every run."""
    return [compare_run(model, run) for model in find_measured(folder) for run in model.runs]


def find_measured(folder: pathlib.Path) -> list[Measured]:
    """The models of which there is a log of the job that was measured."""
    data = json.loads(next(folder.rglob("data-full.json")).read_text())
    found = []
    for path in sorted(folder.rglob("*.log")):
        name, batch, *_ = path.name.split("-")
        entries = [each for each in data.get(name, ()) if each["specific_params"]["batch_size"] == int(batch)]
        plain = [means(each) for each in entries if each["specific_params"]["type"] == "baseline"]
        runs = [means(each) for each in entries if each["specific_params"]["type"] == "dtr"]
        if not plain:
            continue
        imported = read_log("dtr", path)
        peak = Job(imported.trace, imported.costs).plain.peak_bytes
        if abs(peak / (plain[0]["total_mem"] * 1e6) - 1) <= SAME_PEAK:
            found.append(Measured(name=name, imported=imported, plain=plain[0], runs=[run for run in runs if run]))
    return found


def means(entry: dict[str, Any]) -> dict[str, float]:
    """The mean of each quantity: milliseconds and megabytes, the budget in bytes. Nothing where a run failed."""
    summary = entry["summary"]
    if not isinstance(summary, list):
        return {}
    return {key: value["mean"] for key, value in summary[0].items() if isinstance(value, dict) and "mean" in value}


def compare_run(model: Measured, run: dict[str, float]) -> Row:
    """One run within one budget."""
    costs, largest = model.imported.costs, model.largest()
    plain_seconds = sum(costs.op_seconds)
    outcome = run_online(model.imported.trace, costs, int(run["memory_budget"]), score=Score.EQ)
    ops = 1 + outcome.recompute_seconds / plain_seconds
    bookkeeping = (largest["time"] - largest["base_compute_time"] - largest["remat_compute_time"]) / 1e3
    step = ops + bookkeeping / plain_seconds
    measured_ops = 1 + run["remat_compute_time"] / run["base_compute_time"]
    measured_step = run["time"] / model.plain["time"]
    return {
        "part": "dtr",
        "model": model.name,
        "budget_bytes": int(run["memory_budget"]),
        "measured_peak_bytes": int(run["total_mem"] * 1e6),
        "ending": str(outcome.ending),
        "ops_predicted": ops,
        "ops_measured": measured_ops,
        "ops_ratio": ops / measured_ops,
        "step_predicted": None if run is largest else step,
        "step_measured": measured_step,
        "step_ratio": None if run is largest else step / measured_step,
    }


# -- G10 --------------------------------------------------------------------------------------------------------------


def compare_g10(folder: pathlib.Path, strategies: list[str]) -> list[Row]:
    """Predicted beside shipped, for every model and batch that was run."""
    rows = []
    for model in SHIPPED:
        shipped = read_shipped(folder, model)
        for batch in sorted(shipped):
            found = sorted((folder / "results" / model).glob(f"{batch}-*/statistics/kernels.config"))
            if found:
                guide = folder / "results" / model / f"{batch}-G10GDSSSD" / "statistics" / "prefetch_guide.config"
                rows += compare_batch(model, batch, found[0], guide, shipped[batch], strategies)
    return rows


def read_shipped(folder: pathlib.Path, model: str) -> dict[int, dict[str, float]]:
    """Cycles of each policy by batch; infinite where it failed."""
    lines = (folder / "example_results" / "overall_batchsize" / f"{SHIPPED[model]}.txt").read_text().splitlines()
    names = [name.strip() for name in lines[0].split("|")]
    rest = [line for line in lines[1:] if line.strip()]
    found = {
        int(batch): dict(zip(names, map(float, figures.split()), strict=True))
        for batch, figures in zip(rest[::2], rest[1::2], strict=True)
    }
    lines = (folder / "example_results" / "overall_performance" / "all.base.txt").read_text().splitlines()
    names = [name.strip() for name in lines[0].split("|")]
    for title, figures in itertools.pairwise(lines):
        if title.startswith(f"{LONG.get(model, model)}|"):
            batch = int(title.split("|")[1].partition("=")[2])
            found.setdefault(batch, {}).update(zip(names, map(float, figures.split()), strict=True))
    return found


def compare_batch(
    model: str, batch: int, path: pathlib.Path, guide: pathlib.Path, shipped: dict[str, float], strategies: list[str]
) -> list[Row]:
    """One model and batch, every policy."""
    imported = read_log("g10", path)
    on_host = Job(imported.trace, imported.costs)
    ssd = dataclasses.replace(
        imported.costs.link,
        lower="ssd",
        out_latency_seconds=0.0,
        out_bytes_per_second=SSD_BYTES_PER_SECOND,
        back_latency_seconds=0.0,
        back_bytes_per_second=SSD_BYTES_PER_SECOND,
        source="the artifact's configurations: an SSD at 3.2 GiB/s each way, without latency",
    )
    on_ssd = Job(imported.trace, dataclasses.replace(imported.costs, link=ssd))
    ideal = on_host.plain
    print(f"{model}, batch {batch}: plain peak {ideal.peak_bytes / 2**30:.1f} GiB", flush=True)
    tried: list[tuple[str, str, Forecast | None]] = [
        ("ideal", "ideal", ideal),
        ("FlashNeuron, SSD", "FlashNeuron", flashneuron(on_ssd, CARD_BYTES)),
        ("G10, one tier at PCIe speed", "prefetch_lru", g10(on_host, CARD_BYTES)),
        ("LRU of whole blocks, PCIe", "lru", lru(on_host, CARD_BYTES)),
    ]
    if guide.exists() and "G10GDSSSD" in shipped:
        tried.append(("G10's own schedule, SSD", "G10GDSSSD", follow_guide(on_ssd, guide)))
        tried.append(("G10 within the card, SSD", "", g10(on_ssd, CARD_BYTES)))
    tried += [(f"{each}, PCIe", "", try_strategy(each, imported)) for each in strategies]
    return [describe(model, batch, name, forecast, ideal, shipped, key) for name, key, forecast in tried]


def try_strategy(name: str, imported: Imported) -> Forecast | None:
    """One of our own strategies within the card; None where it finds no plan."""
    try:
        made = plan(imported.trace, imported.costs, CARD_BYTES, strategy=name)
    except ElbowroomError as error:
        print(f"  {name}: {error}")
        return None
    return Job(imported.trace, imported.costs).replay.run(made)


def describe(
    model: str, batch: int, policy: str, forecast: Forecast | None, ideal: Forecast, shipped: dict[str, float], key: str
) -> Row:
    """One line; a run that failed has no figure."""
    published = shipped.get(key)
    if published is not None:
        base = ideal.step_seconds * CYCLES_PER_SECOND if key == "ideal" else shipped["ideal"]
        published = None if published == float("inf") else published / base
    predicted = None if forecast is None else forecast.step_seconds / ideal.step_seconds
    return {
        "part": "g10",
        "model": model,
        "batch": batch,
        "policy": policy,
        "predicted": predicted,
        "published": published,
        "ratio": predicted / published if predicted and published else None,
        "both_fail": key in shipped and predicted is None and published is None,
        "peak_bytes": None if forecast is None else forecast.peak_bytes,
        "lower_tier_bytes": None if forecast is None else forecast.lower_tier_bytes,
    }


# -- tables -----------------------------------------------------------------------------------------------------------


def figure(value: float | None) -> str:
    """A ratio, or that there is none."""
    return f"{value:9.4f}" if value is not None else f"{'-':>9}"


def show_dtr(rows: list[Row]) -> None:
    """Print a line for each run."""
    heads = "".join(f"{head:>9} " for head in ("predicted", "measured", "ratio"))
    print(f"{'DTR, Titan V':16} {'budget':>8} {'used':>8} | ops {heads}| step {heads}")
    for row in rows:
        ops, step = (
            " ".join(figure(row[f"{what}_{part}"]) for part in ("predicted", "measured", "ratio"))
            for what in ("ops", "step")
        )
        used = f"{row['budget_bytes'] / 1e9:5.1f} GB {row['measured_peak_bytes'] / 1e9:5.2f} GB"
        print(f"{row['model']:16} {used} |     {ops} |      {step}  {row['ending']}")


def show_g10(rows: list[Row]) -> None:
    """Print a line for each policy."""
    heads = " ".join(f"{head:>9}" for head in ("predicted", "published", "ratio", "peak"))
    print(f"{'G10 artifact':16} {'batch':>5}  {'policy':30} {heads}")
    for row in rows:
        remark = "  both fail" if row["both_fail"] else ""
        peak = f"{row['peak_bytes'] / 2**30:5.1f} GiB" if row["peak_bytes"] is not None else "-"
        figures = " ".join(figure(row[part]) for part in ("predicted", "published", "ratio"))
        print(f"{row['model']:16} {row['batch']:5}  {row['policy']:30} {figures} {peak:>9}{remark}")


def main() -> None:
    """Run, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtr", type=pathlib.Path)
    parser.add_argument("--g10", type=pathlib.Path)
    parser.add_argument("--strategies", default="")
    parser.add_argument("--output")
    options = parser.parse_args()
    results: list[Row] = []
    if options.dtr:
        found = compare_dtr(options.dtr)
        show_dtr(found)
        results += found
    if options.g10:
        found = compare_g10(options.g10, [name for name in options.strategies.split(",") if name])
        show_g10(found)
        results += found
    if not results:
        parser.error("nothing to compare: give --dtr or --g10 a folder")
    write_results(options.output, results)


if __name__ == "__main__":
    main()
