"""Memory over one training step, plain and within a budget, as measured: writes an SVG.

    python benchmarks/memory_picture.py [--output docs/memory.svg]

ResNet-50, batch 16, 224x224, AdamW, on the CPU, at 50 % of its plain peak. Both curves are every allocation and release
that went through PyTorch's allocator during one step, above what was there before it.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from profiler_meter import ProfilerMeter
from step_time import in_room, list_residents, make, measure_peak

import elbowroom
from elbowroom.units import format_bytes

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 380, 74, 46, 46


def record(workload: Any, step: Any) -> tuple[list[float], list[int]]:
    """(share of the step, bytes) of every change during one step."""
    meter = ProfilerMeter()
    meter.start(list_residents(workload))
    step()
    meter.stop()
    seconds, live = meter.timeline()
    return [second / seconds[-1] for second in seconds], live


def draw(curves: list[tuple[str, str, list[float], list[int]]], budget: int, title: str) -> str:
    """An SVG of step curves with the budget as a line."""
    top = max(max(live) for _, _, _, live in curves) * 1.08

    def x(share: float) -> float:
        return LEFT + share * (WIDTH - LEFT - 20)

    def y(nbytes: float) -> float:
        return HEIGHT - BOTTOM - nbytes / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        '<g font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15" fill="#222">{title}</text>',
    ]
    for line in range(5):
        nbytes = top / 1.08 * line / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(nbytes):.1f}" y2="{y(nbytes):.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y(nbytes) + 4:.1f}" text-anchor="end" fill="#555">{format_bytes(nbytes)}</text>'
        )
    for index, (label, colour, shares, live) in enumerate(curves):
        points = [f"{x(0):.1f},{y(0):.1f}"]
        columns: dict[int, int] = {}
        for share, nbytes in zip(shares, live, strict=True):
            column = int(x(share) * 2)
            columns[column] = max(columns.get(column, 0), nbytes)
        points += [f"{column / 2:.1f},{y(nbytes):.1f}" for column, nbytes in sorted(columns.items())]
        points.append(f"{x(1):.1f},{y(0):.1f}")
        parts.append(f'<polygon points="{" ".join(points)}" fill="{colour}" fill-opacity="0.35" stroke="{colour}"/>')
        parts.append(
            f'<rect x="{LEFT + 8 + index * 240}" y="{HEIGHT - 24}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{LEFT + 26 + index * 240}" y="{HEIGHT - 13}" fill="#222">'
            f"{label}: peak {format_bytes(max(live))}</text>"
        )
    parts.append(
        f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(budget):.1f}" y2="{y(budget):.1f}" '
        'stroke="#c00" stroke-dasharray="6 4"/>'
        f'<text x="{WIDTH - 24}" y="{y(budget) - 6:.1f}" text-anchor="end" fill="#c00">'
        f"budget {format_bytes(budget)}</text>"
        "</g></svg>"
    )
    return "\n".join(parts)


def main() -> None:
    """Measure both and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="docs/memory.svg")
    options = parser.parse_args()
    plain = make("resnet50")
    plain.step()
    plain.step()
    curves = [("plain PyTorch", "#8899aa", *record(plain, plain.step))]
    budget = measure_peak(plain, plain.step) // 2
    del plain
    ours = make("resnet50")
    with elbowroom.fit(ours.model, ours.optimizer, budget, profile=elbowroom.probe("cpu")) as room:
        step = in_room(ours, room)
        for _ in range(3):
            step()
        curves.append(("with Elbowroom", "#2277bb", *record(ours, step)))
    title = "Bytes of tensors during one training step: ResNet-50, batch 16, AdamW, CPU (measured)"
    with open(options.output, "w") as file:
        file.write(draw(curves, budget, title) + "\n")
    peaks = ", ".join(format_bytes(max(live)) for *_, live in curves)
    print(f"wrote {options.output}: peaks {peaks}, budget {format_bytes(budget)}")


if __name__ == "__main__":
    main()
