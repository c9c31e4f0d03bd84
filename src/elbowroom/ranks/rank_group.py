"""The processes of one job, connected by a group of their own: what one says, all hear, or all get an error."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from elbowroom.errors import RankLost
from elbowroom.ranks.process_ends import describe_process, ending_if_lost, has_ended

logger = logging.getLogger(__name__)

ENDING_SECONDS = 1.0
"""How long a process may take to end after it has lost its connections."""

LENGTH_BYTES = 8

Value = TypeVar("Value")

_numbers = itertools.count()
"""Numbers of the groups of this process, which are made in the same order on all ranks."""


class _Word(NamedTuple):
    """Word of a leader while the others wait. `kind`: "working", "done" or "failed"."""

    kind: str
    value: Any


class RankGroup:
    """Processes that exchange Python objects between steps. They use gloo, whatever their tensors use.

    Args:
        members: ranks of the job in the default group, in order.
        timeout_seconds: how long a rank waits for another one.

    Attributes:
        rank: of this process among the members.
        size: number of members.
        store: of the default group; knows what each rank has said last.
        prefix: of our keys in the store.

    Raises:
        RankLost: some rank does not make its group in time.
    """

    def __init__(self, members: Sequence[int], timeout_seconds: float) -> None:
        self.rank = members.index(dist.get_rank())
        self.size = len(members)
        self.members = tuple(members)
        self.timeout_seconds = timeout_seconds
        self.store: Any = dist.distributed_c10d._get_default_store()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the processes
        self.prefix = f"elbowroom/{attempt}/{'-'.join(map(str, members))}/{next(_numbers)}"
        # A store serves one call at a time: this process waits in the other one.
        self._watched: Any = self.store.clone() if hasattr(self.store, "clone") else self.store
        self._processes: dict[int, tuple[str, int]] = {}
        self._rounds = itertools.count()
        self._group: Any = None
        self._loss = ""  # why the connection is lost
        self._enter("elbowroom.fit")
        is_world = self.size == dist.get_world_size()
        with self._explaining():
            self._group = dist.new_group(
                list(members), timeout=datetime.timedelta(seconds=timeout_seconds), backend="gloo",
                use_local_synchronization=not is_world, group_desc="elbowroom",
            )  # fmt: skip

    @property
    def is_destroyed(self) -> bool:
        """True if the program has destroyed the process groups since. The ranks cannot meet any more."""
        return not dist.is_initialized() or self._group not in dist.distributed_c10d._world.pg_map

    def gather(self, what: str, value: Value) -> list[Value]:
        """Return the values of all ranks, in order. Every rank must call it.

        Args:
            what: what the ranks exchange, for messages.

        Raises:
            RankLost: some rank has ended, does not come in time, or exchanges something else; names it.
        """
        self._enter(what)
        found: list[Any] = [None] * self.size
        with self._explaining():
            dist.all_gather_object(found, (what, value), group=self._group)
        if other := next(((rank, there) for rank, (there, _) in enumerate(found) if there != what), None):
            raise RankLost(
                f"rank {self.rank} is at {what}, and rank {other[0]} at {other[1]}: call elbowroom.fit, room.step and "
                "room.set_budget on all ranks in the same order"
            )
        return [each for _, each in found]

    def make_once(self, what: str, leader: int, make: Callable[[], Value]) -> Value:
        """Have one rank make a value, and return it on every rank. Every rank must call it.

        The others wait as long as the leader says that it is at work.

        Raises:
            RankLost: some rank has ended, or the leader has failed; names it. On the leader: what `make` raises.
        """
        self._enter(what)
        if self.rank != leader:
            while (word := self._hear(leader)).kind == "working":
                pass
            if word.kind == "failed":
                raise RankLost(f"rank {leader} failed at {what}: {word.value}")
            made: Value = word.value
            return made
        try:
            with self._saying_so():
                made = make()
        except BaseException as error:
            with contextlib.suppress(RankLost):
                self._say(_Word("failed", f"{type(error).__name__}: {error}"))
            raise
        self._say(_Word("done", made))
        return made

    def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is None or not dist.is_initialized():
            return  # the program has destroyed all groups
        with contextlib.suppress(ValueError, AssertionError, RuntimeError):
            dist.destroy_process_group(group)

    @contextlib.contextmanager
    def _saying_so(self) -> Iterator[None]:
        """Tell the others from time to time that this rank is at work."""
        is_done = threading.Event()

        def say() -> None:
            while not is_done.wait(self.timeout_seconds / 4):
                try:
                    self._say(_Word("working", None))
                except RankLost as error:
                    logger.warning("%s", error)  # the last word fails, too
                    return

        thread = threading.Thread(target=say, name="elbowroom-ranks-working", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()

    def _say(self, word: _Word) -> None:
        said = bytearray(pickle.dumps(tuple(word)))
        for each in (bytearray(len(said).to_bytes(LENGTH_BYTES, "little")), said):
            self._broadcast(each, self.rank)

    def _hear(self, leader: int) -> _Word:
        length = self._broadcast(bytearray(LENGTH_BYTES), leader)
        return _Word(*pickle.loads(self._broadcast(bytearray(int.from_bytes(length, "little")), leader)))

    def _broadcast(self, data: bytearray, leader: int) -> bytearray:
        """Send bytes, or receive them into `data`, and return it.

        A plan may have megabytes. As Python's own memory it is no tensor that would count for the budget.
        """
        with self._explaining():
            tensor = torch.frombuffer(data, dtype=torch.uint8)
            dist.broadcast(tensor, src=self.members[leader], group=self._group)
        return data

    def _enter(self, what: str) -> None:
        """Note in the store that this rank waits for the others."""
        self._round, self._what = next(self._rounds), what
        with contextlib.suppress(RuntimeError):  # the store is gone: the exchange itself says so
            host, process = describe_process()
            self.store.set(f"{self.prefix}/round{self._round}/{self.rank}", f"{process} {host}")

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        if self._loss:  # gloo connects them once
            raise RankLost(
                f"rank {self.rank} cannot meet the others at {self._what}, since they have lost their connection: "
                f"{self._loss}"
            )
        try:
            with ending_if_lost(self._find_lost):
                yield
        except (RuntimeError, ValueError) as error:
            self._loss = f"rank {self.rank} waited for the others at {self._what}: {self._explain_loss()}"
            raise RankLost(
                f"{self._loss}. All ranks must call elbowroom.fit and room.set_budget together, and run the same "
                "steps; without `with room.step():` a step ends with the optimizer's "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            ) from error

    def _explain_loss(self) -> str:
        """Return which ranks are the reason for an exchange that failed."""
        there = f"{self.prefix}/round{self._round}"
        missing = [rank for rank in range(self.size) if not self._is_there(f"{there}/{rank}")]
        if missing:
            named = ", ".join(map(str, missing))
            return f"rank {named} did not come to it within {self.timeout_seconds:g} s, or has ended"
        deadline = time.monotonic() + ENDING_SECONDS
        while (ended := self._find_ended()) is None and time.monotonic() < deadline:
            time.sleep(ENDING_SECONDS / 20)
        if ended is None:
            return "a rank has ended or lost its connection"
        return f"rank {ended[0]}, process {ended[1]}, has ended"

    def _find_lost(self) -> str:
        """Return which rank on this machine has ended; "" if none. Called in a thread, while this rank waits."""
        if (ended := self._find_ended()) is None:
            return ""
        rank, number = ended
        return f"rank {self.rank} ends, as it waits at {self._what} for rank {rank}, whose process {number} has ended"

    def _find_ended(self) -> tuple[int, int] | None:
        """Return a rank on this machine whose process has ended, and that process; None if there is none."""
        own, _ = describe_process()
        for rank in range(self.size):
            key = f"{self.prefix}/round0/{rank}"
            with contextlib.suppress(RuntimeError):
                if rank not in self._processes and self._watched.check([key]):
                    process, host = self._watched.get(key).decode().split(" ", 1)
                    self._processes[rank] = host, int(process)
            host, number = self._processes.get(rank, ("", 0))
            if host == own and has_ended(number):
                return rank, number
        return None

    def _is_there(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except RuntimeError:
            return True  # nobody knows
