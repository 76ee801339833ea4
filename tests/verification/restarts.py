"""Ranks are killed again and again (kill -9) while a run trains and saves: nothing of it may be lost.

    python -m tests.verification.restarts [--rounds=100] [--processes=4] [--seed=0] [--json=FILE] [--check]

A small run is trained twice with a checkpoint every five steps, first undisturbed, then under
`rrfp launch --max-restarts` with a random rank killed at a random moment, until as many were killed as
--rounds says: while it starts, while it trains, or just after a checkpoint was begun. If the launcher gives
up because restarts brought the run no further, it is started again, as a user would. Compared at the end:
loss and data of every step, all leaves of the last checkpoint, to the bit. Linux only.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Aim, finish, parse
from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.checkpoint.format import read_leaf
from rrfp_jax.errors import DONE, FAILED
from tests.verification.failures import ROOT, processes_with, started

NAME = "trial"
MOMENTS = {"start": 0.2, "step": 0.4, "saving": 0.4}
"""Shares of the kills."""
START_SECONDS = 8.0
"""Within which a rank is killed while it starts, if the run does not get further before."""
FURTHER_STEPS = 15
"""Within which a rank is killed while it trains, from the furthest step that there was before."""
SAVING_SECONDS = 0.03
"""Within which a rank is killed, from when a checkpoint is begun."""
LIMIT_SECONDS = 240.0
"""For anything that is waited for, to begin or to go on."""
POLL_SECONDS = 0.002
LOOK_SECONDS = 0.05
"""Between two looks at all processes, which take longer."""
LAST_BYTES = 8192
"""In which there is a whole line of `metrics.jsonl`."""


@dataclass
class Run:
    """A training run of ranks that a launcher starts, in a folder of its own."""

    folder: Path
    command: Sequence[str]
    mark: str
    launches: int = 0
    said_before: int = 0
    launcher: subprocess.Popen[bytes] = field(init=False)

    def launch(self, *more: str) -> None:
        """Start the launcher, with further arguments; what it prints is added to `said`."""
        said = self.folder / "said"
        self.said_before = said.stat().st_size if said.exists() else 0
        self.launcher = started([*self.command, *more], self.folder, "said", {})
        self.launches += 1

    def said_since_launch(self) -> bytes:
        """What the launcher and the ranks have printed since it was started the last time."""
        with (self.folder / "said").open("rb") as file:
            file.seek(self.said_before)
            return file.read()

    def ranks(self) -> list[int]:
        """The ids of its living ranks."""
        return [pid for pid in processes_with(self.mark) if pid != self.launcher.pid]

    def last_step(self) -> int:
        """The latest step that was trained; -1 if none was."""
        with suppress(OSError):
            with (self.folder / NAME / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
                *whole, _ = file.read().split(b"\n")
            if whole:
                return int(json.loads(whole[-1])["step"])
        return -1

    def lines(self) -> list[Mapping[str, Any]]:
        """The whole lines of `metrics.jsonl`."""
        with suppress(OSError):
            *whole, _ = (self.folder / NAME / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
            return [json.loads(line) for line in whole]
        return []

    def resumes(self) -> list[int]:
        """After how many steps it went on, each time that it did so from a checkpoint."""
        said = (self.folder / "said").read_text(encoding="utf-8", errors="replace")
        return [int(steps) for steps in re.findall(r"resumes after (\d+) steps", said)]

    def checkpoints(self) -> Path:
        """The folder that they are in."""
        return self.folder / f"{NAME}.checkpoints"

    def saving(self) -> set[str]:
        """The checkpoints that are being written."""
        return {path.name for path in self.checkpoints().glob(".*.saving")}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A rank that was killed: at which moment, after which step, and whether a checkpoint was under way."""

    moment: str
    step: int
    saving: bool


def disturb(run: Run, rounds: int, processes: int, chance: random.Random) -> list[Kill]:
    """Start a run and kill one rank after the other; those that were killed before the run ended."""
    kills: list[Kill] = []
    before: list[int] = []
    furthest = -1
    run.launch()
    while len(kills) < rounds:
        ranks = _next_ranks(run, processes, before)
        moment = chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if ranks and _await_moment(moment, run, furthest, chance):
            with suppress(ProcessLookupError):
                os.kill(chance.choice(ranks), signal.SIGKILL)
                kills.append(Kill(moment=moment, step=run.last_step(), saving=bool(run.saving())))
                furthest = max(furthest, kills[-1].step)
                print(f"kill {len(kills)}: {kills[-1]}", flush=True)
            before = ranks
        elif run.launcher.poll() == FAILED:  # it has given up
            run.launch()
        else:
            break  # the run is done, or hangs
    return kills


def ended(run: Run) -> int | None:
    """Wait for the launcher's status; None if the run stood still and the launcher was killed."""
    furthest, deadline = run.last_step(), time.monotonic() + LIMIT_SECONDS
    while run.launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        if (step := run.last_step()) > furthest:
            furthest, deadline = step, time.monotonic() + LIMIT_SECONDS
    status = run.launcher.poll()
    run.launcher.kill()
    run.launcher.wait()
    return status


def _next_ranks(run: Run, processes: int, before: Sequence[int]) -> list[int]:
    """The ranks of the attempt that follows, once all of them are there; none if it does not come."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while run.launcher.poll() is None and time.monotonic() < deadline:
        ranks = run.ranks()
        if len(ranks) == processes and not set(before) & set(ranks):
            return ranks
        time.sleep(LOOK_SECONDS)
    return []


def _await_moment(moment: str, run: Run, furthest: int, chance: random.Random) -> bool:
    """Wait for the moment to kill; whether it came while the launcher lived."""
    if moment == "start":
        at = time.monotonic() + chance.uniform(0.0, START_SECONDS)
        return wait_for(lambda: time.monotonic() >= at or run.last_step() > furthest, run)
    if moment == "step":
        target = furthest + chance.randint(1, FURTHER_STEPS)
        return wait_for(lambda: run.last_step() >= target, run)
    left_over = run.saving()
    if not wait_for(lambda: run.last_step() > furthest and bool(run.saving() - left_over), run):
        return False
    time.sleep(chance.uniform(0.0, SAVING_SECONDS))
    return True


def wait_for(condition: Callable[[], bool], run: Run) -> bool:
    """Wait until something is so; whether that came while the launcher lived."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while run.launcher.poll() is None and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(POLL_SECONDS)
    return False


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
