"""One cell of the table of hangs: start a run that hangs, ask `rrfp why`, and hear what the run says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.kept import FAST_COMPILING
from tests.verification.failure_cell import LAUNCHED, ROOT, processes_with

SCRIPTS = ROOT / "tests" / "scripts"
START_SECONDS = 240.0
"""Within which ranks start, compile and come to the hang, however busy the machine is."""
ASK_SECONDS = 60.0
"""From the hang on, within which the doctor must have said why."""
STALL_SECONDS = 12.0
"""Of the runs, after which they say it by themselves."""


@dataclass(frozen=True)
class Cell:
    """A way to hang, and what must be said of it."""

    name: str
    script: Sequence[str]
    says: str
    count: int = 4
    env: Mapping[str, str] = field(default_factory=dict)
    ends: bool = False


@dataclass(frozen=True)
class Answer:
    """What was said."""

    sentence: str
    seconds: float
    own: str
    text: str
    log: str
    left: int


def run_cell(cell: Cell, folder: Path) -> Answer:
    """Run a cell to its end; its files go to a folder."""
    mark, hung = uuid.uuid4().hex, folder / "hung-at"
    launcher = start(cell, mark, folder)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not hung.exists() and launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        began = time.monotonic()
        text, status = "", 0
        while status == 0 and time.monotonic() < began + ASK_SECONDS:
            time.sleep(1.0)
            text, status = ask(folder, cell)
        seconds = time.monotonic() - began
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(STALL_SECONDS + ASK_SECONDS)
        time.sleep(0.2)
        left = len(processes_with(mark))
    finally:
        launcher.kill()  # its ranks die with it
        launcher.wait()
    log = (folder / "launcher").read_text(encoding="utf-8", errors="replace")
    own = re.search(rf"^{LAUNCHED}: (?:it hung: )?(.*)$", log, re.MULTILINE)
    return Answer(
        sentence=text.partition("\n")[0].removeprefix("rrfp why: "),
        seconds=seconds,
        own=own[1] if own else "",
        text=text,
        log=log,
        left=left,
    )


def start(cell: Cell, mark: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the launcher of a cell; its ranks have the mark among their arguments."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RRFP_")}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    env |= {"XLA_FLAGS": FAST_COMPILING}
    env |= {"HUNG_AT": f"{folder}/hung-at", "FAILED_AT": f"{folder}/hung-at"}
    env |= {"STALL_SECONDS": str(STALL_SECONDS)} | dict(cell.env)
    command = [sys.executable, "-m", "rrfp_jax", "launch", "-n", str(cell.count)]
    script, *arguments = cell.script
    command += [f"--directory={folder}/runs", str(SCRIPTS / script), *arguments, mark]
    with (folder / "launcher").open("wb") as out:
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def ask(folder: Path, cell: Cell) -> tuple[str, int]:
    """What `rrfp why` says of a cell's run, and its exit status."""
    run = folder / "runs" / cell.script[0].removesuffix(".py")
    done = subprocess.run(
        [sys.executable, "-m", "rrfp_jax", "why", run],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=ASK_SECONDS,
        check=False,
    )
    return done.stdout + done.stderr, done.returncode


def losses(log: str) -> list[str]:
    """The losses that ranks have printed, in an order that does not depend on who was first."""
    return sorted(re.findall(r"^\[\d+\] step \d+ loss .*$", log, re.MULTILINE))
