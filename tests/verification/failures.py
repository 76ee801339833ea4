"""Every rank failing in every way in every phase of a run of four processes: how it ends, what it says.

    python -m tests.verification.failures [--json=FILE] [--check] [--cells=RANK/WAY/PHASE,...] [--tp=N]
        [--transport=socket|nixl] [--without-launcher]

Ways: kill (SIGKILL), freeze (SIGSTOP), cut (all its TCP connections shut down; it lives on), raise (an
exception in the user's code). Phases: start (joined, nothing compiled), compile (while a layer is traced),
step and validation (between two tasks), end (trained, while the others leave). `*` stands for all in --cells.
With the launcher all 80 cells are run; without it, every rank started by hand, a selection. Ranks are given
up after 4 s of silence, in the last cell of the table after the default. With --tp=2 ranks 0 and 2 lead a
stage each, which 1 and 3 share with them, and there is one way more: store (the process with the key-value
store, by which they agree, is frozen, while there is need of it, by rank 0). Linux only.

A line per cell: seconds from the failure to the end of the last process (without the launcher: of the last
survivor), exit status, and the sentence printed first. Faults are listed below the table.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import Aim, finish, parse
from rrfp_jax.runtime.run.place import SILENCE_SECONDS
from tests.verification.failure_cell import LAUNCHED, Cell, Outcome, run_by_hand, run_launched

RANKS, WAYS = range(4), ("kill", "freeze", "cut", "raise")
PHASES = ("start", "compile", "step", "validation", "end")
STORE, STORE_PHASES = "store", ("step", "validation", "end")
"""Of stages with several ranks; the rank does not matter."""

BRISK_SILENCE = 4.0
END_SECONDS = 10.0
"""Within which a run ends after a failure."""
FREEZE_SECONDS = 5.0
"""The same for a frozen rank, after the limit on silence."""

BY_HAND = "*/kill/step,0/kill/start,2/kill/compile,0/kill/validation,*/kill/end,1/freeze/step,0/freeze/step,"
BY_HAND += "3/freeze/end,2/cut/step,0/cut/step,1/raise/compile,0/raise/step,3/raise/validation,2/raise/end"


def main(argv: Sequence[str]) -> int:
    """Run the cells, print the table, and give the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--cells", default="", metavar="RANK/WAY/PHASE,...", help="only these; * for all")
    parser.add_argument("--without-launcher", action="store_true", help="start the ranks by hand")
    parser.add_argument("--tp", type=int, choices=(1, 2, 4), default=1, help="ranks that share a stage")
    parser.add_argument("--transport", choices=("socket", "nixl"), default="socket", help="between processes")
    options = parser.parse_args(argv)
    by_hand = BY_HAND if options.tp == 1 else f"{BY_HAND},0/{STORE}/step"
    text = options.cells or (by_hand if options.without_launcher else "*/*/*")
    cells = [(cell, BRISK_SILENCE) for part in text.split(",") for cell in _cells(part, options.tp)]
    cells = [(replace(cell, transport=options.transport), silence) for cell, silence in cells]
    if not options.cells and not options.without_launcher and options.tp == 1:
        cells.append((Cell(2, "freeze", "step", transport=options.transport), SILENCE_SECONDS))
    run = run_by_hand if options.without_launcher else run_launched
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


def _cells(text: str, tp: int) -> Iterator[Cell]:
    """Those that RANK/WAY/PHASE stands for."""
    parts, ways = text.split("/"), WAYS if tp == 1 else (*WAYS, STORE)
    choices: list[Sequence[str]] = [[str(rank) for rank in RANKS], ways, PHASES]
    if len(parts) != 3 or any(p != "*" and p not in c for p, c in zip(parts, choices, strict=True)):
        sys.exit(f"--cells={text}: give RANK/WAY/PHASE of {list(RANKS)}, {ways}, {PHASES}, or * for all")
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
