"""The page in a real browser: no errors, no requests, readable at two widths, and quick with many blocks."""

from __future__ import annotations

import json
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest

from elbowroom.report.page.content import describe_page
from elbowroom.report.page.html import fill_template
from elbowroom.report.step_view import StepView, view_step
from elbowroom.simulator.planned import PreparedTrace
from tests import browser, generators
from tests.browser import Browser
from tests.pure.test_page import make_content, view

pytestmark = pytest.mark.skipif(
    browser.find_browser() is None, reason="needs Chromium and its driver: apt-get install chromium chromium-driver"
)

MANY_BLOCKS = 20_000
LONGEST_WAIT_SECONDS = 60.0
"""Until a page is drawn, on a machine that is busy."""

MOST_SECONDS = 0.1
CHARTS = ("plain", "planned", "lanes", "blocks", "steps", "front")


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser.open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return describe_page(make_content(view(*generators.example())[0]))


def write(data: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    path = folder / "page.html"
    path.write_text(fill_template(data, "page"), encoding="utf-8")
    return path


def show(tab: Browser, path: pathlib.Path, width: int) -> None:
    """Open a page, which must be complete, without a message on the console or a request."""
    tab.resize(width, 900)
    tab.take_log("browser")
    tab.list_requests()
    tab.open(path)
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while (is_ready := tab.run("return document.documentElement.dataset.ready")) != "yes":
        assert time.monotonic() < deadline, f"the page is not ready: {is_ready}"
        time.sleep(0.05)
    assert tab.take_log("browser") == []
    assert tab.list_requests() == [path.as_uri()]


def find_box(tab: Browser, name: str) -> tuple[float, float, float, float]:
    """Scroll a chart into view. Return its left, top, width and height."""
    left, top, width, height = tab.run(
        "const box = document.getElementById(arguments[0]); box.scrollIntoView();"
        "const place = box.getBoundingClientRect(); return [place.left, place.top, place.width, place.height];",
        name,
    )
    return left, top, width, height


def read_tip(tab: Browser, name: str) -> str:
    """Text of a chart's tooltip; "" if it is hidden."""
    text: str = tab.run(
        "const tip = document.querySelector('#' + arguments[0] + ' .tip');"
        "return tip && getComputedStyle(tip).visibility !== 'hidden' && tip.style.opacity !== '0'"
        " ? tip.innerText : '';",
        name,
    )
    return text


def find_item(tab: Browser, name: str, item: int) -> tuple[float, float]:
    """Return the place in the window of the middle of an item of a chart of rectangles."""
    find_box(tab, name)
    x, y = tab.run(
        "const chart = charts[arguments[0]]; const value = chart.getOption().series[0].data[arguments[1]];"
        "const box = document.getElementById(arguments[0]).getBoundingClientRect();"
        "const [x, y] = chart.convertToPixel({gridIndex: 0}, arguments[0] === 'blocks' ?"
        " [(value[1] + value[2]) / 2, (value[3] + value[4]) / 2] : [(value[1] + value[2]) / 2, value[0]]);"
        "return [box.left + x, box.top + y];",
        name,
        item,
    )
    return x, y


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_renders(tab: Browser, data: dict[str, Any], tmp_path: pathlib.Path, width: int) -> None:
    show(tab, write(data, tmp_path), width)
    assert tab.run("return document.documentElement.scrollWidth") <= width
    for name in CHARTS:
        _, _, chart_width, height = find_box(tab, name)
        assert chart_width > 0.45 * (width - 440 if width > 900 else width) and height > 150, name
        drawn = tab.run(
            "const canvas = document.querySelector('#' + arguments[0] + ' canvas');"
            "const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
            "const colours = new Set(); for (let at = 0; at < pixels.length; at += 4)"
            " if (pixels[at + 3]) colours.add(pixels[at] * 65536 + pixels[at + 1] * 256 + pixels[at + 2]);"
            "return colours.size;",
            name,
        )
        assert drawn > 10, name
    smallest = tab.run(
        "return Math.min(...[...document.querySelectorAll('body *')].filter((each) => each.children.length === 0 &&"
        " each.textContent.trim() && each.offsetWidth).map((each) => parseFloat(getComputedStyle(each).fontSize)))"
    )
    assert smallest >= 11.5


def test_hovering_tells_what_a_block_is_and_why(tab: Browser, data: dict[str, Any], tmp_path: pathlib.Path) -> None:
    example = view(*generators.example())[0]
    show(tab, write(data, tmp_path), 1280)
    decided = {data["gaps"]["storage"][i]: each for i, each in enumerate(data["gaps"]["decision"]) if each != "keep"}
    blocks = data["blocks"]
    block = max(
        (index for index, storage in enumerate(blocks["storage"]) if storage in decided),
        key=lambda index: blocks["nbytes"][index] * (blocks["end"][index] - blocks["begin"][index]),
    )
    storage = blocks["storage"][block]
    role = str(example.trace.storages[storage].role).replace("_", " ")
    tab.move(*find_item(tab, "blocks", block))
    text = read_tip(tab, "blocks")
    assert data["names"][data["storages"]["label"][storage]] in text
    assert f", {role}, decision: {decided[storage]}" in text
    state = next(
        index for index, each in enumerate(blocks["storage"]) if example.trace.storages[each].role == "parameter"
    )
    assert ", parameter" in tab.run("return describeBlock(data, arguments[0])", state)
    for choice in ("keep", "offload", "recompute"):
        assert choice in text
    tab.run("selectBlock(arguments[0])", block)
    assert decided[storage] in tab.run("return document.getElementById('detail').innerText")
    left, top, width, height = find_box(tab, "planned")
    tab.move(left + width / 2, top + height / 2)
    assert "activation" in read_tip(tab, "planned")
    tab.move(*find_item(tab, "lanes", 0))
    assert "compute" in read_tip(tab, "lanes")


def test_a_module_marks_its_blocks_and_zoom_is_linked(
    tab: Browser, data: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    named = json.loads(json.dumps(data))
    named["names"] += ["layer.0", "layer.1"]
    named["storages"]["module"] = [
        len(named["names"]) - 1 - index % 2 for index in range(len(data["storages"]["line"]))
    ]
    named["modules"] = [["layer.0", 10, 0, 5, 3, 2], ["layer.1", 20, 0, 5, 3, 2]]
    show(tab, write(named, tmp_path), 1280)
    assert "30" in tab.run("return document.querySelector('[data-path=layer] .bytes').innerText")
    tab.run("document.querySelector('[data-path=\"layer.1\"]').click()")
    marked = tab.run("return data.blocks.storage.map((storage, index) => paint(index).opacity > 0.5)")
    assert marked == [storage % 2 == 0 for storage in named["blocks"]["storage"]]
    tab.run("charts.blocks.dispatchAction({type: 'dataZoom', dataZoomIndex: 0, start: 20, end: 60})")
    for name in ("plain", "planned", "lanes"):
        zoom = tab.run("return charts[arguments[0]].getOption().dataZoom[0]", name)
        assert (round(zoom["start"]), round(zoom["end"])) == (20, 60), name


def test_names_are_text_and_a_far_budget_is_left_out(
    tab: Browser, data: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    hostile = json.loads(json.dumps(data))
    hostile["names"] = [f"<img src=x onerror='alert({index})'>&amp;" for index in range(len(data["names"]))]
    hostile["storages"]["module"] = [0] * len(data["storages"]["module"])
    hostile["modules"] = [["<b>a</b>.b", 1, 0, 1, 0, 0]]
    hostile["title"] = "<i>title</i>"
    hostile["budget_bytes"] = 100 * data["plain"]["peak_bytes"]
    path = write(hostile, tmp_path)
    show(tab, path, 1280)
    tab.move(*find_item(tab, "blocks", 0))
    assert "<img src=x" in read_tip(tab, "blocks")
    tab.run("selectBlock(0); document.querySelector('.module').click()")
    assert tab.run("return document.querySelectorAll('img, b b, #modules b, #title i').length") == 0
    assert "<b>a</b>" in tab.run("return document.getElementById('modules').innerText")
    assert tab.take_log("browser") == []
    assert "far above" in tab.run("return document.getElementById('class-legend').innerText")
    most = tab.run("return charts.plain.getOption().yAxis[0].max")
    assert data["plain"]["peak_bytes"] < most < 2 * data["plain"]["peak_bytes"]


def multiply_blocks(data: dict[str, Any], step: StepView) -> dict[str, Any]:
    """The page's data with each block cut into many."""
    many = json.loads(json.dumps(data))
    count = len(step.blocks)
    rows = {name: [column[index % count] for index in range(MANY_BLOCKS)] for name, column in data["blocks"].items()}
    pieces = -(-MANY_BLOCKS // count)
    for index in range(MANY_BLOCKS):
        part = index // count
        rows["nbytes"][index] /= pieces
        rows["offset"][index] += part * rows["nbytes"][index]
    many["blocks"] = rows
    return many  # type: ignore[no-any-return]


def test_many_blocks_respond_at_once(tab: Browser, data: dict[str, Any], tmp_path: pathlib.Path) -> None:
    step = view(*generators.example())[0]
    assert view_step(PreparedTrace(step.trace, step.costs), step.plan).blocks == step.blocks
    show(tab, write(multiply_blocks(data, step), tmp_path), 1280)
    assert tab.run("return charts.blocks.getOption().series[0].data.length") == MANY_BLOCKS
    find_box(tab, "blocks")
    seconds = tab.run_until_done(
        """
        const canvas = document.querySelector("#blocks canvas");
        const box = canvas.getBoundingClientRect();
        const times = [];
        const ask = (index) => {
          if (index === 20) return done(times);
          const begin = performance.now();
          const x = box.left + box.width * (0.15 + 0.03 * index);
          canvas.dispatchEvent(new MouseEvent("mousemove", { clientX: x, clientY: box.top + box.height * 0.8,
            bubbles: true }));
          requestAnimationFrame(() => setTimeout(() => {
            times.push((performance.now() - begin) / 1e3);
            ask(index + 1);
          }));
        };
        ask(0);
        """
    )
    assert read_tip(tab, "blocks")
    click = "const begin = performance.now(); selectBlock(7); charts.blocks.getZr().flush(); "
    seconds.append(tab.run(click + "return (performance.now() - begin) / 1e3;"))
    assert statistics.median(seconds) < MOST_SECONDS, seconds
