"""Digest of a trace, by which plans and costs name the trace that they belong to."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from elbowroom.ir.files import to_json
from elbowroom.ir.trace import Trace


def digest(trace: Trace) -> str:
    """Return the SHA-256 of a trace's contents as JSON, so that equal steps have equal digests.

    Excluded are the name, and the fields that comparisons ignore: modules, lines of code and ways to slice ops; and
    presences if there are none, as in files of older versions. The text is hashed item by item, since building all of
    it takes ten times its length in memory.

    Cost: linear in the trace; about 10 ms per thousand ops, so keep the result.
    """
    spell = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
    found = hashlib.sha256()
    left_out_fields = {"name"} if trace.presences else {"name", "presences"}
    for place, name in enumerate(
        sorted({field.name for field in dataclasses.fields(trace) if field.compare} - left_out_fields)
    ):
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
