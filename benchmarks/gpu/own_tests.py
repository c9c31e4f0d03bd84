"""Importing this lets `tests` be ours, also where some installed package carries a `tests` of its own."""

from __future__ import annotations

import pathlib
import sys
import types

package = types.ModuleType("tests")
package.__path__ = [str(pathlib.Path(__file__).resolve().parents[2] / "tests")]
sys.modules["tests"] = package
