"""A headless Chromium for tests of the page, driven through chromedriver's HTTP interface (W3C WebDriver)."""

from __future__ import annotations

import base64
import contextlib
import json
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)

PATIENCE_SECONDS = 60.0


def find_browser() -> str | None:
    """Path of a Chromium or Chrome that has its driver beside it; None if there is none."""
    if shutil.which("chromedriver") is None:
        return None
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Browser:
    """One tab."""

    def __init__(self, port: int, session: str) -> None:
        self._root = f"http://127.0.0.1:{port}/session/{session}"

    def open(self, path: pathlib.Path) -> None:
        """Open a file, and wait for its scripts."""
        _call(f"{self._root}/url", {"url": path.as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page. It ends with `return VALUE`."""
        return _call(f"{self._root}/execute/sync", {"script": script, "args": list(arguments)})

    def run_until_done(self, script: str) -> Any:
        """Run a script that calls `done(VALUE)` when it has finished."""
        body = f"const done = arguments[arguments.length - 1]; {script}"
        return _call(f"{self._root}/execute/async", {"script": body, "args": []})

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a place of the window."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def command(self, name: str, **parameters: Any) -> Any:
        """Send one command of the Chrome DevTools protocol."""
        return _call(f"{self._root}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        """Set the size of the visible page, as on a phone if it is narrow."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                     mobile=width < 600)  # fmt: skip

    def take_log(self, kind: str) -> list[dict[str, Any]]:
        """Return the entries of "browser" (the console) or "performance" (the network) since the last call."""
        entries: list[dict[str, Any]] = _call(f"{self._root}/se/log", {"type": kind})
        return entries

    def list_requests(self) -> list[str]:
        """Addresses of all requests since the last call."""
        found = []
        for entry in self.take_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def take_picture(self, path: pathlib.Path, *, is_whole: bool = False) -> None:
        """Write what is visible, or the whole page, as a PNG file."""
        done = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(done["data"]))


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a browser with a profile of its own; end it with its driver afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [shutil.which("chromedriver") or "", f"--port={port}"]
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for_driver(port)
            options = {"binary": find_browser(), "args": [*FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options,
                      "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}  # fmt: skip
            made = _call(f"http://127.0.0.1:{port}/session", {"capabilities": {"alwaysMatch": wanted}})
            session = made["sessionId"]
            try:
                browser = Browser(port, session)
                browser.run("return 1")
                _call(f"{browser._root}/url", {"url": "about:blank"})
                browser.list_requests()  # of the browser's own first page
                yield browser
            finally:
                _call(f"http://127.0.0.1:{port}/session/{session}", None, "DELETE")
        finally:
            driver.terminate()
            driver.wait(PATIENCE_SECONDS)


def _wait_for_driver(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if _call(f"http://127.0.0.1:{port}/status", None, "GET")["ready"]:
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _call(address: str, body: Any, method: str = "POST") -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=PATIENCE_SECONDS) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{address}: {error.read().decode()[:2000]}") from error
