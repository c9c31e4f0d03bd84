"""Families of interchangeable modules.

A family is a package; each module in it is one member with one entry point of a fixed name. The folder is the registry:
adding a file adds a member.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import warnings
from types import ModuleType
from typing import Any

from elbowroom.errors import UnknownMember


def names(family: ModuleType) -> tuple[str, ...]:
    """Return the names of a family's members, sorted, without importing them."""
    found = (module.name for module in pkgutil.iter_modules(family.__path__))
    return tuple(sorted(name for name in found if not name.startswith("_")))


_REQUIRED = object()


@functools.cache
def get(family: ModuleType, name: str, entry_point: str, default: Any = _REQUIRED) -> Any:
    """Return the entry point of one member, importing only that member. The result is cached.

    Args:
        default: returned if the member lacks an optional entry point.

    A family may have a dict `RENAMED` of former names of members; these still work, with a `FutureWarning`.

    Raises:
        UnknownMember: the family has no such member; the message lists the existing ones.
    """
    known = names(family)
    renamed: dict[str, str] = getattr(family, "RENAMED", {})
    if name in renamed:
        warnings.warn(f"{name!r} is now called {renamed[name]!r}", FutureWarning, stacklevel=3)
        name = renamed[name]
    if name not in known:
        folder = family.__name__.rpartition(".")[2]
        singular = folder.removesuffix("ies") + "y" if folder.endswith("ies") else folder.rstrip("s")
        raise UnknownMember(singular, name, known)
    member = importlib.import_module(f"{family.__name__}.{name}")
    return getattr(member, entry_point) if default is _REQUIRED else getattr(member, entry_point, default)
