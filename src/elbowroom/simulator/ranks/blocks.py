"""Blocks of a model: what `fully_shard` gathers at once, and what a pipeline assigns to stages."""

from __future__ import annotations

ROOT = ""
"""The block of whatever lies in no numbered module: embeddings, the final norm, the head."""


def find_block(module: str | None) -> str:
    """Return the path of the outermost numbered module that holds a module: "h.3" for "h.3.mlp.c_fc".

    Items of a ModuleList or Sequential are numbered. Blocks of published models are such items, and are what programs
    wrap with `fully_shard`.
    """
    parts = (module or "").split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return ROOT
