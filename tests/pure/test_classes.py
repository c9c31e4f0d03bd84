"""Sets of dropped storages that touch each other."""

from __future__ import annotations

from elbowroom.residency.evicted_sets import EvictedSets


def test_sets_are_joined_and_costs_taken_off() -> None:
    classes = EvictedSets()
    classes.add(1, 2.0, [])
    classes.add(2, 3.0, [])
    assert classes.find(1) != classes.find(2)
    classes.add(3, 4.0, [1, 2])
    assert len({classes.find(storage) for storage in (1, 2, 3)}) == 1
    assert classes.cost(classes.find(1)) == 9.0
    classes.take(2, 3.0)
    assert classes.cost(classes.find(3)) == 6.0


def test_what_was_never_dropped_costs_no_set_anything() -> None:
    classes = EvictedSets()
    classes.add(1, 2.0, [])
    classes.take(7, 5.0)
    assert classes.cost(classes.find(1)) == 2.0
