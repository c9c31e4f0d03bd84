"""Several ranks on one machine: what a room costs them, what it saves, and how jobs end whose ranks are killed.

    python benchmarks/rank_runs.py overhead|sharded|kills [--ranks 2] [--runs 5] [--words 64] [--output FILE.json]

`overhead`: two jobs, one with a room, take turns step by step; once with DistributedDataParallel, and once with a model
    of its own in each process. Median of the pairs' ratios; in the room everything fits (1), or 0.7 of the peak.
`sharded`: FSDP2 with all blocks checkpointed, and FSDP2 in a room whose budget is the peak of that. Processes take
    turns. Peaks are those of the rooms' journals; `busy` is a rank's processor time a step.
`kills`: one rank is killed at a random moment, from `fit` on. Seconds until the other ranks end, whether they say which
    rank it was, and what is left of the job.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import pickle
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import elbowroom
from benchmarks.writing import write_results
from elbowroom.hardware.probe import probe
from elbowroom.ir.hardware import HardwareProfile

WIDTH, LAYERS, WORDS, BATCH = 256, 4, 64, 8
WARM_UP, PAIRS = 5, 10
LONGEST_SECONDS = 60.0
"""Within this time the ranks that are left have to end."""

KILLED_BYTES = 60 << 20
"""Budget of ranks that are killed."""

Folder = pathlib.Path


class Model(nn.Module):
    """A transformer. `recomputes`: whether it checkpoints all its layers."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = recomputes
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x.square().mean()


class Training:
    """A model with its optimizer, in a room if there is a budget."""

    def __init__(self, model: nn.Module, rank: int, folder: Folder, budget: int = 0, **options: Any) -> None:
        self.model, self.rank = model, rank
        self.words = int((folder / "words").read_text())
        options["profile"] = pickle.loads((folder / "profile").read_bytes())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.room = elbowroom.fit(model, self.optimizer, budget, **options) if budget else None

    def step(self, *, meets: bool = True) -> float:
        """Run a step. Return its seconds. `meets`: whether the ranks begin it together."""
        x = torch.randn(BATCH, self.words, WIDTH, generator=torch.Generator().manual_seed(self.rank))
        if meets:
            dist.barrier()
        begin = time.perf_counter()
        if self.room is None:
            self._run(x)
        else:
            with self.room.step():
                self._run(x)
        return time.perf_counter() - begin

    def _run(self, x: torch.Tensor) -> None:
        self.model(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def find_peak(self) -> int:
        assert self.room is not None
        return self.room.journal().peak_bytes or 0


def replicate(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def keep(model: nn.Module) -> nn.Module:
    return model


def shard(model: Model) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


# -- what ranks run ----------------------------------------------------------------------------------------------------


def measure_overhead(rank: int, folder: Folder) -> dict[str, float]:
    found = {}
    for name, spread in (("one device", keep), ("DistributedDataParallel", replicate)):
        peak = _find_peak(rank, folder, spread)
        plain = Training(spread(Model()), rank, folder)
        plain.step()  # makes its state before there is a room that would count it
        for share in (1.0, 0.7):
            budget = 8 << 30 if share == 1.0 else int(share * peak)
            managed = Training(spread(Model()), rank, folder, budget)
            assert managed.room is not None
            for _ in range(WARM_UP):
                managed.step(), plain.step()
            ratios = [managed.step() / plain.step() for _ in range(PAIRS)]
            found[f"{name}, {share:g}"] = statistics.median(ratios)
            managed.room.detach()
    return found


def _find_peak(rank: int, folder: Folder, spread: Callable[[Any], nn.Module], recomputes: bool = False) -> int:
    """Return the highest peak of any rank with everything in memory."""
    training = Training(spread(Model(recomputes)), rank, folder, 8 << 30)
    for _ in range(WARM_UP):
        training.step()
    peak = torch.tensor(training.find_peak())
    assert training.room is not None
    training.room.detach()
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def measure_peak(rank: int, folder: Folder) -> dict[str, float]:
    return {"peak": _find_peak(rank, folder, shard, recomputes=True)}


def measure_checkpointed(rank: int, folder: Folder) -> dict[str, float]:
    return _time(Training(shard(Model(recomputes=True)), rank, folder))


def measure_planned(rank: int, folder: Folder) -> dict[str, float]:
    budget = int(json.loads((folder / "peak").read_text()))
    training = Training(shard(Model()), rank, folder, budget)
    return _time(training) | {"peak": training.find_peak()}


def _time(training: Training) -> dict[str, float]:
    for _ in range(WARM_UP):
        training.step()
    began = time.process_time()
    found = [training.step() for _ in range(PAIRS)]
    return {"seconds": statistics.median(found), "busy": (time.process_time() - began) / PAIRS}


def train_for_ever(rank: int, folder: Folder) -> dict[str, float]:
    (folder / "spill").mkdir(exist_ok=True)
    model = replicate(Model())
    (folder / f"ready{rank}").touch()
    training = Training(model, rank, folder, KILLED_BYTES, spill_folder=str(folder / "spill"))
    while True:
        training.step(meets=False)


# -- processes ---------------------------------------------------------------------------------------------------------


def _run(rank: int, ranks: int, folder: Folder, function: str) -> None:
    os.dup2(os.open(folder / f"text{rank}", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    found = globals()[function](rank, folder)
    (folder / f"result{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def start(ranks: int, folder: Folder, function: Callable[[int, Folder], Any]) -> list[Any]:
    """Start the ranks of a job."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["elbowroom", "torch.distributed", "benchmarks.ranks"])
    made = [context.Process(target=_run, args=(rank, ranks, folder, function.__name__)) for rank in range(ranks)]
    for each in made:
        each.start()
    return made


def measure(
    ranks: int, profile: HardwareProfile, function: Callable[[int, Folder], Any], peak: int = 0, words: int = WORDS
) -> dict[str, float]:
    """Run a function on all ranks. Return the mean of their figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "peak").write_text(json.dumps(peak))
        (folder / "words").write_text(str(words))
        (folder / "profile").write_bytes(pickle.dumps(profile))
        for each in start(ranks, folder, function):
            each.join()
            if each.exitcode:
                raise SystemExit((folder / "text0").read_text()[-4000:])
        found = [json.loads((folder / f"result{rank}").read_text()) for rank in range(ranks)]
    return {key: statistics.mean(each[key] for each in found) for key in found[0]}


def kill_one(ranks: int, chance: random.Random, profile: HardwareProfile) -> dict[str, Any]:
    """Kill a rank of a job. Return how the others end."""
    before = _list_files(())
    with tempfile.TemporaryDirectory(prefix="elbowroom-kills-") as name:
        folder = pathlib.Path(name)
        (folder / "profile").write_bytes(pickle.dumps(profile))
        (folder / "words").write_text(str(WORDS))
        processes = start(ranks, folder, train_for_ever)
        while not all((folder / f"ready{rank}").exists() for rank in range(ranks)):
            time.sleep(0.01)
        delay, victim = chance.uniform(0.0, 8.0), chance.randrange(ranks)
        time.sleep(delay)
        early = [each.exitcode for each in processes]
        processes[victim].kill()
        begin = time.monotonic()
        others = [each for rank, each in enumerate(processes) if rank != victim]
        for each in others:
            each.join(max(0.0, begin + 2 * LONGEST_SECONDS - time.monotonic()))
        seconds = time.monotonic() - begin
        texts = [(folder / f"text{rank}").read_text(errors="replace") for rank in range(ranks) if rank != victim]
        left = [str(each.relative_to(folder)) for each in folder.glob("spill/*")]
        living = [each for each in processes if each.is_alive()]
        for each in living:
            each.kill()
        for each in processes:
            each.join()
    shared = sorted(_list_files([f"{each.pid}" for each in processes]) - before)
    is_named = any(f"rank {victim}" in text for text in texts)
    return {
        "delay": delay, "victim": victim, "seconds": seconds, "is_named": is_named, "left": left,
        "living": len(living), "shared": shared, "early": [each for each in early if each is not None],
        "text": "" if is_named else texts[0][-2000:],
    }  # fmt: skip


def _list_files(parts: Sequence[str]) -> set[str]:
    """Return what lies in shared memory and among temporary files and has one of some parts in its name, or ours."""
    there = [str(each) for where in ("/dev/shm", tempfile.gettempdir()) for each in pathlib.Path(where).iterdir()]
    return {each for each in there if any(part in each for part in ("elbowroom", *parts))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "sharded", "kills"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--words", type=int, default=WORDS, help="of a sample, for `sharded`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output")
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    chance = random.Random(given.seed)
    profile = probe("cpu")
    peak = 0
    if given.what == "sharded":
        peak = int(measure(given.ranks, profile, measure_peak, words=given.words)["peak"])
    for _ in range(given.runs):
        if given.what == "overhead":
            results.append(measure(given.ranks, profile, measure_overhead))
        elif given.what == "sharded":
            one = measure(given.ranks, profile, measure_checkpointed, words=given.words)
            other = measure(given.ranks, profile, measure_planned, peak, given.words)
            found = {"peak": peak, "its": other["peak"]}
            found |= {f"checkpointed_{key}": one[key] for key in ("seconds", "busy")}
            results.append(found | {f"room_{key}": other[key] for key in ("seconds", "busy")})
        else:
            results.append(kill_one(given.ranks, chance, profile))
        print(results[-1], flush=True)
    if given.what == "kills":
        late = sum(each["seconds"] > LONGEST_SECONDS for each in results)
        unnamed = sum(not each["is_named"] for each in results)
        rest = sum(bool(each["left"] or each["shared"] or each["living"]) for each in results)
        longest = max(each["seconds"] for each in results)
        print(f"{len(results)} kills: {late} late, {unnamed} not named, {rest} left something; longest {longest:.1f} s")
    write_results(given.output, results)


if __name__ == "__main__":
    main()
