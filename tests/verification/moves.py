"""Every rank failing in every way while layers move to other stages: how it ends, whether anything is lost.

    python -m tests.verification.moves [--json=FILE] [--check] [--cells=RANK/WAY/PHASE,...]

Four processes train, save a checkpoint, and move layers. Phases: recompile (while a layer is traced for the
other split) and move (after the first layer has moved, before the second one does). Ways as in
`tests.verification.failures`, and every cell is judged as there. Then the run is started again: it goes on
from the checkpoint, moves layers, and its losses must be, to the bit, those of a run to which nothing
happened. `*` stands for all in --cells.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

from benchmarks.harness import Aim, finish, parse
from tests.verification.failures import (
    BRISK_SILENCE,
    END_SECONDS,
    FREEZE_SECONDS,
    RANKS,
    WAYS,
    Cell,
    Outcome,
    faults_of,
    run_launched,
)

PHASES = ("recompile", "move")
NEVER = Cell(0, "kill", "never")


def main(argv: Sequence[str]) -> int:
    """Run the cells, print the table, and give the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--cells", default="*/*/*", metavar="RANK/WAY/PHASE,...", help="only these")
    options = parser.parse_args(argv)
    cells = [cell for text in options.cells.split(",") for cell in _cells(text)]
    with tempfile.TemporaryDirectory() as folder:
        expected, ended = undisturbed(Path(folder))
    if expected is None:
        sys.exit(f"the run to which nothing happens failed:\n{ended.text}")
    rows = []
    print("rank way    phase      seconds  lost  sentence")
    for cell in cells:
        with tempfile.TemporaryDirectory() as folder:
            outcome, losses = failed_and_resumed(cell, Path(folder))
        faults, lost = faults_of(cell, outcome), losses != expected
        rows.append((cell, outcome, faults, lost))
        said = outcome.sentences[0] if outcome.sentences else "(nothing)"
        print(
            f"{cell.rank:<4} {cell.way:6} {cell.phase:10} {outcome.seconds:7.1f}  {lost!s:5} {said}",
            flush=True,
        )
        if faults:
            print(f"FAULT: {'; '.join(faults)}\n{outcome.text}", flush=True)
    quick = [own.seconds for cell, own, _, _ in rows if cell.way != "freeze" and own.failed]
    frozen = [own.seconds - own.silence for cell, own, _, _ in rows if cell.way == "freeze" and own.failed]
    figures = [asdict(cell) | asdict(own) | {"faults": f, "lost": lost} for cell, own, f, lost in rows]
    aims = [
        Aim("cells with a fault", sum(bool(faults) for _, _, faults, _ in rows), 0, "cells"),
        Aim("runs that did not go on as if nothing had happened", sum(row[3] for row in rows), 0, "runs"),
        Aim("killed, cut, raised: the longest to end", max(quick, default=0.0), END_SECONDS, "s"),
        Aim("frozen: the longest, after the limit", max(frozen, default=0.0), FREEZE_SECONDS, "s"),
    ]
    return finish(options, {"cells": figures}, aims)


def undisturbed(folder: Path) -> tuple[list[float] | None, Outcome]:
    """Losses after the move of a run to which nothing happens, or that goes on from a checkpoint there."""
    ended = run_launched(replace(NEVER, layers_move=str(folder)), BRISK_SILENCE, folder)
    file = folder / "losses.json"
    losses = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    return losses, ended


def failed_and_resumed(cell: Cell, folder: Path) -> tuple[Outcome, list[float] | None]:
    """How a cell ends, and the losses of the run that is started again."""
    outcome = run_launched(replace(cell, layers_move=str(folder)), BRISK_SILENCE, folder)
    (folder / "failed-at").unlink(missing_ok=True)
    losses, _ = undisturbed(folder)
    return outcome, losses


def _cells(text: str) -> Iterator[Cell]:
    """Those that RANK/WAY/PHASE stands for."""
    parts, choices = text.split("/"), ([str(rank) for rank in RANKS], WAYS, PHASES)
    if len(parts) != 3 or any(p != "*" and p not in c for p, c in zip(parts, choices, strict=True)):
        sys.exit(f"--cells={text}: give RANK/WAY/PHASE of {list(RANKS)}, {WAYS}, {PHASES}, or * for all")
    ranks, ways, phases = (c if p == "*" else [p] for p, c in zip(parts, choices, strict=True))
    for phase, way, rank in product(phases, ways, ranks):
        yield Cell(int(rank), way, phase)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
