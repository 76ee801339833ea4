"""One of the four processes that `benchmarks.runtime.recording` starts; rank 0 writes what all have found.

rrfp launch -n 4 -m benchmarks.runtime.recording_rank FILE ROUNDS

No run can be told to record nothing. So what records is replaced between steps, on all ranks alike.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from benchmarks.paced_run import Pace, PacedRun
from configs import quickstart
from rrfp_jax.runs.config import RunConfig
from rrfp_jax.runs.files import RunFiles
from rrfp_jax.runtime.engine import loop
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.recorder import FlightRecorder
from rrfp_jax.trace.costs import constant
from rrfp_jax.trace.records import Part, StepTrace

MODES = ("on", "off", "timed")
STAGES, MICROBATCHES, TASK_SECONDS = 4, 16, 0.005
WARMUP = 4  # rounds

NOTHING = Part(start=0.0, end=1.0, busy={}, packed=b"")

RECORDING: dict[tuple[Any, str], Callable[..., Any]] = {
    **{(FlightRecorder, name): lambda *_: None for name in ("dispatched", "phase", "beat", "begin_round")},
    **{(FlightRecorder, name): lambda *_: None for name in ("sent", "got", "ended", "enters")},
    (loop, "TaskRecord"): lambda *_: None,
    (Part, "of"): lambda *_: NOTHING,
    (StepTrace, "bubble"): lambda *_: [],
}
"""What records, and what stands there instead; beside it rank 0 writes files. Without what `Part.of` packs,
nothing of it is sent.
"""


class Account:
    """Adds up what calls take of the CPU (s): what other processes take meanwhile does not count.

    Looking at the clock takes as long as many of these calls do, and longer where the driver has just woken
    up. So what a call of nothing takes, right behind each of them, is taken off.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it."""
        began = thread_time()
        result = function(*arguments)
        ended = thread_time()
        _nothing(*arguments)
        self.seconds += (ended - began) - (thread_time() - ended)
        return result


def _nothing(*_: Any) -> None:
    """For the account."""


@contextmanager
def recording(mode: str, account: Account) -> Iterator[None]:
    """Inside, things are recorded, or not, or so that the account knows what that takes.

    Args:
        mode: of `MODES`.
        account: of this process.
    """
    there = {(owner, name): vars(owner)[name] for owner, name in RECORDING}
    try:
        for (owner, name), nothing in RECORDING.items() if mode != "on" else ():
            call = nothing if mode == "off" else _timed(account, getattr(owner, name))
            setattr(owner, name, staticmethod(call) if (owner, name) == (Part, "of") else call)
        yield
    finally:
        for (owner, name), original in there.items():
            setattr(owner, name, original)


def _timed(account: Account, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: account.timed(function, *arguments)


def in_turns(steps: Iterator[Any], files: RunFiles, rounds: int) -> dict[str, list[float]]:
    """Seconds of steps by mode, a step of each a round, and those of recording in a timed one."""
    found: dict[str, list[float]] = {mode: [] for mode in (*MODES, "recording")}
    account = Account()
    for number in range(WARMUP + rounds):
        at = number % len(MODES)
        for mode in (*MODES[at:], *MODES[:at]):  # so that none always follows the same
            with recording(mode, account):
                account.seconds, began = 0.0, perf_counter()
                report = next(steps)
                if mode == "timed":
                    account.timed(write, files, report)
                elif mode == "on":
                    write(files, report)
                seconds = perf_counter() - began
            if number >= WARMUP:
                found[mode].append(seconds)
                if mode == "timed":
                    found["recording"].append(account.seconds)
    return found


def write(files: RunFiles, report: Any) -> None:
    """What a run writes of a step."""
    files.add(report, report.as_dict())


def paced_steps(config: RunConfig, rounds: int) -> Iterator[Any]:
    """Steps of four paced stages."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        file.write_text(json.dumps(constant(STAGES, MICROBATCHES, TASK_SECONDS).as_json_object()))
        run = PacedRun(config, Pace(workload=str(file)))
    return run.steps(len(MODES) * (WARMUP + rounds))


def real_steps(config: RunConfig, rounds: int) -> Iterator[Any]:
    """Steps of the quickstart."""
    return config.trainer().steps(len(MODES) * (WARMUP + rounds))


def main(file: Path, rounds: int) -> None:
    """Measure; all ranks do the same."""
    world, figures = join(), {}
    with tempfile.TemporaryDirectory() as own:
        folder = world.gather("the folder", own)[0]  # rank 0's
        for name, make in {"paced": paced_steps, "real": real_steps}.items():
            config = replace(quickstart.get_config(), name=name, directory=folder)
            with RunFiles(config, world, {}) as files:
                found = in_turns(make(config, rounds), files, rounds)
            recording = world.gather("what recording takes", float(np.mean(found["recording"])))
            figures[name] = found | {"recording_by_rank": recording}
    if world.rank == 0:
        file.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
