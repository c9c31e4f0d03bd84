"""The ranks of one job, from the making of their rooms to the end of these."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from elbowroom.config import Config
from elbowroom.errors import RankLost
from elbowroom.hooks.ledger import Ledger
from elbowroom.hooks.sharded import find_replicas, list_shard_ranks
from elbowroom.ranks.agreement import Greeting, check_greetings
from elbowroom.ranks.future_callbacks import UnwatchedCallbacks
from elbowroom.ranks.process_ends import describe_process
from elbowroom.ranks.rank_group import RankGroup
from elbowroom.ranks.rank_monitor import RankMonitor

logger = logging.getLogger(__name__)

SECONDS_TO_END = 2.0
"""How long to look for the rank whose end has broken a connection."""

SHARED_OPTIONS = (
    *("mode", "strategy", "manages", "host_bytes", "min_offload_bytes", "settling_steps", "exact"),
    *("if_ranks_differ", "rank_timeout_seconds"),
)
"""Options of a room that all ranks must have alike."""


class Ranks:
    """The ranks that train one model. Made by `join_ranks`.

    Args:
        group: connects them.
        greetings: of all ranks.
        model: of this rank.
        ledger: counts the bytes of this rank.
    """

    def __init__(self, group: RankGroup, greetings: Sequence[Greeting], model: torch.nn.Module, ledger: Ledger) -> None:
        self.group = group
        self._replicas = find_replicas(model)
        self._monitor = RankMonitor(group, greetings, functools.partial(_describe, ledger))
        self._callbacks = UnwatchedCallbacks()
        self.budget_bytes = min(each.budget_bytes for each in greetings)

    def may_run_alone(self) -> bool:
        """Tell whether other ranks may have no step to run: inside `join`, they may have no batches left."""
        return any(getattr(each._join_config, "enable", False) for each in self._replicas)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Return a context in which this rank may wait for others. An error is told to them, or explained by theirs."""
        self._monitor.begin_step()
        try:
            yield
        except Exception as error:
            # A connection may be lost a moment before the process at its other end has ended.
            is_lost = isinstance(error, dist.DistError) or "gloo" in str(error)
            if cause := self._monitor.find_cause(SECONDS_TO_END if is_lost else 0.0):
                error.add_note(f"elbowroom: rank {self.group.rank} noticed that {cause}")
                logger.error("rank %d ends its step, as %s", self.group.rank, cause)
            self._monitor.note_failure(error)
            raise
        finally:
            self._monitor.is_waiting = False

    def leave(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Leave the others, and tell them the error that is the reason, if any."""
        if error is not None:
            self._monitor.note_failure(error)
        self.close()

    def close(self) -> None:
        """Leave the others."""
        self._callbacks.close()
        self._monitor.close()
        self.group.close()


def join_ranks(
    model: torch.nn.Module, config: Config, budget_bytes: int, members: Sequence[int], ledger: Ledger
) -> Ranks:
    """Meet the other ranks of a job. All of them must call it.

    Raises:
        UsageError: they have other models, versions or options; names the ranks.
        RanksDiffer: they have other budgets, and the job is to stop then.
        RankLost: some rank does not come in time.
    """
    group = RankGroup(members, config.rank_timeout_seconds)
    try:
        greetings = group.gather("elbowroom.fit", _greet(model, config, budget_bytes))
        note = check_greetings(greetings, stops=config.if_ranks_differ == "stop")
        if note:
            logger.warning("%s: all use the smallest", note)
        return Ranks(group, greetings, model, ledger)
    except BaseException:
        with contextlib.suppress(RankLost):
            group.close()
        raise


def find_members(model: torch.nn.Module) -> tuple[int, ...]:
    """Return the ranks that train a model together, in the default group; empty if it is trained by one process."""
    if not dist.is_available() or not dist.is_initialized() or not dist.is_gloo_available():
        return ()
    replicas = {rank for each in find_replicas(model) for rank in dist.get_process_group_ranks(each.process_group)}
    shards = list_shard_ranks(model)
    found = replicas | shards
    if replicas and shards and found not in (replicas, shards):
        found = set(range(dist.get_world_size()))  # replicas of shards: other ranks are linked by those of this one
    return tuple(sorted(found)) if len(found) > 1 else ()


def _describe(ledger: Ledger) -> str:
    refusal = next(reversed(ledger.refusals), "")  # a step may begin meanwhile, in another thread
    after = f", after {refusal.partition('. ')[0]}" if refusal else ""
    return f"holding {ledger.live_bytes} bytes{after}"


def _greet(model: torch.nn.Module, config: Config, budget_bytes: int) -> Greeting:
    from elbowroom import __version__

    found = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad};".encode())
    host, process = describe_process()
    options = dataclasses.asdict(config)
    return Greeting(
        versions=f"elbowroom {__version__}, torch {torch.__version__}",
        model=found.hexdigest(),
        options=tuple((name, str(options[name])) for name in SHARED_OPTIONS),
        budget_bytes=budget_bytes,
        host=host,
        process=process,
    )
