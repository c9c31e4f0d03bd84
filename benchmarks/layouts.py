"""How small an arena planned addresses need: the league's models, SmartPool's kind of networks, published instances.

    python benchmarks/layouts.py --parts models networks random --output benchmarks/results/layouts.json
    python benchmarks/layouts.py --parts published --folder FOLDER    # CSV files: id,lower,upper,size

For each: the arena of every allocator over the lower bound, seconds, and what pools without a plan take for the same
stream of requests. `--check` holds the results to what is promised.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from league import DEFAULT_CACHE, HARDWARE, MODELS, capture, find_job
from writing import write_results

from elbowroom._numba_loops import IS_COMPILED
from elbowroom.errors import UsageError
from elbowroom.ir.buffers import Buffer, find_clash
from elbowroom.layout.lay_out import DEFAULT, lay_out, list_allocators
from elbowroom.layout.lifetimes import list_buffers
from elbowroom.layout.pools import POOLS
from elbowroom.layout.requests import serve
from elbowroom.layout.tables import read_buffers

NETWORKS = {
    "VGG-16": ("cifar:build", {"batch": 100}),
    "AlexNet": ("cifar:build_alexnet", {"batch": 100}),
    "ResNet-20": ("cifar:build_resnet", {"batch": 100}),
}
"""For images of 32 pixels, as SmartPool's authors had them."""

MOST_FOR_ALL = 20_000
"""With more buffers only the default runs."""

LIMITS = {"models": 1.01, "published": 1.007}
LEAST_SAVED = 0.133
MOST_SECONDS = 10.0
"""For an instance that was published with the capacity that is to be reached."""


def measure(name: str, buffers: tuple[Buffer, ...], part: str) -> dict[str, Any]:
    """One instance under every allocator and pool."""
    begin = time.perf_counter()
    layout = lay_out(buffers)
    seconds = time.perf_counter() - begin
    pools = {pool: serve(buffers, make()) for pool, make in POOLS.items()}
    others: dict[str, int] = {}
    others_seconds: dict[str, float] = {}
    for allocator in list_allocators():
        if allocator in (DEFAULT, "exact") or len(buffers) > MOST_FOR_ALL:
            continue
        begin = time.perf_counter()
        try:
            others[allocator] = lay_out(buffers, allocator).arena_bytes
        except UsageError:
            continue  # a rival that is not installed, or does not take such buffers
        others_seconds[allocator] = round(time.perf_counter() - begin, 3)
    found = {
        "part": part, "name": name, "buffers": len(buffers), "bound_bytes": layout.bound_bytes,
        "arena_bytes": layout.arena_bytes, "over_bound": layout.arena_bytes / layout.bound_bytes,
        "is_optimal": layout.is_optimal, "seconds": round(seconds, 3), "allocators": others,
        "allocators_seconds": others_seconds, "pools": pools,
        "saved": {pool: 1 - layout.arena_bytes / nbytes for pool, nbytes in pools.items()},
    }  # fmt: skip
    saved = ", ".join(f"{pool} {share:.1%}" for pool, share in found["saved"].items())
    print(f"{name:32} {len(buffers):6} {found['over_bound']:.5f} of the bound"
          f"{' (optimal)' if layout.is_optimal else ''} {seconds:6.2f} s; less than {saved}", flush=True)  # fmt: skip
    return found


def list_instances(options: argparse.Namespace) -> Any:
    """Name, buffers and part of all that was asked for."""
    if "models" in options.parts:
        for model in MODELS:
            for hardware in options.hardware:
                trace, _ = find_job(model, hardware, options.cache)
                yield f"{model} on {hardware}", list_buffers(trace), "models"
    if "networks" in options.parts:
        for name, (spec, workload) in NETWORKS.items():
            yield name, list_buffers(capture(spec, workload)), "networks"
    if "published" in options.parts:
        for path in sorted(options.folder.glob("**/*.csv")):
            yield path.stem, read_buffers(path), "published"
    if "large" in options.parts:
        for count in (10_000, 100_000):
            yield f"{count} made-up buffers", make_step(count), "large"


def make_step(count: int) -> tuple[Buffer, ...]:
    """Buffers of a made-up step: activations from forward to backward, and temporaries in between."""
    chance = random.Random(count)
    found = []
    for name in range(count):
        at = chance.randrange(count)
        away = chance.random() < 0.3
        end = max(at + 1, 2 * count - at + chance.randrange(-20, 20)) if away else at + chance.randrange(1, 40)
        lower = at if away else chance.randrange(2 * count)
        upper = end if away else lower + chance.randrange(1, 40)
        nbytes = chance.choice((1, 2, 3, 4, 6, 8)) * (1 << chance.randrange(9, 22))
        found.append(Buffer(id=name, lower=lower, upper=upper, nbytes=nbytes, alignment=512))
    return tuple(found)


def make_instance(seed: int) -> tuple[Buffer, ...]:
    """A few random buffers: some wrap, some are aligned, some pinned where they do not clash, some beyond 2**32."""
    chance = random.Random(seed)
    buffers: list[Buffer] = []
    for name in range(chance.randrange(1, 9)):
        lower, upper = chance.sample(range(10), 2)
        if upper < lower and chance.random() < 0.8:
            lower, upper = upper, lower
        nbytes = chance.randrange(1, 12) << chance.choice((0, 0, 40))
        alignment = chance.choice((1, 1, 1, 4, 512))
        offset = chance.randrange(4) * alignment if chance.random() < 0.1 else None
        buffer = Buffer(id=name, lower=lower, upper=upper, nbytes=nbytes, alignment=alignment, offset=offset)
        pinned = [each for each in [*buffers, buffer] if each.offset is not None]
        if find_clash(pinned, [each.offset or 0 for each in pinned]) is None:
            buffers.append(buffer)
    return tuple(buffers)


def try_random(count: int, results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Random instances under all allocators by turns; each layout is looked at pair by pair.

    Goes on after those of the results, and yields what is known every 20,000.
    """
    names = [name for name in list_allocators() if name != "omnimalloc"]
    known = next((each for each in results if each["part"] == "random"), {})
    tried, refused, seconds = (known.get(key, 0) for key in ("instances", "refused", "seconds"))
    while tried < count:
        begin = time.perf_counter()
        for seed in range(tried, min(tried + 20_000, count)):
            name = names[seed % len(names)]
            try:
                lay_out(make_instance(seed), name)  # raises InternalError where two overlap
            except UsageError:
                if name != "best_fit":  # which has no place for pinned buffers beside some that wrap
                    raise
                refused += 1
            tried += 1
        seconds += time.perf_counter() - begin
        yield {"part": "random", "name": f"random instances under {', '.join(names)} by turns", "instances": tried,
               "layouts": tried - refused, "refused": refused, "overlaps": 0, "seconds": round(seconds, 1)}  # fmt: skip


def find_broken(results: list[dict[str, Any]]) -> list[str]:
    """What is promised and does not hold."""
    broken = []
    for each in results:
        name, over = each["name"], each.get("over_bound", 1.0)
        if each["part"] == "models" and over > LIMITS["models"]:
            broken.append(f"{name}: {over:.4f} of the bound")
        if each["part"] == "models" and each["seconds"] > max(2.0, each["buffers"] / 5000):
            broken.append(f"{name}: {each['seconds']} s")
        if each["part"] == "published" and each["buffers"] > 10_000 and over > LIMITS["published"]:
            broken.append(f"{name}: {over:.4f} of the bound")
        stated = name.rpartition(".")[2]
        if each["part"] == "published" and stated.isdecimal() and each["arena_bytes"] > int(stated):
            broken.append(f"{name}: {each['arena_bytes']} bytes")
        if each["part"] == "published" and stated.isdecimal() and each["seconds"] > MOST_SECONDS:
            broken.append(f"{name}: {each['seconds']} s")
        broken += [f"{name}: {other} takes less" for other, nbytes in each.get("allocators", {}).items()
                   if nbytes < each["arena_bytes"]]  # fmt: skip
    models = [each["over_bound"] for each in results if each["part"] == "models"]
    if models and statistics.median(models) > 1.001:
        broken.append(f"the median model is at {statistics.median(models):.4f} of the bound")
    networks = [each["saved"]["best_fit_pool"] for each in results if each["part"] == "networks"]
    if networks and max(networks) < LEAST_SAVED:
        broken.append(f"{max(networks):.1%} less than a best-fit pool, and not {LEAST_SAVED:.1%}")
    return broken


def main() -> None:
    """Run the parts, and write down what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("models", "networks", "published", "large", "random")
    parser.add_argument("--parts", nargs="+", choices=parts, default=["models", "networks"])
    parser.add_argument("--hardware", nargs="+", choices=sorted(HARDWARE), default=["p100", "rtx4090", "h200"])
    parser.add_argument("--cache", type=pathlib.Path, default=DEFAULT_CACHE, help="where captured traces are kept")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("."), help="where published tables are")
    parser.add_argument("--random", type=int, default=1_000_000, help="how many random instances")
    parser.add_argument("--output", help="where results are written")
    parser.add_argument(
        "--resume", action="store_true", help="keep what --output has of other parts; go on with random"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 where a promise does not hold")
    options = parser.parse_args()
    if not IS_COMPILED:
        print("numba is not installed: this will take very long", file=sys.stderr)
    lay_out(make_step(2100))  # machine code is made before anything is timed
    lay_out(make_step(60))
    before = json.loads(pathlib.Path(options.output).read_text())["results"] if options.resume else []
    results = [each for each in before if each["part"] not in options.parts]
    results += [measure(name, buffers, part) for name, buffers, part in list_instances(options)]
    write_results(options.output, results)
    if "random" in options.parts:
        for found in try_random(options.random, before):
            print(found, flush=True)
            results = [*(each for each in results if each["part"] != "random"), found]
            write_results(options.output, results)
    broken = find_broken(results)
    print("\n".join(broken) or "everything that is promised holds")
    sys.exit(1 if options.check and broken else 0)


if __name__ == "__main__":
    main()
