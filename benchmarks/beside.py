"""What a run pays beside its steps: for recording them, and for checkpoints."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import optax

import rrfp_jax as rrfp
from benchmarks.harness import Aim, Found, bench, on_ranks, say
from benchmarks.paced_run import Pace, PacedRun
from configs import quickstart
from models import gpt
from rrfp_jax.runs.files import RunFiles
from rrfp_jax.runs.lent_folder import lent_folder
from rrfp_jax.runtime.engine import loop
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.recorder import FlightRecorder
from rrfp_jax.trace.costs import constant
from rrfp_jax.trace.records import Part, StepTrace

LIMIT_PERCENT, LIMIT_SECONDS = 0.5, 3600.0

MODES = ("on", "off", "timed")
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
        began = thread_time()
        result = function(*arguments)
        ended = thread_time()
        _nothing(*arguments)
        self.seconds += (ended - began) - (thread_time() - ended)
        return result


def _nothing(*_: Any) -> None:
    """For the account."""


@contextmanager
def recorded(mode: str, account: Account) -> Iterator[None]:
    """Inside, things are recorded, or not, or so that the account knows what that takes; see `MODES`."""
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
            with recorded(mode, account):
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
    files.add(replace(report.recorded, ranks=report.ranks), report.as_dict())


def recorded_steps(rounds: int) -> dict[str, Any]:
    """Paced and real steps in turns; all four ranks do the same."""
    world, figures = join(), {}
    with tempfile.TemporaryDirectory() as own:
        folder = world.gather("the folder", own)[0]  # rank 0's
        for name in ("paced", "real"):
            config = replace(quickstart.get_config(), name=name, directory=folder)
            count = len(MODES) * (WARMUP + rounds)
            if name == "paced":
                file = Path(own) / "workload.json"
                file.write_text(json.dumps(constant(4, 16, 0.005).as_json_object()))
                steps: Iterator[Any] = PacedRun(config, Pace(workload=str(file))).steps(count)
            else:
                steps = config.trainer().steps(count)
            with RunFiles(config, world, {}) as files:
                found = in_turns(steps, files, rounds)
            recording = world.gather("what recording takes", float(np.mean(found["recording"])))
            figures[name] = found | {"recording_by_rank": recording}
    return figures


def judged(name: str, found: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], list[Aim]]:
    """Figures of the steps of a kind, and their aims.

    A difference that is smaller than the noise shows nothing: it must exceed the limit by two standard errors
    to miss it.
    """
    ratios = 100.0 * (np.asarray(found["on"]) / np.asarray(found["off"]) - 1.0)
    error = 1.2533 * float(np.std(ratios, ddof=1)) / len(ratios) ** 0.5  # of a median
    step = median(found["on"])
    figures = {
        "step_seconds": step,
        "off_seconds": median(found["off"]),
        "difference_percent": float(np.median(ratios)),
        "difference_error_percent": error,
        "calls_seconds": max(found["recording_by_rank"]),
        "calls_percent": 100.0 * max(found["recording_by_rank"]) / step,
    }
    least = figures["difference_percent"] - 2.0 * error
    return figures, [
        Aim(f"{name}, on against off, less two standard errors", least, LIMIT_PERCENT, "%"),
        Aim(f"{name}, in the calls", figures["calls_percent"], LIMIT_PERCENT, "%"),
    ]


@bench(
    "What does recording cost: trace, flight recorder, metrics, the step for `rrfp top`?",
    minutes="4 *",
    aims=f"{LIMIT_PERCENT} % of a step, on against off and in the calls",
)
def recording(rounds: int = 60) -> Found:
    """Recorded are, in every step: the tasks with their times, which all processes send to each other; the
    flight recorder; the line of `metrics.jsonl`; the step that `rrfp top` reads, once a second. Four
    processes, one stage each, run steps in turns, paced and real: with all of that, with nothing of it, and
    with all of it timed.

    `on against off` is the median, over all rounds, of what a step with everything takes longer than the one
    without, beside it the standard error. `in the calls` is what the calls themselves take of the CPU in a
    step, in the process where that is most, as a share of the step. Where processes wait anyway it costs less
    than that; what larger messages cost is not in it."""
    figures, aims = {}, []
    for name, found in on_ranks(4, recorded_steps, rounds, seconds=LIMIT_SECONDS).items():
        figures[name], own = judged(name, found)
        aims += own
        say(f"{name}: {figures[name]}")
    return Found(figures, aims)


SAVES = ("none", "waiting", "beside", "memory")
SAVING_STEPS = 8
MODEL = gpt.GPTConfig(d_model=512, n_heads=8, d_ff=2048, n_layers=4)
MICROBATCHES, BATCH, LENGTH = 4, 2, 64


def block(
    trainer: rrfp.Trainer, batch: list[dict[str, np.ndarray]], folder: Path, memory: Path, mode: str
) -> float:
    """Seconds of a block of steps, and of what is saved in it: to disk once, to memory after each step."""
    began = perf_counter()
    if mode in ("waiting", "beside"):
        trainer.save(folder, keep=1, wait=mode == "waiting")
    for _ in range(SAVING_STEPS):
        trainer.step(batch)
        if mode == "memory":
            trainer._hold(memory)
    trainer.finish_saving()
    return perf_counter() - began


def saved_blocks(rounds: int) -> dict[str, Any]:
    """Blocks of all kinds in turn; all four ranks do the same."""
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (BATCH, LENGTH + 1), dtype=np.int32)
    fields = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": np.ones((BATCH, LENGTH), np.float32)}
    batch = [fields] * MICROBATCHES
    pipe = quickstart.pipeline(MODEL)
    trainer = rrfp.Trainer(pipe, optax.adamw(1e-4), data=batch, mesh=rrfp.Mesh(pp=4))
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as own, lent_folder() as lent:
        folder, memory = map(Path, join().gather("the folders", [own, str(lent)])[0])  # rank 0's
        for number in range(rounds + 1):
            for mode in SAVES:
                seconds = block(trainer, batch, folder, memory, mode)
                if number:  # the first ones warm up
                    found[mode].append(seconds)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        join().gather("the end of the measurement", None)
    return {"seconds": found, "bytes": size}


@bench(
    "What does a checkpoint cost the run that writes it?",
    minutes="6 *",
    aims="beside the steps half of what waiting loses",
)
def saving(rounds: int = 5) -> Found:
    """Four processes, one stage each, train a transformer with about 200 MB of parameters and AdamW's state.
    Blocks of eight steps take turns: without a save; with one that is waited for before the first step; with
    one that is written beside the steps and must be complete at the end of the block; and with one into the
    host's memory after each step, as `--replace-after` has it. What a block takes longer than one without is
    what saving costs."""
    figures = on_ranks(4, saved_blocks, rounds, seconds=LIMIT_SECONDS)
    seconds = {mode: median(figures["seconds"][mode]) for mode in SAVES}
    step = seconds["none"] / SAVING_STEPS
    lost = {mode: seconds[mode] - seconds["none"] for mode in SAVES[1:]}
    lost["memory"] /= SAVING_STEPS
    say(f"checkpoint of {figures['bytes'] / 1e6:.0f} MB; a step takes {step:.3f} s")
    for mode, value in lost.items():
        say(f"each save, {mode:>7}: {value:6.3f} s lost, {value / step:5.2f} of a step")
    share = lost["beside"] / lost["waiting"] if lost["waiting"] > 0 else 0.0
    figures |= {"step_seconds": step, "lost_seconds": lost}
    return Found(figures, [Aim("lost beside the steps, of what waiting loses", share, 0.5, "")])
