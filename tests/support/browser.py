"""A real browser without a window: Chromium, told what to do through a pipe (its DevTools protocol)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""Its program; None where it is not installed."""

OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


class Browser:
    """One page of a running Chromium. What it says meanwhile is kept."""

    def __init__(self, to: int, of: int, limit: float) -> None:
        self._to, self._of, self._limit = to, of, limit
        self._number, self._rest, self._session = 0, b"", ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for room in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{room}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One command and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._limit
        while True:
            said = self._next(deadline, method)
            if said.get("id") == self._number:
                assert "error" not in said, f"{method}: {said['error']}"
                return dict(said["result"])
            self._note(said)

    def open(self, path: Path, width: int = 1240, height: int = 900) -> None:
        """Load a file; it returns before its scripts have run."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=path.resolve().as_uri())

    def value(self, expression: str) -> Any:
        """What an expression is on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """What it is as soon as it is something."""
        deadline = time.monotonic() + self._limit
        while not (found := self.value(expression)):
            assert time.monotonic() < deadline, f"after {self._limit} s no {expression}: {self.complaints}"
            time.sleep(0.02)
        return found

    def picture(self, path: Path) -> None:
        """The whole page as a PNG file."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._of], [], [], left)[0], f"no answer to {what}"
            piece = os.read(self._of, 2**20)
            assert piece, f"Chromium ended before it answered {what}"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, said: dict[str, Any]) -> None:
        match said.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))
            case "Runtime.consoleAPICalled" | "Log.entryAdded":
                self.complaints.append(str(said["params"]))


@contextmanager
def browser(profile: Path, limit: float = 60.0) -> Iterator[Browser]:
    """A browser that is gone afterwards, with all its processes."""
    assert CHROMIUM is not None
    (read_by_it, to), (of, written_by_it) = os.pipe(), os.pipe()
    command = f'exec 3<&{read_by_it} 4>&{written_by_it}; exec "$@"'
    arguments = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        ["bash", "-c", command, "browser", *arguments],
        pass_fds=(read_by_it, written_by_it),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_by_it)
    os.close(written_by_it)
    try:
        yield Browser(to, of, limit)
    finally:
        os.close(to)
        os.close(of)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
