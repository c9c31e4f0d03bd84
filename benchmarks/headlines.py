"""The published headlines, reproduced in simulation on the hardware of their time, and `auto` on the same traces.

    python benchmarks/headlines.py [--headlines vdnn,autoswap,throughput,batch] [--models ResNet-50 ...]
        [--hardware p100] [--cache FOLDER] [--output FILE.json] [--check]

vdnn        VGG-16 with 256 images in the 12 GB of a Titan X, with 18 % loss against a card with enough memory.
autoswap    up to 34.2 % less memory at no cost in time.
throughput  HOME's samples per second: up to 5.7 times vDNN's and 1.3 times Capuchin's.
batch       HOME's largest batch: up to 2.8 times PyTorch's and 1.3 times Capuchin's.

G10's is in `imported.py`. All figures are forecasts of judged plans. A headline says "up to": its figure is the largest
of all the rows above it. What comes of each row:

reproduced      the strategy of the paper, as it is built here, has the published figure (to 5 %)
passed          it has not, and `auto` has
not reproduced  neither has

with the reason where it is not reproduced. Beside that stands whether `auto` is as good as the strategy (to 0.5 %); a
strategy that has no figure is no match. With --check the exit code is 1 where `auto` is not as good, or has no figure.

Inferred, since the papers or their texts do not say, or could not be read:

- vdnn: clocks of the card by its datasheet (boost), and the same reachable shares of them as for other cards; no choice
  of algorithms. Loss is 1 - plain seconds / seconds, both with the same algorithms. The published memory is that of a
  framework that keeps a gradient of each layer; autograd lets go of them. On the other hand the backward pass of a ReLU
  has a result of its own in PyTorch, so that vDNN, which by then fetches for the next convolution, does not fit into
  12 GB: the third row is what it loses in what it needs.
- autoswap: neither models nor card are known. Four nets with 100 images: VGG-16 and ResNet-50 as in the authors'
  examples (CIFAR-10), and as for ImageNet; on a P100, behind the link that their code measured. The best of the five
  scores. `auto`'s figure is its smallest memory, by bisection, at which the step takes no longer (to 0.01 %); it is as
  good where within AutoSwap's memory the step takes no longer by more than 0.5 %. Here copies begin only where autograd
  saves or asks for something, and parameters and their momenta, most of what such small nets hold, stay.
- throughput, batch: HOME names neither its six models nor, in its abstract, its card; these are Capuchin's six (BERT in
  its large form), on Capuchin's card. For throughput, batches lie between the largest that fits without a plan and the
  largest that fits with vDNN, so that all of them can be compared. Our Capuchin and HOME are built from notes, and
  where all else fails let everything leave at once, as ours does: so all of them train the same largest batch, however
  slowly. Nobody would: a batch counts where samples per second are at least half of what they are without a plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from league import DEFAULT_CACHE, HARDWARE, MODELS, capture
from writing import write_results

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.costs import Costs
from elbowroom.ir.hardware import HardwareProfile, Tier
from elbowroom.ir.trace import Trace
from elbowroom.planner.comparison.strategies_compared import attempt
from elbowroom.planner.problem import plan, pose

SLACK = 0.005
"""By which `auto` may fall short."""

CLOSE = 0.05
"""By which a figure may fall short of the published one."""

ACCEPTED = 0.5
"""Of the samples per second without a plan: what a larger batch may cost."""

NO_COST = 1e-4
"""Of the plain step: what counts as no cost in time."""

TOLERANCE = 0.02
"""Of the largest batch, to which it is searched; and of memory."""

SIX = ("VGG-16", "ResNet-50", "ResNet-152", "Inception-v3", "Inception-v4", "BERT-large")
SCORES = ("doa", "aoa", "wdoa", "swdoa", "vote")
IMAGENET = {"image_size": 224}
SWAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "VGG-16, 32 pixels": ("cifar:build", {}),
    "ResNet-50, 32 pixels": ("torchvision:resnet50", {"image_size": 32}),
    "VGG-16, 224 pixels": ("torchvision:vgg16", IMAGENET),
    "ResNet-50, 224 pixels": ("torchvision:resnet50", IMAGENET),
}

Row = dict[str, Any]


def make_row(
    headline: str, model: str, what: str, found: float | None, auto: float | None, *, published: float | None = None,
    less: bool = False, reason: str = "", **more: Any,
) -> Row:  # fmt: skip
    """One line.

    Args:
        found, auto: figures of the paper's strategy and of ours; None where there is no plan.
        published: the paper's.
        less: whether smaller is better.
        reason: why the headline cannot be reproduced by this row, whatever its figures.
    """
    row = {"headline": headline, "model": model, "what": what, "found": found, "auto": auto, "published": published}
    is_as_good = None
    if found is not None:
        is_as_good = auto is not None and (auto <= found + SLACK if less else auto >= found * (1 - SLACK))
    elif auto is None:
        is_as_good = False
    verdict, why = judge(found, auto, published, less)
    return {**row, "verdict": "not reproduced" if reason else verdict, "reason": reason or why,
            "as_good": is_as_good, **more}  # fmt: skip


def judge(found: float | None, auto: float | None, published: float | None, less: bool) -> tuple[str, str]:
    """What comes of a row, and why it is not reproduced where it is not."""
    if published is None:
        return "not reproduced", "nothing is published for this row"

    def reaches(figure: float | None) -> bool:
        if figure is None:
            return False
        return figure <= published * (1 + CLOSE) if less else figure >= published * (1 - CLOSE)

    if reaches(found):
        return "reproduced", ""
    why = "the strategy has no plan here" if found is None else f"the strategy has {found:.3f}, not {published:.3f}"
    if reaches(auto):
        return "passed", why
    return "not reproduced", f"{why}, and auto has {'none' if auto is None else format(auto, '.3f')}"


# -- steps and machines -----------------------------------------------------------------------------------------------


class Jobs:
    """Traces, captured once and kept in a folder, with their costs on one machine."""

    def __init__(self, cache: pathlib.Path, profile: HardwareProfile) -> None:
        self.cache, self.profile = cache, profile
        self.memory_bytes = profile.tiers[0].capacity_bytes
        self.load = functools.lru_cache(maxsize=4)(self._load)
        self.seconds = functools.cache(self._seconds)

    def _load(self, model: str, batch: int) -> tuple[Trace, Costs]:
        spec, options = SWAPPED[model] if model in SWAPPED else MODELS[model][:2]
        path = self.cache / f"{model.replace(', ', '-').replace(' ', '-')}-{batch}-float32.json.gz"
        if path.exists():
            trace = elbowroom.load(Trace, path)
        else:
            print(f"capturing {model}, {batch} samples", file=sys.stderr, flush=True)
            fixed = {"batch": batch, "dtype": "float32", "device": "cpu"}
            trace = capture(spec, {"optimizer": "sgd", **options, **fixed})
            self.cache.mkdir(parents=True, exist_ok=True)
            elbowroom.save(trace, path)
        return trace, elbowroom.price(trace, self.profile)

    def _seconds(self, model: str, batch: int, strategy: str) -> float | None:
        """Of the step within the card's memory; None where it does not fit."""
        outcome = attempt(*self.load(model, batch), self.memory_bytes, strategy).outcome
        return None if outcome is None else outcome.step_seconds

    def peaks(self, model: str, batch: int) -> tuple[int, int]:
        """Bytes of the step without a plan, and of the plan with the lowest peak."""
        problem = pose(*self.load(model, batch), 1)
        return problem.plain.peak_bytes, problem.floor.peak_bytes


def make_titan_x() -> HardwareProfile:
    """The Maxwell Titan X of 2015: 6.6 TFLOPS in float32 (3,072 cores at 1,075 MHz), 336.5 GB/s, 12 GiB."""
    p100 = load_shipped("p100")  # 9.3 TFLOPS, 732 GB/s: the same shares of what the datasheet promises
    rates = tuple(
        dataclasses.replace(
            rate, per_second=rate.per_second * (336.5 / 732 if rate.kind == "elementwise" else 6.6 / 9.3)
        )
        for rate in p100.rates
    )
    device = Tier(name="device", capacity_bytes=p100.tiers[0].capacity_bytes * 12 // 16)
    return dataclasses.replace(p100, name="NVIDIA Titan X (Maxwell)", rates=rates, tiers=(device, *p100.tiers[1:]))


def make_singa_card() -> HardwareProfile:
    """A P100 behind the link that AutoSwap's code measured: 47.2 us + 0.0756 ns a byte out, 9.7 us + 0.0823 ns back."""
    p100 = load_shipped("p100")
    link = dataclasses.replace(
        p100.links[0], out_latency_seconds=47.2e-6, out_bytes_per_second=1 / 0.0756e-9,
        back_latency_seconds=9.7e-6, back_bytes_per_second=1 / 0.0823e-9,
    )  # fmt: skip
    return dataclasses.replace(p100, links=(link, *p100.links[1:]))


# -- the headlines ----------------------------------------------------------------------------------------------------


def reproduce_vdnn(options: argparse.Namespace) -> list[Row]:
    """VGG-16 with 256 images in 12 GB, and in what vDNN needs here."""
    jobs = Jobs(options.cache, make_titan_x())
    trace, costs = jobs.load("VGG-16", 256)
    plain = pose(trace, costs, 1).plain

    def lose(memory_bytes: int, strategy: str) -> float | None:
        outcome = attempt(trace, costs, memory_bytes, strategy).outcome
        return None if outcome is None else 1 - plain.step_seconds / outcome.step_seconds

    gigabytes = plain.peak_bytes / 1e9
    kept = "the framework of the paper keeps a gradient of each layer, and autograd does not"
    plain_row = make_row("vdnn", "VGG-16, 256", "GB of the plain step", gigabytes, None, published=28.0, reason=kept)
    rows = [{**plain_row, "as_good": None}]  # it is nobody's plan
    needed_bytes = max(jobs.memory_bytes, attempt(trace, costs, jobs.memory_bytes, "vdnn").needed_bytes)
    for memory_bytes in dict.fromkeys((jobs.memory_bytes, needed_bytes)):
        losses = [lose(memory_bytes, strategy) for strategy in ("vdnn", "auto")]
        what, reason = f"loss in {memory_bytes / 2**30:.1f} GiB", ""
        if memory_bytes > jobs.memory_bytes:
            reason = f"vdnn needs it, and the headline is of {jobs.memory_bytes / 2**30:.1f} GiB"
        rows.append(make_row("vdnn", "VGG-16, 256", what, *losses, published=0.18, less=True, reason=reason))
    return rows


def reproduce_autoswap(options: argparse.Namespace) -> list[Row]:
    """Memory that AutoSwap saves without anything ever waiting."""
    jobs = Jobs(options.cache, make_singa_card())
    rows = []
    for model in SWAPPED:
        trace, costs = jobs.load(model, 100)
        plain = pose(trace, costs, 1).plain
        least = min(find_least_without_waits(trace, costs, score) for score in SCORES)
        ours = find_least_memory(trace, costs, least)
        row = make_row(
            "autoswap", f"{model}, 100", "memory saved", 1 - least / plain.peak_bytes, 1 - ours / plain.peak_bytes,
            published=0.342,
        )  # fmt: skip
        outcome = attempt(trace, costs, least, "auto").outcome
        is_as_good = outcome is not None and outcome.step_seconds <= plain.step_seconds * (1 + SLACK)
        rows.append({**row, "as_good": is_as_good})
    return [*rows, sum_up(rows, "memory saved")]


def find_least_without_waits(trace: Trace, costs: Costs, score: str) -> int:
    """The smallest budget in which AutoSwap finds a plan that never waits."""
    try:
        plan(trace, costs, 1, strategy=f"autoswap:mode=zero_overhead,score={score}")
    except Infeasible as error:
        return error.needed_bytes
    raise AssertionError("no step fits into one byte")


def find_least_memory(trace: Trace, costs: Costs, known_bytes: int) -> int:
    """The least memory, to 2 %, in which `auto` takes no longer than the plain step does."""
    problem = pose(trace, costs, 1)
    most = problem.plain.step_seconds * (1 + NO_COST)

    def is_free(budget_bytes: int) -> bool:
        outcome = attempt(trace, costs, budget_bytes, "auto").outcome
        return outcome is not None and outcome.step_seconds <= most

    high = known_bytes if is_free(known_bytes) else problem.plain.peak_bytes
    low = problem.floor.peak_bytes - 1 if high == known_bytes else known_bytes
    while high - low > TOLERANCE * high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_free(middle) else (middle, high)
    return high


def reproduce_throughput(options: argparse.Namespace) -> list[Row]:
    """HOME's samples per second over those of vDNN and Capuchin, with two batches of each model that vDNN fits."""
    jobs = Jobs(options.cache, load_shipped(options.hardware))
    rows = []
    for model in options.models:
        plain, most = find_plain_and_most(jobs, model)
        largest = find_largest(lambda batch, model=model: jobs.seconds(model, batch, "vdnn") is not None, most,
                               low=plain, high=most + 1)  # fmt: skip
        for batch in dict.fromkeys(int(plain * (largest / plain) ** share) for share in (0.5, 1.0)):
            seconds = {name: jobs.seconds(model, batch, name) for name in ("vdnn", "capuchin", "home_pso", "auto")}
            for rival, published in (("vdnn", 5.7), ("capuchin", 1.3)):
                ratios = [_divide(seconds[rival], seconds[name]) for name in ("home_pso", "auto")]
                reason = f"{rival} has no plan here" if seconds[rival] is None else ""
                row = make_row("throughput", f"{model}, {batch}", f"over {rival}", *ratios, published=published,
                               reason=reason, seconds=seconds)  # fmt: skip
                rows.append(row)
    return [*rows, sum_up(rows, "over vdnn"), sum_up(rows, "over capuchin")]


def _divide(rival: float | None, own: float | None) -> float | None:
    return None if rival is None or own is None else rival / own


def reproduce_batch(options: argparse.Namespace) -> list[Row]:
    """HOME's largest batch over that of PyTorch and Capuchin, at half of the plain samples per second or more."""
    jobs = Jobs(options.cache, load_shipped(options.hardware))
    rows = []
    for model in options.models:
        plain, most = find_plain_and_most(jobs, model)
        sizes = {
            name: find_accepted(jobs, model, name, plain, most) for name in ("vdnn", "capuchin", "home_pso", "auto")
        }
        plain_seconds = jobs.seconds(model, plain, "keep_all")
        rates = {}
        for name, size in sizes.items():
            seconds = jobs.seconds(model, size, name)
            rates[name] = None if seconds is None else size / seconds / (plain / plain_seconds)
        for rival, size, published in (("pytorch", plain, 2.8), ("capuchin", sizes["capuchin"], 1.3)):
            ratios = [sizes[name] / size for name in ("home_pso", "auto")]
            row = make_row("batch", model, f"over {rival}", *ratios, published=published,
                           batches={"pytorch": plain, **sizes}, rates=rates)  # fmt: skip
            if rival == "capuchin" and sizes["auto"] == size:
                shares = f"at {rates[rival]:.2f} of the plain samples per second, auto at {rates['auto']:.2f}"
                row["reason"] += f"; both train {size}, {rival} {shares}"
            rows.append(row)
    return [*rows, sum_up(rows, "over pytorch"), sum_up(rows, "over capuchin")]


def find_plain_and_most(jobs: Jobs, model: str) -> tuple[int, int]:
    """The largest batch without a plan, and with any; to 2 %."""
    memory, (small, large) = jobs.memory_bytes, ((32, 128) if model != "BERT-large" else (2, 8))
    found = []
    for which in (0, 1):
        begin, end = (jobs.peaks(model, batch)[which] for batch in (small, large))
        guess = small + int((memory - begin) * (large - small) / (end - begin))
        found.append(find_largest(lambda batch, which=which: jobs.peaks(model, batch)[which] <= memory, guess))
    return found[0], found[1]


def find_accepted(jobs: Jobs, model: str, strategy: str, plain: int, most: int) -> int:
    """The largest batch with a strategy that costs no more throughput than is accepted; `most` fits with any."""
    plain_seconds = jobs.seconds(model, plain, "keep_all")
    assert plain_seconds is not None  # that is what `plain` is

    def is_accepted(batch: int) -> bool:
        seconds = jobs.seconds(model, batch, strategy)
        return seconds is not None and batch / seconds >= ACCEPTED * plain / plain_seconds

    return find_largest(is_accepted, int(plain * (most / plain) ** 0.5), low=plain, high=most + 1)


def find_largest(fits: Callable[[int], bool], guess: int, *, low: int = 1, high: int | None = None) -> int:
    """The largest batch that fits, to 2 %. `low` is known to fit, `high` not to."""
    batch = max(guess, low + 1)
    step = max(1, int(TOLERANCE * batch))
    while high is None or high - low > max(1, TOLERANCE * low):
        if high is not None and not low < batch < high:
            batch = (low + high) // 2
        if fits(batch):
            low, batch = batch, batch + step
        else:
            high, batch = batch, batch - step
        step *= 2
    return low


def sum_up(rows: list[Row], what: str) -> Row:
    """The largest figures of all rows."""
    of_what = [row for row in rows if row["what"] == what]
    found, auto = (
        max((row[key] for row in of_what if row[key] is not None), default=None) for key in ("found", "auto")
    )
    headline, published = of_what[0]["headline"], of_what[0]["published"]
    row = make_row(headline, "up to", what, found, auto, published=published)
    if row["verdict"] != "reproduced":
        row["reason"] += f"; inferred: {INFERRED[headline]}"
    compared = [each["as_good"] for each in of_what if each["as_good"] is not None]
    return {**row, "as_good": all(compared) if compared else None}


# -- what is printed --------------------------------------------------------------------------------------------------

REPRODUCE: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "vdnn": reproduce_vdnn,
    "autoswap": reproduce_autoswap,
    "throughput": reproduce_throughput,
    "batch": reproduce_batch,
}
INFERRED = {
    "vdnn": "clocks, algorithms",
    "autoswap": "models, card",
    "throughput": "models, batches, card, HOME itself",
    "batch": "models, card, HOME itself",
}


def show(row: Row) -> None:
    """One line."""
    keys = ("published", "found", "auto")
    figures = "".join(f"{'-' if row.get(key) is None else format(row[key], '.3f'):>11}" for key in keys)
    head = f"{row['headline']:11} {row['model']:28} {row['what']:21}"
    as_good = {True: "yes", False: "NO", None: "-"}[row["as_good"]]
    print(f"{head}{figures}  {as_good:12} {row['verdict']:15} {row['reason']}", flush=True)


def main() -> None:
    """Reproduce, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headlines", default=",".join(REPRODUCE))
    parser.add_argument("--models", nargs="+", choices=SIX, default=list(SIX), metavar="MODEL")
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="p100", metavar="PROFILE")
    parser.add_argument("--cache", type=pathlib.Path, default=DEFAULT_CACHE, help="where captured traces are kept")
    parser.add_argument("--output")
    parser.add_argument("--check", action="store_true", help="exit code 1 where auto is not at least as good")
    options = parser.parse_args()
    names = options.headlines.split(",")
    if unknown := set(names) - set(REPRODUCE):
        parser.error(f"--headlines: {', '.join(sorted(unknown))}; there are {', '.join(REPRODUCE)}")
    heads = f"{'headline':11} {'model, batch':28} {'what':21}{'published':>11}{'found':>11}{'auto':>11}"
    print(f"{heads}  auto as good {'verdict':15} why")
    rows: list[Row] = []
    for name in names:
        found = REPRODUCE[name](options)
        for row in found:
            show(row)
        rows += found
        write_results(options.output, rows)
    counts = Counter(row["verdict"] for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())), "of", len(rows))
    if options.check and any(row["as_good"] is False for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
