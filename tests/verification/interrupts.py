"""Ctrl-C is pressed again and again while a run starts, compiles, trains, validates, saves or ends.

    python -m tests.verification.interrupts [--rounds=50] [--processes=1,4] [--seed=0] [--json=FILE] [--check]

A small run is started, interrupted at a random moment, and started again with the command that it was started
with, until it was interrupted --rounds times; then it is trained to its end. For each Ctrl-C: the seconds to
the first line that answers it and to the end of the launcher, the exit status, whether it was said how to go
on, and processes left behind. At the end: the losses of all steps, to the bit, against a run that nobody
interrupted. Once for each number of --processes; one process runs without a launcher. Linux only.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Aim, finish, parse
from rrfp_jax.errors import DONE, INTERRUPTED
from tests.verification.failures import ROOT, processes_with
from tests.verification.restarts import Run, differ, ended, wait_for

MOMENTS = {"start": 0.2, "compile": 0.2, "step": 0.2, "validation": 0.15, "saving": 0.15, "end": 0.1}
"""Shares of the rounds."""
START_SECONDS = 6.0
"""Within which Ctrl-C comes while the run starts, whether it has come further by then or not."""
COMPILE_SECONDS = 4.0
FURTHER_STEPS = 12
VALIDATION_SECONDS, SAVING_SECONDS, END_SECONDS = 0.1, 0.05, 0.5
"""Within which Ctrl-C comes: from a step that is followed by validating, by saving, or by nothing."""
ANSWER_SECONDS, COMPILING_ANSWER_SECONDS = 2.0, 5.0
HOW = re.compile(r"to resume: |the same command starts it again|all steps have been trained")
VALIDATES, SAVES = 5, 7
"""Steps between two; the former as in `interrupted_run.py`."""


@dataclass(frozen=True, kw_only=True)
class Interrupt:
    """What followed a Ctrl-C."""

    moment: str
    step: int
    answer: float | None
    end: float | None
    status: int | None
    says_how: bool
    left: int


def main(argv: Sequence[str]) -> int:
    """Interrupt, compare; the exit status."""
    parser = parse(__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--processes", default="1,4")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored in the background
    figures: dict[str, Any] = {}
    aims: list[Aim] = []
    for processes in map(int, options.processes.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            chance = random.Random(options.seed)
            found = _interrupted(Path(scratch), processes, options.rounds, chance)
        figures[f"{processes} processes"] = found
        aims += _aims(f"{processes} processes", found, options.rounds)
    return finish(options, figures, aims)


def _interrupted(scratch: Path, processes: int, rounds: int, chance: random.Random) -> dict[str, Any]:
    """Interrupt a run of so many processes; all figures."""
    found: list[Interrupt] = []
    shaken = _run(scratch / "interrupted", processes)
    while len(found) < rounds:
        moment = chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        furthest = max(shaken.last_step(), 0)
        steps = furthest + (3 if moment == "end" else 10 * FURTHER_STEPS)
        _launch(shaken, steps, executables="none" if moment == "compile" else "auto")
        if _await_moment(moment, shaken, furthest, steps, chance):
            found.append(_press(shaken, moment))
            print(f"{processes} processes, {len(found)}: {found[-1]}", flush=True)
        else:
            ended(shaken)  # it was over before
    steps = shaken.last_step() + 3
    _launch(shaken, steps)
    status = ended(shaken)
    calm = _run(scratch / "undisturbed", processes)
    _launch(calm, steps)
    ended(calm)
    answers = [one.answer for one in found if one.answer is not None]
    return {
        "interrupts": [asdict(one) for one in found],
        "longest_answer": max(answers, default=None),
        "longest_end": max((one.end for one in found if one.end is not None), default=None),
        "steps": len(calm.lines()),
        "status": status,
        "other_loss": differ("loss", calm.lines(), shaken.lines()),
        "skipped_or_repeated": [at for at, line in enumerate(shaken.lines()) if line["step"] != at],
    }


def _run(folder: Path, processes: int) -> Run:
    where = f"--config.directory={folder}"
    config = f"--config={ROOT}/tests/scripts/interrupted_run.py"
    verb = "train" if processes == 1 else "launch"
    sizes = [f"--config.mesh.pp={processes}", f"--config.checkpoint.every_steps={SAVES}"]
    return Run(folder, [sys.executable, "-m", "rrfp_jax", verb, config, where, *sizes], where)


def _launch(run: Run, steps: int, executables: str = "auto") -> None:
    run.launch(f"--config.steps={steps}", f"--config.executables={executables}")


def _await_moment(moment: str, run: Run, furthest: int, steps: int, chance: random.Random) -> bool:
    """Wait for the moment; whether the run still lives."""

    def listens() -> bool:  # the interpreter's own start is not ours
        return len(os.listdir(f"/proc/{run.launcher.pid}/task")) > 1

    def compiles() -> bool:
        return b"rrfp_jax on jax" in run.said_since_launch()

    target = furthest + chance.randint(SAVES + 1, SAVES + FURTHER_STEPS)
    within, condition = {
        "start": (START_SECONDS, listens),
        "compile": (COMPILE_SECONDS, compiles),
        "step": (0.05, lambda: run.last_step() >= target),
        "validation": (VALIDATION_SECONDS, lambda: run.last_step() >= target - (target + 2) % VALIDATES),
        "saving": (SAVING_SECONDS, lambda: run.last_step() >= target - (target + 1) % SAVES),
        "end": (END_SECONDS, lambda: run.last_step() >= steps - 2),
    }[moment]
    if not wait_for(condition, run):
        return False
    time.sleep(chance.uniform(0.0, within))
    return run.launcher.poll() is None


def _press(run: Run, moment: str) -> Interrupt:
    """Press Ctrl-C, and see what follows."""
    step, before = run.last_step(), len(run.said_since_launch())
    began = time.monotonic()
    run.launcher.send_signal(signal.SIGINT)
    wait_for(lambda: b"Ctrl-C" in run.said_since_launch()[before:], run)
    seconds = time.monotonic() - began
    answered = b"Ctrl-C" in run.said_since_launch()[before:]
    status = ended(run)
    end = time.monotonic() - began
    said = run.said_since_launch()[before:].decode("utf-8", "replace")
    return Interrupt(
        moment=moment,
        step=step,
        answer=seconds if answered else None,
        end=None if status is None else end,
        status=status,
        says_how=bool(HOW.search(said)) or status == DONE,
        left=len(processes_with(run.mark)),
    )


def _aims(name: str, found: Mapping[str, Any], rounds: int) -> list[Aim]:
    pressed = [Interrupt(**one) for one in found["interrupts"]]
    compiling = [one for one in pressed if one.moment in ("start", "compile")]
    others = [one for one in pressed if one not in compiling]

    def slowest(those: Sequence[Interrupt]) -> float:
        return max((one.answer for one in those if one.answer is not None), default=0.0)

    wrong = [one for one in pressed if one.status not in (DONE, INTERRUPTED)]
    silent = [one for one in pressed if one.answer is None and one.status != DONE]
    return [
        Aim(f"{name}: interrupts", len(pressed), rounds, "", at_least=True),
        Aim(f"{name}: answer while compiling", slowest(compiling), COMPILING_ANSWER_SECONDS, "s"),
        Aim(f"{name}: answer at other times", slowest(others), ANSWER_SECONDS, "s"),
        Aim(f"{name}: without an answer", len(silent), 0, ""),
        Aim(f"{name}: other exit status", len(wrong), 0, ""),
        Aim(f"{name}: not said how to go on", sum(not one.says_how for one in pressed), 0, ""),
        Aim(f"{name}: processes left behind", sum(one.left for one in pressed), 0, ""),
        Aim(f"{name}: exit status of the last start", abs(found["status"] or 0), DONE, ""),
        Aim(f"{name}: steps with another loss", len(found["other_loss"]), 0, "steps"),
        Aim(f"{name}: steps skipped or repeated", len(found["skipped_or_repeated"]), 0, "steps"),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
