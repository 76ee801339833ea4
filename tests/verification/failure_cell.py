"""One cell of the table of failures: start four ranks, one of which fails, and see how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rrfp_jax.runtime.run.coordinator import reserved_port
from tests.support.kept import FAST_COMPILING

LAUNCHED = "rrfp launch"
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "failing.py"
COUNT = 4
START_SECONDS = 240.0
"""Within which four ranks start, compile and come to the failure, however busy the machine is."""
HANG_SECONDS = 30.0
"""From the failure on, beyond the limit on silence; a run ends within a fraction of it."""


@dataclass(frozen=True)
class Cell:
    """Which rank fails, how, and when; `tp` ranks share a stage, messages go by a transport."""

    rank: int
    way: str
    phase: str
    tp: int = 1
    transport: str = "socket"
    layers_move: str = ""

    @property
    def stage(self) -> int:
        """The rank's."""
        return self.rank // self.tp

    @property
    def environment(self) -> dict[str, str]:
        """What the script reads."""
        found = {"TP": str(self.tp), "TRANSPORT": self.transport}
        return found | ({"LAYERS_MOVE": self.layers_move} if self.layers_move else {})

    def __str__(self) -> str:
        return f"{self.rank}/{self.way}/{self.phase}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    failed: bool
    silence: float
    seconds: float
    statuses: Sequence[int]
    sentences: Sequence[str]
    text: str
    hung: bool
    left: int


def run_launched(cell: Cell, silence: float, folder: Path) -> Outcome:
    """A cell with the launcher; its files go to a folder."""
    mark = uuid.uuid4().hex
    command = [
        sys.executable,
        "-m",
        "rrfp_jax",
        "launch",
        "-n",
        str(COUNT),
        f"--directory={folder}/runs",
    ]
    launcher = _start([*command, *_script(cell, mark)], folder, silence, "launcher", cell.environment)
    ended = _wait({0: launcher}, silence, folder)
    left = len(processes_with(mark)) if ended else 0
    _kill(mark, {0: launcher})
    text = (folder / "launcher").read_text(encoding="utf-8", errors="replace")
    found = re.search(rf"^{LAUNCHED}: .*$", text, re.MULTILINE)
    return Outcome(
        failed=_failed_at(folder) is not None,
        silence=silence,
        seconds=max(ended.values(), default=time.time()) - (_failed_at(folder) or 0.0),
        statuses=[launcher.returncode],
        sentences=[found.group() if found else ""],
        text=text,
        hung=not ended,
        left=left,
    )


def run_by_hand(cell: Cell, silence: float, folder: Path) -> Outcome:
    """A cell without the launcher: ranks are told where they belong, and rank 0 hosts the coordination."""
    mark = uuid.uuid4().hex
    with reserved_port() as port:
        place = {"RRFP_COORDINATOR": f"127.0.0.1:{port}", "RRFP_PROCESSES": str(COUNT)} | cell.environment
        place["RRFP_TOKEN"] = uuid.uuid4().hex
        command = [sys.executable, *_script(cell, mark)]
        ranks = {
            rank: _start(command, folder, silence, f"rank-{rank}", place | {"RRFP_RANK": str(rank)})
            for rank in range(COUNT)
        }
        survivors = {rank: process for rank, process in ranks.items() if rank != cell.rank}
        ended = _wait(survivors, silence, folder)
        if cell.way != "freeze":
            _wait({cell.rank: ranks[cell.rank]}, silence, folder)
        _kill(mark, ranks)
    texts = {r: (folder / f"rank-{r}").read_text(encoding="utf-8", errors="replace") for r in ranks}
    sentences = [re.search(r"^rank \d.*$", texts[r], re.MULTILINE) for r in survivors]
    return Outcome(
        failed=_failed_at(folder) is not None,
        silence=silence,
        seconds=max(ended.values(), default=time.time()) - (_failed_at(folder) or 0.0),
        statuses=[process.returncode for process in survivors.values()],
        sentences=[found.group() if found else "" for found in sentences],
        text="".join(f"--- rank {r}\n{text}" for r, text in texts.items()),
        hung=len(ended) < len(survivors),
        left=0,
    )


def _script(cell: Cell, mark: str) -> list[str]:
    return [str(SCRIPT), str(cell.rank), cell.way, cell.phase, mark]


def _start(
    argv: Sequence[str], folder: Path, silence: float, log: str, more: dict[str, str]
) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RRFP_")}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    env |= {"XLA_FLAGS": FAST_COMPILING}
    env |= {"FAILED_AT": f"{folder}/failed-at", "RRFP_SILENCE_SECONDS": str(silence)}
    with (folder / log).open("wb") as out:
        return subprocess.Popen(
            argv, env=env | more, cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )


def _failed_at(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        return float((folder / "failed-at").read_text(encoding="ascii"))
    return None


def _wait(processes: dict[int, subprocess.Popen[bytes]], silence: float, folder: Path) -> dict[int, float]:
    """When each of the processes ended (s of `time.time()`); those that hang are missing."""
    began = time.time()
    ended: dict[int, float] = {}
    while len(ended) < len(processes) and time.time() < _deadline(began, silence, folder):
        for rank, process in processes.items():
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.time()
        time.sleep(0.02)
    return ended


def _deadline(began: float, silence: float, folder: Path) -> float:
    failed = _failed_at(folder)
    return began + START_SECONDS if failed is None else failed + silence + HANG_SECONDS


def _kill(mark: str, started: dict[int, subprocess.Popen[bytes]]) -> None:
    for number in processes_with(mark):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    for process in started.values():
        process.wait()


def processes_with(mark: str) -> list[int]:
    """The ids of the living processes with this argument."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lives = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
            if lives and mark.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
