"""A family's folder is its registry: every member has the entry point and a docstring. No torch."""

from __future__ import annotations

import importlib
import inspect

import pytest

import elbowroom.importers
import elbowroom.planner.strategies
import elbowroom.residency.policies
import elbowroom.sharing.policies
from elbowroom._family import get, names
from elbowroom.errors import UnknownMember, UsageError

FAMILIES = {
    elbowroom.importers: "read",
    elbowroom.planner.strategies: "make_plan",
    elbowroom.residency.policies: "Policy",
    elbowroom.sharing.policies: "allot",
}
MEMBERS = [(family, entry, name) for family, entry in FAMILIES.items() for name in names(family)]


@pytest.mark.parametrize(("family", "entry", "name"), MEMBERS, ids=lambda each: each if isinstance(each, str) else "")
def test_every_member_has_an_entry_point_and_docstrings(family: object, entry: str, name: str) -> None:
    found = get(family, name, entry)  # type: ignore[arg-type]
    assert callable(found)
    module = importlib.import_module(found.__module__)
    for part in (module, found):
        assert inspect.getdoc(part)


@pytest.mark.parametrize("family", FAMILIES)
def test_members_are_sorted_and_unknown_ones_are_rejected(family: object) -> None:
    known = names(family)  # type: ignore[arg-type]
    assert known
    assert list(known) == sorted(known)
    for wrong in ("no_such", "", "__init__", "auto.py", "../auto", "_private"):
        with pytest.raises(UnknownMember) as caught:
            get(family, wrong, "anything")  # type: ignore[arg-type]
        assert isinstance(caught.value, UsageError)
        assert all(name in str(caught.value) for name in known)


def test_former_names_still_work_and_warn() -> None:
    policies = elbowroom.residency.policies
    for former, present in policies.RENAMED.items():
        get.cache_clear()
        assert former not in names(policies)
        with pytest.warns(FutureWarning, match=f"'{former}' is now called '{present}'"):
            assert get(policies, former, "Policy") is get(policies, present, "Policy")
