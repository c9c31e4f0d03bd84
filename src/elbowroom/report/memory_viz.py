"""Snapshot of one step in the format of `torch.cuda.memory._snapshot`, for pytorch.org/memory_viz.

Blocks are at the offsets that a layout by size gives them, in one segment; the workspace of an op lies above all of
them. Source: PyTorch, torch/cuda/memory.py (`_snapshot`, `_dump_snapshot`) and torch/utils/viz/MemoryViz.js.
"""

from __future__ import annotations

import pickle
from typing import Any

from elbowroom.ir.labels import name_module, name_storage, shorten
from elbowroom.report.step_view import WORKSPACE, Block, StepView, lay_out_blocks

ADDRESS = 0x7F0000000000
"""Address of the segment."""

GRANULARITY = 2 << 20
"""The segment is a multiple of this, as a device gives memory out."""


def write_snapshot(view: StepView) -> bytes:
    """Return the pickled snapshot of a step: its trace of allocations, and the blocks that are left at its end.

    Cost: linear in the trace, and one layout of its blocks.
    """
    return pickle.dumps(make_snapshot(view), protocol=4)


def make_snapshot(view: StepView) -> dict[str, Any]:
    """Return the snapshot of a step as dicts and lists."""
    layout = lay_out_blocks(view)
    most_workspace = int(view.bytes_by_class[WORKSPACE].max(initial=0))
    total = -(-(layout.arena_bytes + most_workspace) // GRANULARITY) * GRANULARITY
    # The viewer fails on categories without an "unknown" among them.
    events = [_make_event("segment_alloc", 0, total, 0.0, []) | {"category": "unknown"}]
    events += _list_events(view, layout.offsets, layout.arena_bytes)
    last = [
        (offset, block)
        for offset, block in zip(layout.offsets, view.blocks, strict=True)
        if block.end_tick == view.trace.end
    ]
    blocks = _list_last_blocks(view, sorted(last, key=lambda item: item[0]), total)
    allocated = sum(block.nbytes for _, block in last)
    segment = {
        "device": 0,
        "address": ADDRESS,
        "total_size": total,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": allocated,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    return {"segments": [segment] if total else [], "device_traces": [events if total else []],
            "allocator_settings": {}, "external_annotations": []}  # fmt: skip


def _make_event(action: str, offset: int, nbytes: int, seconds: float, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": ADDRESS + offset,
        "size": nbytes,
        "stream": 0,
        "time_us": round(seconds * 1e6),
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": frames,
    }


def _list_events(view: StepView, offsets: tuple[int, ...], workspace_offset: int) -> list[dict[str, Any]]:
    """Return allocations and frees in order: at each entry what ends, what begins, and the workspace of its op."""
    frames = [_make_frames(view, block) for block in view.blocks]
    items: list[tuple[int, int, int, list[dict[str, Any]]]] = []
    for index, (block, offset) in enumerate(zip(view.blocks, offsets, strict=True)):
        role = str(view.trace.storages[block.storage].role)
        taken = _make_event("alloc", offset, block.nbytes, block.begin, frames[index])
        items.append((block.begin_tick, 1, index, [taken | {"category": role}]))
        if block.end_tick < view.trace.end:
            freed = [
                _make_event(action, offset, block.nbytes, block.end, frames[index])
                for action in ("free_requested", "free_completed")
            ]
            items.append((block.end_tick, 0, index, freed))
    for index, op in enumerate(view.trace.ops):
        nbytes = int(view.bytes_by_class[WORKSPACE][op.tick])
        if nbytes:
            begin, end = view.begins[op.tick], view.begins[op.tick + 1]
            frame = [_make_frame(f"workspace of {shorten(op.name)}", op.module, op.line)]
            used = [
                _make_event("alloc", workspace_offset, nbytes, begin, frame) | {"category": WORKSPACE},
                _make_event("free_requested", workspace_offset, nbytes, end, frame),
                _make_event("free_completed", workspace_offset, nbytes, end, frame),
            ]
            items.append((op.tick, 2, index, used))
    items.sort(key=lambda item: item[:3])
    return [event for *_, events in items for event in events]


def _list_last_blocks(view: StepView, last: list[tuple[int, Block]], total: int) -> list[dict[str, Any]]:
    """Return the blocks of the segment at the step's end, in order of their address, free ones included."""
    found: list[dict[str, Any]] = []
    end = 0

    def add_free(until: int) -> None:
        if end < until:
            found.append({"address": ADDRESS + end, "size": until - end, "requested_size": 0, "state": "inactive",
                          "frames": []})  # fmt: skip

    for offset, block in last:
        add_free(offset)
        found.append({"address": ADDRESS + offset, "size": block.nbytes, "requested_size": block.nbytes,
                      "state": "active_allocated", "frames": _make_frames(view, block)})  # fmt: skip
        end = offset + block.nbytes
    add_free(total)
    return found


def _make_frames(view: StepView, block: Block) -> list[dict[str, Any]]:
    home = view.trace.storages[block.storage]
    return [_make_frame(f"{name_storage(home)} ({home.role})", home.module, home.line)]


def _make_frame(what: str, module: str | None, line: str) -> dict[str, Any]:
    file, _, number = line.rpartition(":")
    where = "" if module is None else f" in {name_module(module)}"
    return {"name": what + where, "filename": file or "unknown", "line": int(number) if number.isdigit() else 0}
