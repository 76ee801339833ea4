"""Runs that hang in known ways: does `rrfp why` name the right rank and message, and does the run itself?

    python -m tests.verification.hangs [--json=FILE] [--check] [--cells=NAME,...]

Each cell starts a toy run of four ranks (`tests/scripts/hanging.py`, `tests/scripts/failing.py`), waits until
it hangs, asks `rrfp why` until that no longer says that the run moves, and waits until the run has come to
its limit, has printed why by itself, and has ended. The last cell hangs nowhere: its run is asked again and
again, must be said to move, and must have the losses of an undisturbed one.

A line per cell: whether the sentence is right, that of `rrfp why` and the run's own; seconds from the hang
until `rrfp why` had said it; the sentence. Linux only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.harness import Aim, finish, parse
from tests.verification.failures import LAUNCHED, ROOT, processes_with, started

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
    env = {"HUNG_AT": f"{folder}/hung-at", "FAILED_AT": f"{folder}/hung-at"}
    env |= {"STALL_SECONDS": str(STALL_SECONDS)} | dict(cell.env)
    command = [sys.executable, "-m", "rrfp_jax", "launch", "-n", str(cell.count)]
    script, *arguments = cell.script
    command += [f"--directory={folder}/runs", str(SCRIPTS / script), *arguments, mark]
    return started(command, folder, "launcher", env)


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


USERS = r"the user's sleeps_for_ever \(\S*hanging\.py:\d+\)"
ENDED = r"(.*it ended so: \S+ )?"
SLOW_STEPS, ASKED = "40", 4

CELLS = (
    Cell(
        "message",
        ["hanging.py", "1", "message"],
        r"rank 1 \(stage 1\) has sent the input of F2 on stage 2 in step 1 to rank 2 \(stage 2\), which has "
        r"not heard of it",
    ),
    Cell(
        "decision",
        ["hanging.py", "0", "decision"],
        r"rank 0 \(stage 0\) has sent decision 0 \(F0\) of their group in step 1 to rank 1 \(stage 0\), "
        r"which has not heard of it",
        env={"TP": "2"},
    ),
    Cell(
        "leader",
        ["hanging.py", "2", "user"],
        rf"rank 2 \(stage 1\) is in {USERS}; 3 other ranks wait for it",
        env={"TP": "2"},
    ),
    Cell(
        "gather",
        ["hanging.py", "3", "gather"],
        r"rank 3 \(stage 3\) has sent its value of the results of train step 1 to rank 0 \(stage 0\), which "
        r"has not heard of it",
    ),
    Cell("user code", ["hanging.py", "1", "user"], rf"rank 1 \(stage 1\) is in {USERS}; 3 other ranks wait"),
    Cell("a layer", ["hanging.py", "2", "layer"], rf"rank 2 \(stage 2\) is in {USERS}; 3 other ranks wait"),
    Cell(
        "a callback",
        ["hanging.py", "1", "callback"],
        rf"rank 1 \(stage 1\) runs F0, dispatched \S+ s ago, which has not ended, in {USERS}; 3 other ranks",
    ),
    Cell(
        "data",
        ["hanging.py", "2", "data"],
        rf"rank 2 \(stage 2\) waits for the data's plan\(2\), since \S+ s, in {USERS}; 3 other ranks wait",
    ),
    Cell(
        "a collective",
        ["hanging.py", "2", "collective"],
        r"rank 2 \(stage 1 of replica 0\) has not entered the sum of the replicas' gradients, in which "
        r"rank 3 \(stage 1 of replica 1\) waits for it",
        env={"DP": "2"},
    ),
    Cell(
        "the lock",
        ["hanging.py", "1", "lock"],
        r"rank 1 \(stage 1\) does not answer: something holds its interpreter, .*hanging\.py:\d+\)",
    ),
    Cell("freeze", ["hanging.py", "2", "freeze"], r"rank 2 \(stage 2\) stands still"),
    Cell("kill", ["failing.py", "2", "kill", "step"], rf"{ENDED}rank 2 \(stage 2\) ", ends=True),
    Cell("cut", ["failing.py", "1", "cut", "step"], rf"{ENDED}rank 1 \(stage 1\) ", ends=True),
    Cell("raise", ["failing.py", "3", "raise", "step"], rf"{ENDED}rank 3 \(stage 3\) ", ends=True),
)
"""Of the failures `tests/verification/failures.py` has all; here is one of each way."""

MOVES = Cell("moves", ["hanging.py", "0", "slow"], "the run moves", count=2, env={"STEPS": SLOW_STEPS})


def main(argv: Sequence[str]) -> int:
    """Run the cells, print the table, and give the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--cells", default="", metavar="NAME,...", help="only these")
    options = parser.parse_args(argv)
    names = options.cells.split(",") if options.cells else [cell.name for cell in (*CELLS, MOVES)]
    if unknown := set(names) - {cell.name for cell in (*CELLS, MOVES)}:
        sys.exit(f"--cells: {', '.join(sorted(unknown))}: give some of {[c.name for c in (*CELLS, MOVES)]}")
    found = {}
    print("cell            why  own  seconds  sentence")
    for cell in CELLS:
        if cell.name in names:
            with tempfile.TemporaryDirectory() as folder:
                answer = run_cell(cell, Path(folder))
            faults = faults_of(cell, answer)
            found[cell.name] = asdict(answer) | {"faults": faults}
            right = ["no" if who in " ".join(faults) else "yes" for who in ("by why", "by itself")]
            print(
                f"{cell.name:15} {right[0]:4} {right[1]:4} {answer.seconds:6.1f}  {answer.sentence}",
                flush=True,
            )
            if faults:
                print(f"{'; '.join(faults)}\n{answer.text}\n--- the run\n{answer.log}", flush=True)
    if MOVES.name in names:
        faults = undisturbed()
        found[MOVES.name] = {"faults": faults}
        print(f"{MOVES.name:15} {'no' if faults else 'yes':5} {'; '.join(faults)}", flush=True)
    faulty = sum(bool(of["faults"]) for of in found.values())
    return finish(options, {"cells": found}, [Aim("cells with a fault", faulty, 0, "cells")])


def faults_of(cell: Cell, answer: Answer) -> list[str]:
    """What was not said as it should be."""
    faults = []
    if not re.match(cell.says, answer.sentence):
        faults.append(f"said by why: {answer.sentence!r}")
    if not re.match(cell.says, answer.own) and not cell.ends:
        faults.append(f"said by itself: {answer.own!r}")
    if "the stacks of all threads" not in answer.text and not cell.ends:
        faults.append("no stacks")
    if answer.left:
        faults.append(f"{answer.left} processes were left")
    return faults


def undisturbed() -> list[str]:
    """What is wrong with a run that moves while it is asked, beside one that is not."""
    faults, logs = [], []
    for asked in (0, ASKED):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            launcher = start(MOVES, "undisturbed", folder)
            while not (folder / "hung-at").exists() and launcher.poll() is None:
                time.sleep(0.1)
            for _ in range(asked):
                text, status = ask(folder, MOVES)
                if status != 0 or not re.match(MOVES.says, text):
                    faults.append(f"status {status}: {text.partition(chr(10))[0]}")
            if launcher.wait(120) != 0:
                faults.append(f"the run ended with {launcher.returncode}")
            logs.append(losses((folder / "launcher").read_text(encoding="utf-8")))
    if logs[0] != logs[1] or len(logs[0]) != MOVES.count * int(SLOW_STEPS):
        faults.append("its losses are others")
    return faults


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
