"""What is seen of one rank of a living run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rrfp_jax.core.tasks import Direction, Input
from rrfp_jax.runtime.lifecycle.testimony import Testimony
from rrfp_jax.runtime.processes.recording import RecordedDispatch, Recording
from rrfp_jax.runtime.processes.round_board import ARRIVED, RecordedRound
from rrfp_jax.runtime.processes.stacks import LOADER, Frame, Thread

State: TypeAlias = Literal["answers", "silent", "stopped", "gone"]


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What is seen of a rank.

    Attributes:
        rank: of the process.
        state: whether it answers; if it does not, it may be stopped (SIGSTOP), or have ended.
        now: when it was looked at, in the seconds of `time.time()`.
        recording: its flight recorder.
        testimony: its answer; None if there is none.
        threads: where they are, by its answer or dumped without it; none if unknown.
    """

    rank: int
    state: State
    now: float
    recording: Recording
    testimony: Testimony | None = None
    threads: Sequence[Thread] = ()

    @property
    def name(self) -> str:
        """Rank and stages: "rank 2 (stage 2)"."""
        stages = self.recording.stages
        return f"rank {self.rank} ({stages})" if stages else f"rank {self.rank}"

    @property
    def stages(self) -> str:
        """Its stages, alike for all their replicas."""
        return self.recording.stages.partition(" of replica ")[0]

    @property
    def round(self) -> RecordedRound | None:
        """The present round of tasks, or the latest."""
        return self.recording.round

    @property
    def waiting(self) -> Sequence[str]:
        """What its main thread waits for."""
        return () if self.testimony is None else self.testimony.waiting

    @property
    def place(self) -> str:
        """What it waits for, without since when: equal on ranks that are at the same point."""
        return self.waiting[0].rpartition(", since")[0] if self.waiting else ""

    @property
    def users(self) -> Frame | None:
        """The user's line that it is in: its main thread, or another one for which that waits."""
        threads = sorted(filter(self._may_wait_for, self.threads), key=lambda thread: not thread.is_main)
        return next((thread.users for thread in threads if thread.users is not None), None)

    def _may_wait_for(self, thread: Thread) -> bool:
        """Whether what a thread does may hold up the main one, or is that; of dumped ones nobody knows."""
        if thread.is_main or self.testimony is None:
            return True
        if thread.name == LOADER:  # it loads ahead
            return self.place.startswith("the data")
        return not thread.is_users_own

    @property
    def where(self) -> str:
        """Where its main thread is, in words: its latest call, and the latest that is no library's."""
        frames = self._main_frames
        if not frames:
            return ""
        caller = next((frame for frame in frames if frame.whose != "library"), frames[0])
        return str(frames[0]) if caller == frames[0] else f"{frames[0]}, called by {caller}"

    @property
    def awaits_device(self) -> bool:
        """Whether it waits for what devices compute outside of tasks, perhaps with those of other ranks."""
        return any(frame.function == "await_ready" and frame.whose == "ours" for frame in self._main_frames)

    @property
    def _main_frames(self) -> Sequence[Frame]:
        return next((thread.frames for thread in self.threads if thread.is_main), ())

    @property
    def listens(self) -> bool:
        """Whether it waits for others, and so takes in what comes."""
        return self.state == "answers" and bool(self.waiting) and self.users is None

    @property
    def is_busy(self) -> bool:
        """Whether its main thread does something that is neither a wait nor the user's code."""
        return self.state == "answers" and not self.waiting and self.users is None

    @property
    def running(self) -> Sequence[RecordedDispatch]:
        """The tasks on its devices, the oldest first, as far as it still knows them."""
        if self.round is None:
            return []
        return [entry for entry in self.recording.last if entry.position > self.round.ended]

    @property
    def lacking(self) -> Sequence[tuple[int, Input]]:
        """Stage replica and input of what has not come in this round, forwards first."""
        found: list[tuple[int, Input]] = []
        round = self.round
        if round is None:
            return found
        directions = [Direction.FORWARD] + ([] if round.forward_only else [Direction.BACKWARD])
        for direction in directions:
            for microbatch in range(round.microbatches):
                for stage_replica in round.own:
                    for chunk in range(round.placement.chunks):
                        wanted = Input(direction, chunk, microbatch)
                        needed = round.placement.source(stage_replica % round.placement.stages, wanted)
                        if needed is not None and not round.got(stage_replica, wanted) & ARRIVED:
                            found.append((stage_replica, wanted))
        return found
