"""What policies pick: which blocks leave together, by their addresses; and what comes back early."""

from __future__ import annotations

import math
from collections.abc import Mapping

from elbowroom.ir.actions import Offload, Release, Reload
from elbowroom.ir.events import PressureRaised, StorageFreed, StorageNeeded, StorageSaved
from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.machine import Drop
from elbowroom.residency.policies import delta
from elbowroom.residency.policies.coop import Policy

SIZE = 4096


class Facts:
    """Blocks of one size at given addresses; time goes on by itself."""

    def __init__(self, addresses: Mapping[int, int | None], costs: Mapping[int, float], held: int = -1) -> None:
        self.addresses, self.costs, self.held = addresses, costs, held
        self.seconds, self.spare = 0.0, 0

    def now(self) -> float:
        self.seconds += 1e-9
        return self.seconds

    def spare_bytes(self) -> int:
        return self.spare

    def budget_bytes(self) -> int:
        return 1 << 30

    def nbytes(self, storage: int) -> int:
        return SIZE

    def address(self, storage: int) -> int | None:
        return self.addresses[storage]

    def swap_seconds(self, storage: int) -> float:
        return 1e6

    def replay_seconds(self, storage: int) -> float:
        return self.costs[storage]

    own_seconds = replay_seconds
    own_bytes = nbytes

    def move_seconds(self, nbytes: int) -> tuple[float, float]:
        return 1.0, 1.0

    busy_seconds = now

    def held_bytes(self) -> tuple[int, int]:
        return 0, 0

    def neighbours(self, storage: int) -> tuple[int, ...]:
        return ()

    def may_move(self, storage: int) -> bool:
        return storage >= 0

    def may_leave(self, storage: int) -> bool:
        return storage != self.held

    def segment(self, storage: int) -> int:
        return 0


def list_leaving(facts: Facts, nbytes: int, freed: int = -1) -> set[int]:
    policy = Policy(facts, AccessHistory())
    for storage in facts.addresses:
        policy.decide(StorageSaved(storage, storage))
    facts.seconds += 1.0
    if freed >= 0:
        policy.decide(StorageFreed(freed, 0))
    intents = policy.decide(PressureRaised(nbytes, 0))
    assert all(isinstance(intent, (Drop, Offload, Release)) for intent in intents)
    return {intent.storage for intent in intents}


SIDE_BY_SIDE = {storage: storage * SIZE for storage in range(5)}
COSTS = {0: 1.0, 1: 9.0, 2: 3.0, 3: 3.0, 4: 9.0}


def test_the_cheapest_window_leaves_and_not_the_cheapest_blocks() -> None:
    assert list_leaving(Facts(SIDE_BY_SIDE, COSTS), 2 * SIZE) == {2, 3}
    assert list_leaving(Facts(SIDE_BY_SIDE, COSTS), SIZE) == {0}


def test_a_window_has_no_holes() -> None:
    apart = {**SIDE_BY_SIDE, 3: 100 * SIZE, 4: 101 * SIZE}
    assert list_leaving(Facts(apart, COSTS), 2 * SIZE) == {0, 1}
    assert list_leaving(Facts(SIDE_BY_SIDE, COSTS, held=2), 2 * SIZE) == {0, 1}
    assert list_leaving(Facts(SIDE_BY_SIDE, COSTS), 2 * SIZE, freed=2) == {0, 1}


def test_without_addresses_or_a_window_the_lowest_rated_leave() -> None:
    nowhere: dict[int, int | None] = dict.fromkeys(range(5))
    assert list_leaving(Facts(nowhere, COSTS), 2 * SIZE) <= {0, 2, 3}
    scattered = {storage: 10 * storage * SIZE for storage in range(5)}
    assert 0 in list_leaving(Facts(scattered, COSTS), 2 * SIZE)
    assert len(list_leaving(Facts(scattered, COSTS), 2 * SIZE)) == 2


def test_what_stays_is_needed_and_what_left_comes_back_early() -> None:
    """Most needs of a backward pass may be of parameters."""
    facts = Facts({0: None, 1: None}, {0: math.inf, 1: math.inf})
    policy = delta.Policy(facts, AccessHistory())
    for storage in (0, 1):
        policy.decide(StorageSaved(storage, storage))
    gone = list(policy.decide(PressureRaised(2 * SIZE, 2)))
    assert sorted(each.storage for each in gone if isinstance(each, Offload)) == [0, 1]
    assert list(policy.decide(StorageNeeded(-1, 3))) == []
    facts.spare = facts.budget_bytes()
    assert {each.storage for each in policy.decide(StorageNeeded(-1, 4)) if isinstance(each, Reload)} == {0, 1}
