"""Which trace a value belongs to: a digest of what it says."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from elbowroom.ir.files import to_json
from elbowroom.ir.trace import Trace


def digest(trace: Trace) -> str:
    """The SHA-256 of a trace's contents as JSON: equal steps have equal digests.

    Left out are its name, and the fields that comparisons leave out, too: modules and lines of code.

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
            left_out = [field.name for field in dataclasses.fields(value[0]) if not field.compare] if value else []
            for index, item in enumerate(value):
                contents = to_json(item)
                for each in left_out:
                    del contents[each]
                found.update(f"{',' if index else ''}{spell(contents)}".encode())
            found.update(b"]")
        else:
            found.update(spell(value).encode())
    found.update(b"}")
    return found.hexdigest()
