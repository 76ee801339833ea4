"""Ranks are killed again and again (kill -9) while a run trains and saves: nothing of it may be lost.

    python -m tests.verification.restarts [--rounds=100] [--processes=4] [--seed=0] [--json=FILE] [--check]

A small run is trained twice with a checkpoint every five steps, first undisturbed, then under
`rrfp launch --max-restarts` with a random rank killed at a random moment, until as many were killed as
--rounds says: while it starts, while it trains, or just after a checkpoint was begun. If the launcher gives
up because restarts brought the run no further, it is started again, as a user would. Compared at the end:
loss and data of every step, all leaves of the last checkpoint, to the bit. Linux only.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Aim, finish, parse
from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.checkpoint.format import read_leaf
from rrfp_jax.errors import DONE, FAILED
from tests.verification.failure_cell import ROOT
from tests.verification.killing import NAME, Kill, Run, disturb, ended

EVERY = 5
"""Steps from one checkpoint to the next."""
STEPS_PER_ROUND = 30
"""The run is so long that it does not end before the last kill."""


def main(argv: Sequence[str]) -> int:
    """Train, disturb, compare; the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="ranks to kill")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(argv)
    steps = STEPS_PER_ROUND * options.rounds
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in ("undisturbed", "disturbed")]
        text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
        (Path(scratch) / "text").write_text(text, encoding="utf-8")  # which nobody edits meanwhile
        calm, shaken = (_run(folder, options.processes, steps, options.rounds) for folder in folders)
        calm.launch()
        if ended(calm) != DONE:
            sys.exit(f"the undisturbed run failed:\n{(calm.folder / 'said').read_text(encoding='utf-8')}")
        kills = disturb(shaken, options.rounds, options.processes, random.Random(options.seed))
        status = ended(shaken)
        left = len(shaken.ranks())
        figures = _figures(calm, shaken, kills) | {"status": status, "left": left}
        print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n")
        if status != DONE:
            print((shaken.folder / "said").read_text(encoding="utf-8", errors="replace")[-4000:])
        return finish(options, figures, _aims(figures, options.rounds, steps))


def _run(folder: Path, processes: int, steps: int, rounds: int) -> Run:
    where = f"--config.directory={folder}"
    sizes = {"mesh.pp": processes, "model.n_layers": processes, "model.d_model": 16, "model.d_ff": 16}
    sizes |= {"batch": 8, "microbatches": 4, "sequence_length": 32, "steps": steps}
    settings = sizes | {"checkpoint.every_steps": EVERY, "checkpoint.keep": 3, "name": NAME}
    settings |= {"path": f"{folder.parent}/text"}
    command = [
        *(sys.executable, "-m", "rrfp_jax", "launch", f"--config={ROOT}/configs/quickstart.py", where),
        *(f"--config.{name}={value}" for name, value in settings.items()),
        f"--max-restarts={rounds}",
    ]
    return Run(folder, command, where)


# Comparing.


def _figures(calm: Run, shaken: Run, kills: Sequence[Kill]) -> dict[str, Any]:
    expected, found = calm.lines(), shaken.lines()
    resumes = shaken.resumes()
    return {
        "kills": len(kills),
        "by_moment": dict(Counter(kill.moment for kill in kills)),
        "while_saving": sum(kill.saving for kill in kills),
        "launches": shaken.launches,
        "resumes": len(resumes),
        "resumed_off_checkpoint": [step for step in resumes if step % EVERY],
        "steps": len(found),
        "skipped_or_repeated": [at for at, line in enumerate(found) if line["step"] != at],
        "other_data": differ("plan", expected, found),
        "other_loss": differ("loss", expected, found),
        "other_leaves": _other_leaves(calm.checkpoints(), shaken.checkpoints()),
    }


def differ(name: str, expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> list[int]:
    """The steps in which two runs differ, by their lines, or that only one of them has."""
    pairs = zip_longest(*([line[name] for line in lines] for lines in (expected, found)))
    return [step for step, (one, other) in enumerate(pairs) if one != other]


def _other_leaves(ours: Path, theirs: Path) -> list[str]:
    """The leaves in which the last checkpoints differ in a bit, or that only one of them has."""
    arrays = [_last_leaves(CheckpointFolder(path)) for path in (ours, theirs)]
    return sorted(
        name for name in arrays[0].keys() | arrays[1].keys() if arrays[0].get(name) != arrays[1].get(name)
    )


def _last_leaves(folder: CheckpointFolder) -> dict[str, bytes]:
    step = folder.steps()[-1]
    leaves = folder.open(step)[1]
    found = {name: np.asarray(read_leaf(folder.final(step), leaf)).tobytes() for name, leaf in leaves.items()}
    return found | {"the step of the checkpoint": str(step).encode()}


def _aims(figures: Mapping[str, Any], rounds: int, steps: int) -> list[Aim]:
    status = figures["status"]
    return [
        Aim("ranks killed", figures["kills"], rounds, "kills", at_least=True),
        Aim("exit status at the end", FAILED if status is None else abs(status), 0, ""),
        Aim("steps trained", figures["steps"], steps, "steps", at_least=True),
        *(
            Aim(name.replace("_", " "), len(figures[name]), 0, unit)
            for name, unit in (
                ("resumed_off_checkpoint", "resumes"),
                ("skipped_or_repeated", "steps"),
                ("other_data", "steps"),
                ("other_loss", "steps"),
                ("other_leaves", "leaves"),
            )
        ),
        Aim("ranks left behind", figures["left"], 0, "processes"),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
