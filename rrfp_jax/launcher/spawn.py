"""Starts the ranks of a run on this machine, watches them, says how it went, and starts them again."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, FAILED, INTERRUPTED, REFUSED, TrainingError
from rrfp_jax.files import shown_path
from rrfp_jax.launcher.exit_report import RunEnd, diagnose
from rrfp_jax.launcher.exit_words import render_end
from rrfp_jax.launcher.folders import RunFolder, remove_answers, set_attempt_aside
from rrfp_jax.launcher.restarts import NO_STEP, Elastic, after_attempt
from rrfp_jax.launcher.supervisor import ASKS_WHY, PASSED_ON, Patience, Screen, Supervisor, recording_of
from rrfp_jax.printing import warn
from rrfp_jax.runtime.run import token
from rrfp_jax.runtime.run.coordinator import Coordinator, reserved_port
from rrfp_jax.runtime.run.exits import read_all
from rrfp_jax.runtime.run.place import NAME, gpu_environment, typed_command
from rrfp_jax.runtime.run.signals import Signals, collected_signals

THREADS_FLAG = "--xla_cpu_multi_thread_eigen"


def spawn(
    argv: Sequence[str],
    count: int,
    folder: RunFolder,
    *,
    command: str = "rrfp-launch",
    env: Mapping[str, str] | None = None,
    patience: Patience | None = None,
    max_restarts: int = 0,
    elastic: Elastic | None = None,
    discards: Collection[int] = (REFUSED, INTERRUPTED),
) -> int:
    """Run a command once per rank; must be called from the main thread, for it handles signals meanwhile.

    Each rank finds RRFP_COORDINATOR, RRFP_PROCESSES, RRFP_RANK, RRFP_FOLDER, RRFP_TOKEN, RRFP_RESTARTS and
    RRFP_COMMAND in its environment, and the launcher, not rank 0, sees to the coordination service. What they
    print goes to `rank-<r>.log` and, with the rank before each line, to stdout. None of them, nor of their
    groups, is left at the end. If they fail they are started again, as `restarts.py` has it; what the attempt
    before has left is then in `attempt-<number>/`. A run that is elastic may go on with fewer ranks.

    Args:
        argv: the command.
        count: of ranks.
        folder: for logs, flight recorders (`flight-<rank>`), last words and `diagnosis.txt`. One still in
            staging at the end is removed if the status is one of `discards`, else brought to its place.
        command: that messages begin with.
        env: of the ranks, before the above is added; None for this process's own.
        patience: limits; None for what `env` says.
        max_restarts: how often they are started again after a failure.
        elastic: of a run that goes on without replicas that were lost, until they are replaced.
        discards: statuses of a run that has left nothing to keep unless it has begun.

    Returns:
        The exit status of the last attempt: 0 done, 1 failed, 2 refused by all ranks, 130 interrupted. If
        SIGTERM ended it, and all that was trained could be saved afterwards, 0.

    Raises:
        TrainingError: the ranks, or the coordinator, cannot be started.
        UsageError: `env` gives nonsense as a limit; nothing has been started then.
    """
    base = ENVIRONMENT if env is None else env
    patience, replicas = patience or Patience.of(base), elastic or Elastic({1: count})
    with collected_signals([*PASSED_ON, ASKS_WHY], wakes=[signal.SIGCHLD]) as signals:
        launch = _Launch(
            argv, count, folder, command, base, patience, max_restarts, replicas, discards, signals
        )
        status: int = FAILED
        came: Collection[int] = ()
        try:
            status, came = launch.run()
        finally:
            saved = replicas.end(status, launch.say)
    return DONE if saved and status == INTERRUPTED and {*came} == {signal.SIGTERM} else status


@dataclass(frozen=True)
class _Launch:
    """What all attempts at a run have in common; see `spawn`."""

    argv: Sequence[str]
    count: int
    folder: RunFolder
    command: str
    base: Mapping[str, str]
    patience: Patience
    max_restarts: int
    replicas: Elastic
    discards: Collection[int]
    signals: Signals

    def run(self) -> tuple[int, Collection[int]]:
        """Make one attempt after the other; the status of the last, and the signals that came."""
        reached: list[int] = []
        before = 0  # restarts before those attempts, up to the latest that has handed over
        while True:
            supervisor = self._attempt(restarts=before + len(reached))
            if supervisor.handed_over and not supervisor.passed_on:
                self._set_aside(self.replicas.handed_over())
                before, reached = before + len(reached), []
                continue
            found = _diagnosed(supervisor, self.folder, self.discards)
            reached.append(_furthest_step(self.folder.path, self.count))
            text = f"{self.command}: {render_end(found)}"
            most = 0 if supervisor.passed_on else self.max_restarts
            decision = after_attempt(found.status, reached, most, self.patience.back_off, before)
            if decision.wait is not None:
                restart = f"restart {before + len(reached)} of {most} in {decision.wait:g} s"
                stepped = reached[-1] > NO_STEP
                follows = restart + self.replicas.lost(found.lost, stepped, decision.wait)
            elif found.kind == "refused" and self.replicas.refuses_fewer():
                reached.pop()  # that was no failure
                follows = f"not with fewer replicas, then: {self.replicas.handed_over()}"
            else:
                _say_end(found.status, "\n".join(filter(None, [text, decision.reason])), self.folder)
                return found.status, supervisor.passed_on
            _keep(text, self.folder.path)
            self._set_aside(f"{render_end(found).splitlines()[0]}; {follows}")
            if came := _signals_within(decision.wait or 0.0, self.signals):
                self.say("interrupted")
                return INTERRUPTED, came

    def say(self, text: str) -> None:
        """Print a line."""
        warn(f"{self.command}: {text}")

    def _attempt(self, restarts: int) -> Supervisor:
        """Start the ranks, each on its slot of the machine, and watch them to their end."""
        slots, replicas = self.replicas.slots, self.replicas
        told = {**self.base, "RRFP_RESTARTS": str(restarts), NAME: typed_command(self.base)}
        with ExitStack() as stack:
            try:
                address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
                replicas.begin()
                coordinator = Coordinator(address, len(slots), linger_seconds=0.0)  # as they die with us
                stack.callback(coordinator.close)
                screen, elastic = Screen(), replicas.is_elastic
                supervisor = Supervisor(
                    self.patience, self.folder, self.signals, screen, self.say, len(slots), elastic
                )
                stack.callback(supervisor.close)
                where, secret = self.folder.path, token.new_token()
                for rank, slot in enumerate(slots):
                    seat = {**told, **gpu_environment(told, slot, self.count), **replicas.environment}
                    one = _environment(seat, address, len(slots), rank, where, secret) | screen.environment
                    supervisor.start(rank, self.argv, one, where)
            except (OSError, RuntimeError) as error:
                raise TrainingError(f"cannot start the ranks: {error}") from None
            supervisor.watch(lambda: replicas.look(self.say))
        return supervisor

    def _set_aside(self, why: str) -> None:
        """Say in one line why an attempt follows, and make room for it."""
        try:
            aside = shown_path(set_attempt_aside(self.folder.path))
        except OSError as error:
            reason = error.strerror if self.folder.exists else f"{self.folder.final} was removed"
            raise TrainingError(f"{why}\nand cannot be started again: {reason}") from None
        self.say(f"{why}; see {aside}/")


def _environment(
    base: Mapping[str, str], address: str, count: int, rank: int, folder: Path, secret: str
) -> dict[str, str]:
    """What a rank is told by its environment."""
    flags = base.get("XLA_FLAGS", "")
    if THREADS_FLAG not in flags:  # ranks share the processor: one thread each computes
        flags = f"{flags} {THREADS_FLAG}=false".strip()
    return {
        **base,
        "XLA_FLAGS": flags,
        "RRFP_COORDINATOR": address,
        "RRFP_PROCESSES": str(count),
        "RRFP_RANK": str(rank),
        "RRFP_FOLDER": str(folder),
        token.NAME: secret,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def _diagnosed(supervisor: Supervisor, folder: RunFolder, discards: Collection[int]) -> RunEnd:
    """How the attempt went; sees to the folder, and keeps the diagnosis there if anything was wrong."""
    reports = read_all(folder.path)
    for process in supervisor.ranks:
        end = process.end
        end.report = reports.get(process.rank) or end.report
        end.recording = recording_of(folder.path, process.rank)
        end.log_tail = tuple(process.tail)
    ends = [process.end for process in supervisor.ranks]
    found = diagnose(ends, interrupted=supervisor.interrupted, stall=supervisor.stall)
    if not folder.has_begun and found.status in discards:
        folder.discard()
    else:
        with suppress(OSError):  # such as a disk that can only be read by now
            folder.begin()
    if found.status == DONE:
        with suppress(OSError):
            remove_answers(folder.path)
    return found


def _furthest_step(folder: Path, count: int) -> int:
    """The furthest training step that a rank has begun; NO_STEP if there is none."""
    recordings = (recording_of(folder, rank) for rank in range(count))
    steps = (recording.training_step for recording in recordings if recording is not None)
    return max((step for step in steps if step is not None), default=NO_STEP)


def _say_end(status: int, message: str, folder: RunFolder) -> None:
    """Print and keep the diagnosis of the last attempt, if anything was wrong."""
    if status == DONE:
        return
    if folder.path.exists():
        _keep(message, folder.path)
        message += f"\nlogs: {shown_path(folder.path)}/rank-*.log"
    elif status == INTERRUPTED:
        message += "\nnothing is lost: the same command starts it again"
    warn(message)


def _keep(message: str, folder: Path) -> None:
    text = f"{message}\n"
    with suppress(OSError):  # a full disk, which may be what it tells of
        (folder / "diagnosis.txt").write_text(text, encoding="utf-8", errors="backslashreplace")


def _signals_within(seconds: float, signals: Signals) -> Collection[int]:
    """Wait; those that came and end the run, upon which this returns at once."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([signals], [], [], left)[0] and (came := {*signals.take()} - {ASKS_WHY}):
            return came
    return ()
