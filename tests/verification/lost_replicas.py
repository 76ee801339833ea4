"""Ranks of two replicas are killed one after the other: training goes on without them, and no step is lost.

    python -m tests.verification.lost_replicas [--rounds=50] [--seed=0] [--json=FILE] [--check]

A small run of two stages in two replicas, four processes, is trained twice: undisturbed, and under
`rrfp launch --replace-after=6` while ranks are killed (kill -9). First every rank is killed at every moment
of a whole run: while it starts, compiles, is in a step, keeps its state, validates, and hands over. Further
rounds kill any rank at a random moment, also with one replica. Between two kills the run starts, or comes a
step further: it is given up after three restarts that bring it no further. The last kill comes when all steps
have been trained. Compared: every step's data, to the bit; its loss, to rounding, and to the bit until the
first kill; the seconds from each kill to the end of the next step. Then checkpoints from before the first
kill, with one replica, and from the end are gone on from in one process. It needs Linux.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Aim, finish, parse
from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.errors import DONE, FAILED
from rrfp_jax.runs.lent_folder import PLACE
from rrfp_jax.runtime.run.recorder import recorded
from tests.verification.failures import ROOT, processes_with
from tests.verification.restarts import LIMIT_SECONDS, NAME, Run, differ, ended, wait_for

RANKS = 4
MOMENTS = ("step", "starting", "held", "compiling", "validation", "handing over")
"""The first kill must come to ranks that train; after it there are fewer, and a start is ahead."""
RECURRING = ("step", "held", "validation")
"""Those that come also if all replicas train."""
STARTS = ("starting", "compiling")
"""Those at which an attempt has not come to a step. There are not two in a row."""
FURTHER = 2
"""Steps from a kill to the next one. A step whose state was not kept yet is trained again, which is none."""
EVERY = 20
"""Steps between checkpoints, and between validations."""
REPLACED = 6
"""Seconds from a loss until all replicas are to go on."""
STEPS_PER_ROUND = 200
"""The run is so long that it does not end before the last kill."""
TOLERANCE = 1e-3
"""By which part a loss may differ from the undisturbed run's: sums were rounded otherwise in many steps."""
SECONDS = 20.0
"""From a kill to the end of the next step."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A rank that was killed: of how many, when, after which step, and how long until the next had ended."""

    moment: str
    rank: int
    ranks: int
    step: int
    seconds: float


def main(argv: Sequence[str]) -> int:
    """Train, disturb, compare; the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="ranks to kill before the last step")
    parser.add_argument("--seed", type=int, default=0, help="of the random kills")
    options = parser.parse_args(argv)
    steps = STEPS_PER_ROUND * options.rounds
    with tempfile.TemporaryDirectory() as scratch:
        text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
        (Path(scratch) / "text").write_text(text, encoding="utf-8")  # which nobody edits meanwhile
        calm = _run(Path(scratch) / "undisturbed", steps)
        shaken = _run(Path(scratch) / "disturbed", steps, f"--max-restarts={options.rounds + 1}")
        calm.launch()
        if ended(calm) != DONE:
            sys.exit(f"the undisturbed run failed:\n{(calm.folder / 'said').read_text(encoding='utf-8')}")
        memory = set(PLACE.glob("rrfp-*"))
        kills = _disturb(shaken, options.rounds, steps, random.Random(options.seed))
        status = ended(shaken)
        figures = _figures(calm, shaken, kills) | {
            "status": status,
            "left": len(processes_with(shaken.mark)) + len({*PLACE.glob("rrfp-*")} - memory),
            "gone_on_from": _gone_on(shaken, steps),
        }
        print(*(f"{name}: {value}" for name, value in figures.items() if name != "kills"), sep="\n")
        if status != DONE:
            print((shaken.folder / "said").read_text(encoding="utf-8", errors="replace")[-4000:])
        return finish(options, figures, _aims(figures, options.rounds + 1, steps))


def _run(folder: Path, steps: int, *more: str) -> Run:
    where = f"--config.directory={folder}"
    sizes: dict[str, Any] = {
        "mesh.pp": 2,
        "mesh.dp": 2,
        "model.n_layers": 2,
        "model.d_model": 16,
        "model.d_ff": 16,
    }
    sizes |= {"batch": 8, "microbatches": 4, "sequence_length": 32, "steps": steps, "learning_rate": 1e-4}
    settings = sizes | {"checkpoint.every_steps": EVERY, "checkpoint.keep": 10**6, "name": NAME}
    settings |= {"path": f"{folder.parent}/text", "validate_every": EVERY, "validation_steps": 2}
    command = [
        *(sys.executable, "-m", "rrfp_jax", "launch", f"--config={ROOT}/configs/quickstart.py", where),
        *(f"--config.{name}={value}" for name, value in settings.items()),
        *([f"--replace-after={REPLACED}", *more] if more else ()),
    ]
    return Run(folder, command, where)


# Killing.


def _disturb(run: Run, rounds: int, steps: int, chance: random.Random) -> list[Kill]:
    """Start a run and kill ranks of it; those that were killed before it ended."""
    planned = [(moment, rank, True) for rank in range(RANKS) for moment in MOMENTS][:rounds]
    while len(planned) < rounds:
        planned.append((chance.choice(MOMENTS), chance.randrange(RANKS), chance.random() < 0.5))
    kills: list[Kill] = []
    run.launch()
    wait_for(lambda: bool(CheckpointFolder(run.checkpoints()).steps()), run)
    for moment, rank, whole in planned:
        steady = bool(kills) and len(_ranks(run)) == RANKS  # no start is ahead
        steady |= moment in STARTS and bool(kills) and kills[-1].moment in STARTS
        comes = moment if not steady or moment in RECURRING else chance.choice(RECURRING)
        least = kills[-1].step + FURTHER if kills and comes not in STARTS else 0
        kill = _killed(run, comes, rank, whole, least)
        if kill is None:
            return kills
        kills.append(kill)
        print(f"kill {len(kills)}: {kill}", flush=True)
    wait_for(lambda: run.last_step() == steps - 1, run)
    with suppress(ProcessLookupError, IndexError):
        os.kill(run.ranks()[-1], signal.SIGKILL)
        kills.append(Kill(moment="end", rank=RANKS - 1, ranks=RANKS, step=steps - 1, seconds=0.0))
    return kills


def _killed(run: Run, moment: str, rank: int, whole: bool, least: int) -> Kill | None:
    """Kill a rank at a moment, after a step or a later one, and wait until training goes on; None if not."""
    found: dict[int, int] = {}

    def has_come() -> bool:
        found.clear()
        found.update(_ranks(run))
        enough = len(found) == RANKS if whole and moment != "handing over" else len(found) > 1
        return enough and _is_at(run, moment, rank % len(found)) and run.last_step() >= least

    if not wait_for(has_come, run):
        return None
    step, resumes, count = run.last_step(), len(run.resumes()), len(found)
    with suppress(ProcessLookupError):
        os.kill(found[rank % count], signal.SIGKILL)
    killed = time.monotonic()

    def goes_on() -> bool:
        again = run.resumes()
        return len(again) > resumes and run.last_step() >= again[-1]

    if not wait_for(goes_on, run):
        return None
    return Kill(moment=moment, rank=rank % count, ranks=count, step=step, seconds=time.monotonic() - killed)


def _ranks(run: Run) -> dict[int, int]:
    """The process of each rank that lives."""
    found: dict[int, int] = {}
    for process in run.ranks():
        with suppress(OSError):
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            found |= {int(v[10:]): process for v in variables if v.startswith(b"RRFP_RANK=")}
    return found


def _is_at(run: Run, moment: str, rank: int) -> bool:
    lent = [folder for folder in PLACE.glob("rrfp-*") if _is_lent_to(folder, run)]
    if moment == "held":
        return any(path for folder in lent for path in folder.glob("states/.*.saving"))
    if moment == "handing over":
        return any((folder / "hand-over").exists() for folder in lent)
    recording = recorded(run.folder / NAME).get(rank)
    return (recording.phase.name if recording is not None else "starting") == moment


def _is_lent_to(folder: Path, run: Run) -> bool:
    for process in run.ranks():
        with suppress(OSError):
            return f"RRFP_HOST_MEMORY={folder}".encode() in Path(f"/proc/{process}/environ").read_bytes()
    return False


# Comparing.


def _figures(calm: Run, shaken: Run, kills: Sequence[Kill]) -> dict[str, Any]:
    expected, found = calm.lines(), shaken.lines()
    first = min((kill.step for kill in kills), default=0) + 1
    seconds = [kill.seconds for kill in kills if kill.moment != "end"]
    pairs = [(one["loss"], other["loss"]) for one, other in zip(expected, found, strict=False)]
    return {
        "kills": [asdict(kill) for kill in kills],
        "seconds_to_next_step": {
            moment: [round(kill.seconds, 1) for kill in kills if kill.moment == moment] for moment in MOMENTS
        },
        "median_seconds": statistics.median(seconds or [0.0]),
        "longest_seconds": max(seconds, default=0.0),
        "joined": len(_attempts(shaken, replicas=2)) - 1,
        "steps": len(found),
        "skipped_or_repeated": [at for at, line in enumerate(found) if line["step"] != at],
        "other_data": differ("plan", expected[: len(found)], found),
        "other_loss_before_the_first_kill": differ("loss", expected[:first], found[:first]),
        "largest_difference_of_a_loss": max((abs(b / a - 1) for a, b in pairs), default=1.0),
        "from_checkpoint": [
            line for line in _said(shaken) if "resumes after" in line and "memory" not in line
        ],
    }


def _said(run: Run) -> list[str]:
    return (run.folder / "said").read_text(encoding="utf-8", errors="replace").splitlines()


def _attempts(run: Run, replicas: int) -> list[str]:
    """What rank 0 of each attempt with so many replicas has said, of those that got so far."""
    logs = [path.read_text(encoding="utf-8") for path in (run.folder / NAME).rglob("rank-0.log")]
    begun = [log for log in logs if "2 stages" in log]
    return [log for log in begun if ("in 2 replicas" in log) == (replicas == 2)]


def _gone_on(run: Run, steps: int) -> dict[str, Any]:
    """By checkpoint, the steps after it whose loss is another in one process that goes on from it."""
    stored = [step for step in CheckpointFolder(run.checkpoints()).steps() if step < steps]
    fewer = [step for step in stored if any(f"step {step} is complete" in log for log in _attempts(run, 1))]
    chosen = {"before": stored[:1], "with one replica": fewer[:1], "after": stored[-1:]}
    lines = run.lines()
    return {
        f"{when}: step {step}": _other_losses(run, step, lines[step : step + 3])
        for when, step in itertools.chain(*([(when, s) for s in found] for when, found in chosen.items()))
    }


def _other_losses(run: Run, step: int, expected: Sequence[Mapping[str, Any]]) -> list[int]:
    """Go on from a checkpoint in one process, on one replica, for as many steps as are expected."""
    folder = run.folder.parent / f"from-{step}"
    shutil.copytree(run.checkpoints() / str(step), folder / f"{NAME}.checkpoints" / str(step))
    where = f"--config.directory={folder}"
    settings = [argument for argument in run.command[3:] if argument.startswith("--config")]
    alone = Run(
        folder,
        [sys.executable, "-m", "rrfp_jax", "train", *settings, where, "--config.mesh.dp=1"],
        where,
    )
    alone.launch()
    wait_for(lambda: alone.last_step() >= step + len(expected) - 1, alone)
    alone.launcher.send_signal(signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        alone.launcher.wait(LIMIT_SECONDS)
    found = {line["step"]: line["loss"] for line in alone.lines()}
    return [
        line["step"] for line in expected if abs(found.get(line["step"], 0.0) / line["loss"] - 1) > TOLERANCE
    ]


def _aims(figures: Mapping[str, Any], kills: int, steps: int) -> list[Aim]:
    status = figures["status"]
    others = [step for found in figures["gone_on_from"].values() for step in found]
    return [
        Aim("ranks killed", len(figures["kills"]), kills, "kills", at_least=True),
        Aim("exit status at the end", FAILED if status is None else abs(status), 0, ""),
        Aim("steps trained", figures["steps"], steps, "steps", at_least=True),
        Aim("steps skipped or repeated", len(figures["skipped_or_repeated"]), 0, "steps"),
        Aim("steps with other data", len(figures["other_data"]), 0, "steps"),
        Aim(
            "other losses before the first kill", len(figures["other_loss_before_the_first_kill"]), 0, "steps"
        ),
        Aim("largest difference of a loss", figures["largest_difference_of_a_loss"], TOLERANCE, "of it"),
        Aim("restarts from a checkpoint", len(figures["from_checkpoint"]), 0, "restarts"),
        Aim("replacements that joined", figures["joined"], 1, "times", at_least=True),
        Aim("longest from a kill to the next step", figures["longest_seconds"], SECONDS, "s"),
        Aim("checkpoints gone on from", len(figures["gone_on_from"]), 3, "checkpoints", at_least=True),
        Aim("other losses after going on", len(others), 0, "steps"),
        Aim("processes and folders left behind", figures["left"], 0, ""),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
