"""The page's HTML: template, style, script, chart library and data in one text."""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from typing import Any

from elbowroom.report.page.content import PageContent, describe_page

_ASSETS = "elbowroom.report.page"


def render_page(content: PageContent) -> str:
    """Return the page as one HTML text that needs no other file and no network.

    Cost: see `content.describe_page`; the text has 1.1 MB beside the data.
    """
    data = describe_page(content)
    return fill_template(data, f"Elbowroom: {data['title']}")


def fill_template(data: dict[str, Any], title: str) -> str:
    """Return the page for data in the form of `content.describe_page`."""
    parts = {
        "title": html.escape(title),
        "style": _read("page.css"),
        "library": _read("echarts.min.js"),
        "script": _read("formats.js") + _read("charts.js") + _read("page.js"),
        "data": _escape(json.dumps(data, separators=(",", ":"), allow_nan=False)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))


def _read(name: str) -> str:
    return importlib.resources.files(_ASSETS).joinpath("assets", name).read_text(encoding="utf-8")


def _escape(text: str) -> str:
    """Return JSON that cannot end a script element."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
