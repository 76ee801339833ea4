"""A training run whose ranks are killed one after the other, at moments of several kinds."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rrfp_jax.errors import FAILED
from tests.support.kept import FAST_COMPILING
from tests.verification.failure_cell import ROOT, processes_with

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
        env = {name: value for name, value in os.environ.items() if not name.startswith("RRFP_")}
        env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        env |= {"XLA_FLAGS": FAST_COMPILING}
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [*self.command, *more]
        with (self.folder / "said").open("ab") as out:
            self.said_before = out.tell()
            self.launcher = subprocess.Popen(
                command, env=env, cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
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
