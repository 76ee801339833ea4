"""Starts the ranks of a run on this machine, watches them, says how it went, and starts them again."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, FAILED, INTERRUPTED, REFUSED, TrainingError
from rrfp_jax.files import shown_path
from rrfp_jax.launcher.end import RunEnd, diagnose, render_end
from rrfp_jax.launcher.folders import RunFolder, remove_answers, set_attempt_aside
from rrfp_jax.launcher.restarts import NO_STEP, Elastic, after_attempt
from rrfp_jax.launcher.supervisor import ASKS_WHY, PASSED_ON, Patience, Supervisor
from rrfp_jax.printing import warn
from rrfp_jax.runtime.run import token
from rrfp_jax.runtime.run.coordinator import Coordinator, reserved_port
from rrfp_jax.runtime.run.exits import read_all
from rrfp_jax.runtime.run.place import gpu_environment
from rrfp_jax.runtime.run.recorder import recorded
from rrfp_jax.runtime.run.signals import Signals, collected_signals
from rrfp_jax.typed import NAME, typed_command

COMMAND = "rrfp launch"
"""That messages begin with."""

THREADS_FLAG = "--xla_cpu_multi_thread_eigen"


@dataclass(frozen=True)
class Launch:
    """A command run once per rank.

    Each rank finds RRFP_COORDINATOR, RRFP_PROCESSES, RRFP_RANK, RRFP_FOLDER, RRFP_TOKEN, RRFP_RESTARTS and
    RRFP_COMMAND in its environment, and the launcher, not rank 0, sees to the coordination service. What they
    print goes to `rank-<r>.log` and, with the rank before each line, to stdout. None of them, nor of their
    groups, is left at the end. If they fail they are started again, as `restarts.py` has it; what the attempt
    before has left is then in `attempt-<number>/`. A run that is elastic may go on with fewer ranks.
    """

    argv: Sequence[str]
    replicas: Elastic  # and their ranks; it may go on without those that were lost, until they are replaced
    folder: RunFolder  # brought to its place at the end, unless the status is one of `discards`
    patience: Patience
    env: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)  # before the above is added
    max_restarts: int = 0
    discards: Collection[int] = (REFUSED, INTERRUPTED)  # left nothing to keep if the run has not begun

    def run(self) -> int:
        """Start the ranks, and wait for their end; from the main thread, for it handles signals meanwhile.

        Returns:
            The exit status of the last attempt: 0 done, 1 failed, 2 refused by all ranks, 130 interrupted. If
            SIGTERM ended it, and all that was trained could be saved afterwards, 0.

        Raises:
            TrainingError: the ranks, or the coordinator, cannot be started.
        """
        status: int = FAILED
        came: Collection[int] = ()
        with collected_signals([*PASSED_ON, ASKS_WHY], wakes=[signal.SIGCHLD]) as signals:
            try:
                status, came = self._attempts(signals)
            finally:
                saved = self.replicas.end(status, self._say)
        return DONE if saved and status == INTERRUPTED and {*came} == {signal.SIGTERM} else status

    def _attempts(self, signals: Signals) -> tuple[int, Collection[int]]:
        """Make one attempt after the other; the status of the last, and the signals that came."""
        reached: list[int] = []
        before = 0  # restarts before those attempts, up to the latest that has handed over
        while True:
            supervisor = self._attempt(signals, restarts=before + len(reached))
            if supervisor.handed_over and not supervisor.passed_on:
                self._set_aside(self.replicas.handed_over())
                before, reached = before + len(reached), []
                continue
            end = self._end_of(supervisor)
            steps = (rank.recording.training_step for rank in end.ranks if rank.recording is not None)
            reached.append(max((step for step in steps if step is not None), default=NO_STEP))
            text = f"{COMMAND}: {render_end(end)}"
            most = 0 if supervisor.passed_on else self.max_restarts
            wait, reason = after_attempt(end.status, reached, most, self.patience.back_off, before)
            if wait is not None:
                follows = f"restart {before + len(reached)} of {most} in {wait:g} s"
                follows += self.replicas.lost(end.lost, reached[-1] > NO_STEP, wait)
            elif end.kind == "refused" and self.replicas.refuses_fewer():
                reached.pop()  # that was no failure
                follows = f"not with fewer replicas, then: {self.replicas.handed_over()}"
            else:
                self._say_end(end.status, "\n".join(filter(None, [text, reason])))
                return end.status, supervisor.passed_on
            self._keep(text)
            self._set_aside(f"{render_end(end).splitlines()[0]}; {follows}")
            if came := _signals_within(wait or 0.0, signals):
                self._say("interrupted")
                return INTERRUPTED, came

    def _attempt(self, signals: Signals, restarts: int) -> Supervisor:
        """Start the ranks, each on its slot of the machine, and watch them to their end."""
        slots, memory, where = self.replicas.slots, self.replicas.memory, self.folder.path
        with ExitStack() as stack:
            try:
                address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
                self.replicas.begin()
                coordinator = Coordinator(address, len(slots), linger_seconds=0.0)  # as they die with us
                stack.callback(coordinator.close)
                supervisor = Supervisor(
                    self.patience, self.folder, signals, self._say, len(slots), memory is not None
                )
                stack.callback(supervisor.close)
                told = {
                    **_one_thread(self.env),
                    NAME: typed_command(self.env),
                    "RRFP_COORDINATOR": address,
                    "RRFP_PROCESSES": str(len(slots)),
                    "RRFP_FOLDER": str(where),
                    "RRFP_RESTARTS": str(restarts),
                    token.NAME: token.new_token(),
                    "PYTHONUNBUFFERED": "1",
                    "PYTHONFAULTHANDLER": "1",
                    **({} if memory is None else memory.environment),
                }
                for rank, slot in enumerate(slots):
                    own = {"RRFP_RANK": str(rank), **gpu_environment(told, slot, self.replicas.most)}
                    supervisor.start(rank, self.argv, told | own, where)
            except (OSError, RuntimeError) as error:
                raise TrainingError(f"cannot start the ranks: {error}") from None
            supervisor.watch(lambda: self.replicas.look(supervisor.say))
        return supervisor

    def _end_of(self, supervisor: Supervisor) -> RunEnd:
        """How the attempt went; sees to the folder."""
        reports, recordings = read_all(self.folder.path), recorded(self.folder.path)
        ends = [process.end for process in supervisor.ranks]
        for end in ends:
            end.report = reports.get(end.rank) or end.report
            end.recording = recordings.get(end.rank)
        found = diagnose(ends, interrupted=supervisor.interrupted, stall=supervisor.monitor.stall)
        if not self.folder.has_begun and found.status in self.discards:
            self.folder.discard()
        else:
            with suppress(OSError):  # such as a disk that can only be read by now
                if earlier := self.folder.begin():
                    self._say(f"an earlier run is kept as {earlier}")
        if found.status == DONE:
            with suppress(OSError):
                remove_answers(self.folder.path)
        return found

    def _say(self, text: str) -> None:
        warn(f"{COMMAND}: {text}")

    def _say_end(self, status: int, message: str) -> None:
        """Print and keep the diagnosis of the last attempt, if anything was wrong."""
        if status == DONE:
            return
        if self.folder.path.exists():
            self._keep(message)
            message += f"\nlogs: {shown_path(self.folder.path)}/rank-*.log"
        elif status == INTERRUPTED:
            message += "\nnothing is lost: the same command starts it again"
        warn(message)

    def _keep(self, message: str) -> None:
        with suppress(OSError):  # a full disk, which may be what it tells of
            path = self.folder.path / "diagnosis.txt"
            path.write_text(f"{message}\n", encoding="utf-8", errors="backslashreplace")

    def _set_aside(self, why: str) -> None:
        """Say in one line why an attempt follows, and make room for it."""
        try:
            aside = shown_path(set_attempt_aside(self.folder.path))
        except OSError as error:
            reason = error.strerror if self.folder.exists else f"{self.folder.final} was removed"
            raise TrainingError(f"{why}\nand cannot be started again: {reason}") from None
        self._say(f"{why}; see {aside}/")


def _one_thread(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Ranks share the processor: one thread each computes, unless somebody has said something else."""
    flags = environment.get("XLA_FLAGS", "")
    if THREADS_FLAG in flags:
        return environment
    return {**environment, "XLA_FLAGS": f"{flags} {THREADS_FLAG}=false".strip()}


def _signals_within(seconds: float, signals: Signals) -> Collection[int]:
    """Wait; those that came and end the run, upon which this returns at once."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([signals], [], [], left)[0] and (came := {*signals.take()} - {ASKS_WHY}):
            return came
    return ()
