"""What policies pick: which blocks leave together, by their addresses; and what comes back early."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as some

from elbowroom.ir.actions import Offload, Release, Reload
from elbowroom.ir.events import PressureRaised, StorageFreed, StorageNeeded, StorageSaved
from elbowroom.ir.trace import Role, Storage
from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.candidates import Candidates
from elbowroom.residency.context import replay_seconds, spare_bytes, swap_seconds
from elbowroom.residency.machine import Drop, State
from elbowroom.residency.policies import delta
from elbowroom.residency.policies.coop import Policy

SIZE = 4096


class Path(NamedTuple):
    """A storage is computed from nothing."""

    seconds: float
    nbytes: int = SIZE
    leaves: tuple[Storage, ...] = ()


class Context:
    """Blocks of one size at given addresses; time goes on by itself."""

    budget_bytes = 1 << 30

    def __init__(self, addresses: Mapping[int, int | None], costs: Mapping[int, float], held: int = -1) -> None:
        self.addresses, self.costs, self.held = addresses, costs, held
        self.seconds, self.spare = 0.0, 0

    def now(self) -> float:
        self.seconds += 1e-9
        return self.seconds

    busy_seconds = now

    def live_bytes(self) -> int:
        return self.budget_bytes - self.spare

    take_recent_peak = live_bytes

    def nbytes(self, storage: int) -> int:
        return SIZE

    def address(self, storage: int) -> int | None:
        return self.addresses[storage]

    def state(self, storage: int) -> State | None:
        return State.RESIDENT

    def move_seconds(self, nbytes: int) -> tuple[float, float]:
        return 1.0, 1.0

    def copy_out_seconds(self, storage: int) -> float:
        return 1e6

    def find_path(self, storage: int) -> Path | None:
        return None if self.costs[storage] == math.inf else Path(self.costs[storage])

    def may_drop(self, storage: int) -> bool:
        return True

    def may_move(self, storage: int) -> bool:
        return storage >= 0

    def may_leave(self, storage: int) -> bool:
        return storage != self.held

    def add_segment(self, storage: int) -> int:
        return 0


def list_leaving(context: Context, nbytes: int, freed: int = -1) -> set[int]:
    policy = Policy(context, AccessHistory())
    for storage in context.addresses:
        policy.decide(StorageSaved(storage, storage))
    context.seconds += 1.0
    if freed >= 0:
        policy.decide(StorageFreed(freed, 0))
    intents = policy.decide(PressureRaised(nbytes, 0))
    assert all(isinstance(intent, (Drop, Offload, Release)) for intent in intents)
    return {intent.storage for intent in intents}


SIDE_BY_SIDE = {storage: storage * SIZE for storage in range(5)}
COSTS = {0: 1.0, 1: 9.0, 2: 3.0, 3: 3.0, 4: 9.0}


def test_the_cheapest_window_leaves_and_not_the_cheapest_blocks() -> None:
    assert list_leaving(Context(SIDE_BY_SIDE, COSTS), 2 * SIZE) == {2, 3}
    assert list_leaving(Context(SIDE_BY_SIDE, COSTS), SIZE) == {0}


def test_a_window_has_no_holes() -> None:
    apart = {**SIDE_BY_SIDE, 3: 100 * SIZE, 4: 101 * SIZE}
    assert list_leaving(Context(apart, COSTS), 2 * SIZE) == {0, 1}
    assert list_leaving(Context(SIDE_BY_SIDE, COSTS, held=2), 2 * SIZE) == {0, 1}
    assert list_leaving(Context(SIDE_BY_SIDE, COSTS), 2 * SIZE, freed=2) == {0, 1}


def test_without_addresses_or_a_window_the_lowest_rated_leave() -> None:
    nowhere: dict[int, int | None] = dict.fromkeys(range(5))
    assert list_leaving(Context(nowhere, COSTS), 2 * SIZE) <= {0, 2, 3}
    scattered = {storage: 10 * storage * SIZE for storage in range(5)}
    assert 0 in list_leaving(Context(scattered, COSTS), 2 * SIZE)
    assert len(list_leaving(Context(scattered, COSTS), 2 * SIZE)) == 2


def test_what_stays_is_needed_and_what_left_comes_back_early() -> None:
    """Most needs of a backward pass may be of parameters."""
    context = Context({0: None, 1: None}, {0: math.inf, 1: math.inf})
    policy = delta.Policy(context, AccessHistory())
    for storage in (0, 1):
        policy.decide(StorageSaved(storage, storage))
    gone = list(policy.decide(PressureRaised(2 * SIZE, 2)))
    assert sorted(each.storage for each in gone if isinstance(each, Offload)) == [0, 1]
    assert list(policy.decide(StorageNeeded(-1, 3))) == []
    context.spare = context.budget_bytes
    assert {each.storage for each in policy.decide(StorageNeeded(-1, 4)) if isinstance(each, Reload)} == {0, 1}


class Chain(Context):
    """Each storage is computed from the one before it, the first from nothing, in one second each."""

    def __init__(self, states: Mapping[int, State], *, copied: Collection[int] = (), last: int = -1) -> None:
        super().__init__({}, {})
        self.states, self.copied, self.last = states, copied, last

    def state(self, storage: int) -> State | None:
        return self.states.get(storage)

    def copy_out_seconds(self, storage: int) -> float:
        return 0.0 if storage in self.copied else 1.0

    def find_path(self, storage: int) -> Path | None:
        if storage == self.last:
            return None
        leaves = (make_activation(storage - 1),) if storage else ()
        return Path(1.0, SIZE, leaves)

    def may_drop(self, storage: int) -> bool:
        return storage != 9


def make_activation(storage: int) -> Storage:
    return Storage(id=storage, nbytes=SIZE, role=Role.ACTIVATION, created=0, released=1, label="")


def test_a_replay_takes_what_its_leaves_take_to_be_restored() -> None:
    gone = {5: State.RESIDENT, 4: State.DROPPED, 3: State.DROPPED, 2: State.AWAY, 1: State.DROPPED, 0: State.RESIDENT}
    assert replay_seconds(Chain({**gone, 4: State.RESIDENT}), 5) == 1.0
    assert replay_seconds(Chain({**gone, 4: State.ARRIVING}), 5) == 1.0
    assert replay_seconds(Chain(gone), 5) == 3.0 + 1.0, "three ops, and a reload of the leaf that was offloaded"
    assert replay_seconds(Chain({4: State.DROPPED}), 5) == 2.0, "the program holds what autograd never saved"
    assert replay_seconds(Chain(gone, last=3), 5) == math.inf, "a leaf cannot be computed"
    assert replay_seconds(Chain(gone, last=2), 5) == 4.0, "and need not, if it was offloaded"
    assert replay_seconds(Chain(gone), 9) == math.inf, "it may not be dropped"


def test_a_swap_copies_out_what_has_no_copy() -> None:
    context = Chain({}, copied={1})
    assert (swap_seconds(context, 0), swap_seconds(context, 1)) == (2.0, 1.0)
    context.spare = 77
    assert spare_bytes(context) == 77


@given(steps=some.lists(some.tuples(some.booleans(), some.integers(0, 9)), max_size=60), most=some.integers(1, 6))
def test_candidates_are_a_set_and_samples_come_from_it(steps: list[tuple[bool, int]], most: int) -> None:
    candidates, expected = Candidates(), set[int]()
    for is_added, storage in steps:
        if is_added and storage not in candidates:
            candidates.add(storage)
            expected.add(storage)
        elif not is_added:
            candidates.discard(storage)
            expected.discard(storage)
        assert set(candidates) == expected
        assert len(candidates) == len(expected)
        assert {each for each in range(10) if each in candidates} == expected
        drawn = candidates.draw(most)
        assert set(drawn) <= expected
        assert len(drawn) == min(most, len(expected))


def test_samples_reach_every_candidate() -> None:
    candidates = Candidates()
    for storage in range(50):
        candidates.add(storage)
    assert {storage for _ in range(200) for storage in candidates.draw(8)} == set(range(50))
