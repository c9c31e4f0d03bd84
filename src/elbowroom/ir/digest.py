"""Which trace a value belongs to: a digest of what it says."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from elbowroom.ir.files import to_json
from elbowroom.ir.trace import Trace


def digest(trace: Trace) -> str:
    """The SHA-256 of a trace's contents as JSON, name aside: equal steps have equal digests.

    The text is made and digested item by item: as a whole it would take ten times its length.

    Cost: linear in the trace; about 10 ms per thousand ops, so keep the result.
    """
    spell = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
    found = hashlib.sha256()
    for place, name in enumerate(sorted({field.name for field in dataclasses.fields(trace)} - {"name"})):
        value = getattr(trace, name)
        found.update(f'{"," if place else "{"}"{name}":'.encode())
        if isinstance(value, tuple):
            found.update(b"[")
            for index, item in enumerate(value):
                found.update(f"{',' if index else ''}{spell(to_json(item))}".encode())
            found.update(b"]")
        else:
            found.update(spell(value).encode())
    found.update(b"}")
    return found.hexdigest()
