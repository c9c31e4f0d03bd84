"""What pip is told: the long description works away from the repository, and PyTorch is left as it is."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SPEC = importlib.util.spec_from_file_location("elbowroom_setup", ROOT / "setup.py")
assert SPEC is not None and SPEC.loader is not None
SETUP = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SETUP)


def test_links_of_the_long_description_are_absolute() -> None:
    text = (ROOT / "README.md").read_text()
    made = SETUP.describe(text, "https://host/source", "1.2.3")
    targets = re.findall(r"\]\(([^)]*)\)", made)
    assert targets and all(re.match(r"https://|#", target) for target in targets)
    assert "![The page of a step](https://host/source/raw/v1.2.3/docs/page.png)" in made
    assert "](https://host/source/blob/v1.2.3/docs/" in made
    assert re.sub(r"https://host/source/(raw|blob)/v1\.2\.3/", "", made) == text


def test_links_to_other_hosts_and_within_the_page_stay() -> None:
    text = "[a](https://other/place) [b](#below) [c](docs/limits.md#results)"
    assert SETUP.describe(text, "https://host", "1") == (
        "[a](https://other/place) [b](#below) [c](https://host/blob/v1/docs/limits.md#results)"
    )


def test_pytorch_is_an_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not any(each.startswith("torch") for each in PROJECT["dependencies"])
    assert all("elbowroom[torch]" in extras[name] for name in ("models", "integrations"))
