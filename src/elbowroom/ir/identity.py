"""Which trace a value belongs to: a digest of what it says."""

from __future__ import annotations

import hashlib
import json

from elbowroom.ir.files import to_json
from elbowroom.ir.trace import Trace


def digest(trace: Trace) -> str:
    """The SHA-256 of a trace's contents, name aside: equal steps have equal digests.

    Cost: linear in the trace; about 10 ms per thousand ops, so keep the result.
    """
    contents = to_json(trace)
    del contents["name"]
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
