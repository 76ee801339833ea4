"""Every rank failing in every way in every phase of a run of four processes: how it ends, what it says.

    python -m tests.verification.failures [--json=FILE] [--check] [--cells=RANK/WAY/PHASE,...] [--tp=N]
        [--transport=socket|nixl] [--without-launcher|--moves]

Ways: kill (SIGKILL), freeze (SIGSTOP), cut (all its TCP connections shut down; it lives on), raise (an
exception in the user's code). Phases: start (joined, nothing compiled), compile (while a layer is traced),
step and validation (between two tasks), end (trained, while the others leave). `*` stands for all in --cells.
With the launcher all 80 cells are run; without it, every rank started by hand, a selection. Ranks are given
up after 4 s of silence, in the last cell of the table after the default. With --tp=2 ranks 0 and 2 lead a
stage each, which 1 and 3 share with them, and there is one way more: store (the process with the key-value
store, by which they agree, is frozen, while there is need of it, by rank 0). Linux only.

With --moves they fail while layers move to other stages: recompile (a layer is traced for the other split)
and move (the first layer has moved, the second one has not). Such a run is then started again: it goes on
from its checkpoint, moves layers, and its losses must be, to the bit, those of a run to which nothing
happened.

A line per cell: seconds from the failure to the end of the last process (without the launcher: of the last
survivor), exit status, and the sentence printed first. Faults are listed below the table.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.harness import Aim, finish, parse
from rrfp_jax.runtime.run.coordinator import reserved_port
from rrfp_jax.runtime.run.place import SILENCE_SECONDS
from tests.support.kept import FAST_COMPILING

LAUNCHED = "rrfp launch"
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "failing.py"
COUNT = 4
START_SECONDS = 240.0
"""Within which four ranks start, compile and come to the failure, however busy the machine is."""
HANG_SECONDS = 30.0
"""From the failure on, beyond the limit on silence; a run ends within a fraction of it."""
RANKS, WAYS = range(4), ("kill", "freeze", "cut", "raise")
PHASES = ("start", "compile", "step", "validation", "end")
STORE, STORE_PHASES = "store", ("step", "validation", "end")
"""Of stages with several ranks; the rank does not matter."""

BRISK_SILENCE = 4.0
END_SECONDS = 10.0
"""Within which a run ends after a failure."""
FREEZE_SECONDS = 5.0
"""The same for a frozen rank, after the limit on silence."""

MOVING = ("recompile", "move")
"""Phases while layers move."""
Processes: TypeAlias = dict[int, subprocess.Popen[bytes]]


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
    lost: bool = False


NEVER = Cell(0, "kill", "never")


def run_launched(cell: Cell, silence: float, folder: Path) -> Outcome:
    """A cell with the launcher; its files go to a folder."""
    mark = uuid.uuid4().hex
    launch = [sys.executable, "-m", "rrfp_jax", "launch", "-n", str(COUNT), f"--directory={folder}/runs"]
    launcher = _start([*launch, *_script(cell, mark)], folder, silence, "launcher", cell.environment)
    ended = _wait({0: launcher}, silence, folder)
    left = len(processes_with(mark)) if ended else 0
    _kill(mark, {0: launcher})
    text = (folder / "launcher").read_text(encoding="utf-8", errors="replace")
    found = re.search(rf"^{LAUNCHED}: .*$", text, re.MULTILINE)
    return _outcome(folder, silence, {0: launcher}, ended, [found], text, left)


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
    found = [re.search(r"^rank \d.*$", texts[r], re.MULTILINE) for r in survivors]
    text = "".join(f"--- rank {r}\n{text}" for r, text in texts.items())
    return _outcome(folder, silence, survivors, ended, found, text)


def _outcome(
    folder: Path,
    silence: float,
    awaited: Processes,
    ended: Mapping[int, float],
    found: Sequence[re.Match[str] | None],
    text: str,
    left: int = 0,
) -> Outcome:
    return Outcome(
        failed=_failed_at(folder) is not None,
        silence=silence,
        seconds=max(ended.values(), default=time.time()) - (_failed_at(folder) or 0.0),
        statuses=[process.returncode for process in awaited.values()],
        sentences=[one.group() if one else "" for one in found],
        text=text,
        hung=len(ended) < len(awaited),
        left=left,
    )


def undisturbed(folder: Path) -> tuple[list[float] | None, Outcome]:
    """Losses after the move of a run to which nothing happens, or that goes on from a checkpoint there."""
    ended = run_launched(replace(NEVER, layers_move=str(folder)), BRISK_SILENCE, folder)
    file = folder / "losses.json"
    losses = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return losses, ended


def failed_and_resumed(cell: Cell, folder: Path) -> tuple[Outcome, list[float] | None]:
    """How a cell ends while layers move, and the losses of the run that is started again."""
    outcome = run_launched(replace(cell, layers_move=str(folder)), BRISK_SILENCE, folder)
    (folder / "failed-at").unlink(missing_ok=True)
    losses, _ = undisturbed(folder)
    return outcome, losses


def _script(cell: Cell, mark: str) -> list[str]:
    return [str(SCRIPT), str(cell.rank), cell.way, cell.phase, mark]


def started(argv: Sequence[str], folder: Path, log: str, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in the repository; what it prints is added to a file of the folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RRFP_")}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    env |= {"XLA_FLAGS": FAST_COMPILING} | dict(more)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / log).open("ab") as out:
        return subprocess.Popen(argv, env=env, cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def _start(
    argv: Sequence[str], folder: Path, silence: float, log: str, more: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    own = {"FAILED_AT": f"{folder}/failed-at", "RRFP_SILENCE_SECONDS": str(silence)}
    return started(argv, folder, log, own | dict(more))


def _failed_at(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        return float((folder / "failed-at").read_text(encoding="ascii"))
    return None


def _wait(processes: Processes, silence: float, folder: Path) -> dict[int, float]:
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


def _kill(mark: str, running: Processes) -> None:
    for number in processes_with(mark):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    for process in running.values():
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


BY_HAND = "*/kill/step,0/kill/start,2/kill/compile,0/kill/validation,*/kill/end,1/freeze/step,0/freeze/step,"
BY_HAND += "3/freeze/end,2/cut/step,0/cut/step,1/raise/compile,0/raise/step,3/raise/validation,2/raise/end"


def main(argv: Sequence[str]) -> int:
    """Run the cells, print the table, and give the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--cells", default="", metavar="RANK/WAY/PHASE,...", help="only these; * for all")
    parser.add_argument("--without-launcher", action="store_true", help="start the ranks by hand")
    parser.add_argument("--tp", type=int, choices=(1, 2, 4), default=1, help="ranks that share a stage")
    parser.add_argument("--transport", choices=("socket", "nixl"), default="socket", help="between processes")
    parser.add_argument("--moves", action="store_true", help="fail while layers move, and go on after it")
    options = parser.parse_args(argv)
    if options.moves and (options.without_launcher or options.tp > 1 or options.transport != "socket"):
        parser.error("--moves is of ranks that share no stage, launched, with messages by sockets")
    by_hand = BY_HAND if options.tp == 1 else f"{BY_HAND},0/{STORE}/step"
    text = options.cells or (by_hand if options.without_launcher else "*/*/*")
    phases = MOVING if options.moves else PHASES
    cells = [(cell, BRISK_SILENCE) for part in text.split(",") for cell in _cells(part, options.tp, phases)]
    cells = [(replace(cell, transport=options.transport), silence) for cell, silence in cells]
    if not options.cells and not options.without_launcher and options.tp == 1 and not options.moves:
        cells.append((Cell(2, "freeze", "step", transport=options.transport), SILENCE_SECONDS))
    run = run_by_hand if options.without_launcher else run_launched
    if options.moves:
        run = _goes_on
    rows: list[tuple[Cell, Outcome, list[str]]] = []
    print("rank way    phase      status   seconds  sentence")
    for cell, silence in cells:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(cell, silence, Path(folder))
        faults = faults_of(cell, outcome)
        rows.append((cell, outcome, faults))
        print(_row(cell, outcome, faults), flush=True)
    for cell, outcome, faults in rows:
        if faults:
            print(f"\n{cell}: {'; '.join(faults)}\n{outcome.text}")
    return finish(options, {"cells": [_figures(*row) for row in rows]}, _aims(rows))


@cache
def _expected() -> list[float]:
    """The losses of a run to which nothing happens while its layers move."""
    with tempfile.TemporaryDirectory() as folder:
        losses, ended = undisturbed(Path(folder))
    if losses is None:
        sys.exit(f"the run to which nothing happens failed:\n{ended.text}")
    return losses


def _goes_on(cell: Cell, silence: float, folder: Path) -> Outcome:
    """How a cell ends while layers move, and whether the run that is started again has lost anything."""
    expected = _expected()
    outcome, losses = failed_and_resumed(cell, folder)
    return replace(outcome, lost=losses != expected)


def faults_of(cell: Cell, outcome: Outcome) -> list[str]:
    """What a cell's end was not as it should be; speed apart."""
    if not outcome.failed:
        return ["the failure did not happen"]
    ends = list(zip(outcome.statuses, outcome.sentences, strict=True))
    wrong = [(status, said) for status, said in ends if status == 0 or not _names(said, cell)]
    if cell.phase == "end" and len(ends) > 1:  # a survivor that had nothing more to do may not even notice
        wrong = [end for end in wrong if end != (0, "")]
    faults = [
        *(["it hung and was killed"] if outcome.hung else []),
        *([f"{outcome.left} processes were left"] if outcome.left else []),
        *(["it did not go on as if nothing had happened"] if outcome.lost else []),
        *(f"exit status {status}, {said!r}" for status, said in wrong),
    ]
    shown = len(re.findall(r"^(?:\[\d\] )? *ValueError: failing", outcome.text, re.MULTILINE))
    if shown != (cell.way == "raise"):
        faults.append(f"{shown} tracebacks")
    return faults


def _names(line: str, cell: Cell) -> bool:
    """Whether a sentence is about the rank that failed, with its stage; a survivor's own may come first."""
    if cell.way == STORE:
        return re.search(r"rank \d \(stage \d\).* the key-value store, .* has not answered", line) is not None
    found = re.match(rf"(?:{LAUNCHED}: |rank \d \(stage \d\): )rank (\d) \(stage (\d)\)", line)
    return found is not None and found.groups() == (str(cell.rank), str(cell.stage))


def _aims(rows: Sequence[tuple[Cell, Outcome, list[str]]]) -> list[Aim]:
    quick = [o.seconds for c, o, _ in rows if c.way not in ("freeze", STORE) and o.failed]
    frozen = [o.seconds - o.silence for c, o, _ in rows if c.way in ("freeze", STORE) and o.failed]
    faulty = sum(bool(faults) for _, _, faults in rows)
    return [
        Aim("cells with a fault", faulty, 0, "cells"),
        Aim("killed, cut, raised: the longest to end", max(quick, default=0.0), END_SECONDS, "s"),
        Aim("frozen: the longest, after the limit", max(frozen, default=0.0), FREEZE_SECONDS, "s"),
    ]


def _cells(text: str, tp: int, every: Sequence[str]) -> Iterator[Cell]:
    """Those that RANK/WAY/PHASE stands for."""
    parts, ways = text.split("/"), WAYS if tp == 1 else (*WAYS, STORE)
    choices: list[Sequence[str]] = [[str(rank) for rank in RANKS], ways, every]
    if len(parts) != 3 or any(p != "*" and p not in c for p, c in zip(parts, choices, strict=True)):
        sys.exit(f"--cells={text}: give RANK/WAY/PHASE of {list(RANKS)}, {ways}, {every}, or * for all")
    ranks, chosen, phases = (c if p == "*" else [p] for p, c in zip(parts, choices, strict=True))
    for phase, way, rank in product(phases, chosen, ranks):
        if way != STORE or (rank == "0" and phase in STORE_PHASES):
            yield Cell(int(rank), way, phase, tp)


def _row(cell: Cell, outcome: Outcome, faults: Sequence[str]) -> str:
    status = ",".join(str(status) for status in outcome.statuses)
    sentence = outcome.sentences[0] if outcome.sentences else "(nothing)"
    mark = "  FAULT" if faults else ""
    return f"{cell.rank:<4} {cell.way:6} {cell.phase:10} {status:8} {outcome.seconds:7.1f}  {sentence}{mark}"


def _figures(cell: Cell, outcome: Outcome, faults: Sequence[str]) -> dict[str, Any]:
    return asdict(cell) | asdict(outcome) | {"faults": list(faults)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
