"""The processes of a run, as one of them sees them: who they are, what they agree on, what time it is."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from rrfp_jax.errors import Disagreement, TrainingError
from rrfp_jax.runtime.processes.flight_recorder import FlightRecorder
from rrfp_jax.runtime.processes.frames import pieces, whole
from rrfp_jax.runtime.processes.mailbox import Mailbox

START_SECONDS = 3600.0
"""Limit for all processes to have compiled: one may have much more to compile than another."""

CLOCK_SECONDS = 10.0
"""Limit for rank 0 to tell its time."""

CLOCK_ROUNDS = 10
"""Round trips to rank 0 at the start, to know its clock."""

LONGEST_SLEEP_SECONDS = 1.0

READY_SECONDS = 1e-3
"""Pause between looks at what processes compute together."""


class World:
    """The processes of this run.

    Args:
        rank, size: of this process, and how many there are.
        mailbox: to the others; None when alone.
        folder: in which the launcher collects what ranks leave, as it was named at the start; None
            without one.
        recorder: what this process last did.

    Attributes:
        stages: the stages of each rank as text, once a mesh has been laid out.
        stop_requested: this process was asked to stop at a step boundary; set by any thread.
        stop_agreed: some process was, as of the latest gather; equal everywhere at the same point.
        silence_seconds: after so long a silence whoever must answer is given up.
        waiting: what the main thread waits for just now, for whoever has to say so.
        on_leaving: called once this process has left the run in good order, before it ends.
        ending: held, for ever, by the thread that ends this process: main thread or watchdog, never both.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        mailbox: Mailbox | None = None,
        folder: Path | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self.rank, self.size, self.mailbox = rank, size, mailbox
        self.folder = folder
        # The folder may be renamed; a descriptor of it still leads there.
        self.folder_descriptor = None if folder is None else os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.recorder = recorder or FlightRecorder(None, rank, "")
        self.stages: Sequence[str] = [""] * size
        self.stop_requested = self.stop_agreed = False
        self.waiting: Callable[[], Sequence[str]] = tuple
        self.on_leaving: list[Callable[[], None]] = []
        self.ending = threading.Lock()
        self.stall_seconds, self.silence_seconds = 300.0, inf
        self._gathers = self._agreements = self._rounds = 0
        self._gathered: dict[int, dict[int, tuple[str, Any, bool]]] = {}
        self._pieces: dict[tuple[int, int], list[bytes]] = {}
        self._agreed: dict[int, dict[int, tuple[str, Any]]] = {}
        if mailbox is not None:
            mailbox.describe = self.describe
            mailbox.on("gather", self._on_gather)
            mailbox.on("agree", self._on_agree)

    def describe(self, rank: int) -> str:
        """A rank as messages name it: "rank 2 (stage 2)"."""
        return f"rank {rank} ({self.stages[rank]})" if self.stages[rank] else f"rank {rank}"

    def next_round(self) -> int:
        """A number for the next run of tasks, equal on all processes, which all run the same."""
        self._rounds += 1
        return self._rounds

    # Agreement.

    def gather(self, what: str, value: Any, limit: float | None = None) -> list[Any]:
        """Every rank's value, in rank order; waits for all of them.

        Args:
            what: names it in messages; must be equal everywhere.
            value: of plain data.
            limit: on waiting, in seconds; None for `stall_seconds`.

        Raises:
            PeerLost: a rank whose value has not come is gone.
            Disagreement: another rank is at something else.
            TrainingError: it took longer than the limit.
        """
        number, self._gathers = self._gathers, self._gathers + 1
        values = self._gathered.setdefault(number, {})
        stop = self.stop_requested
        values[self.rank] = (what, value, stop)
        if self.mailbox is not None:
            parts = pieces([value, stop])
            for index, piece in enumerate(parts):
                self.mailbox.post_all("gather", number, what, index, len(parts), piece)
            self._await(what, values, self.stall_seconds if limit is None else limit)
        del self._gathered[number]
        for rank, (theirs, _, _) in sorted(values.items()):
            if theirs != what:
                raise Disagreement(
                    f"{self.describe(self.rank)} is at {what}, {self.describe(rank)} at {theirs}: every "
                    f"process must run the same program with the same arguments",
                    rank,
                )
        self.stop_agreed = self.stop_agreed or any(stop for _, _, stop in values.values())
        return [values[rank][1] for rank in range(self.size)]

    def agree(self, what: str, value: str | Mapping[str, str]) -> None:
        """Compare a value with the other ranks' without waiting for theirs.

        Args:
            what: names it in messages.
            value: short text, or several by name, of which messages then tell only one that differs.

        Raises:
            Disagreement: now, or whenever messages are handled next; on every rank, naming the odd one.
        """
        if self.mailbox is not None:
            number, self._agreements = self._agreements, self._agreements + 1
            self.mailbox.post_all("agree", number, what, value)
            self._on_agree(self.rank, number, what, value)

    def _on_gather(self, rank: int, number: int, what: str, index: int, count: int, piece: bytes) -> None:
        parts = self._pieces.setdefault((rank, number), [])
        parts.append(piece)  # messages of a rank come in order
        if index == count - 1:
            del self._pieces[rank, number]
            value, stop = whole(parts)
            self._gathered.setdefault(number, {})[rank] = (what, value, stop)

    def _on_agree(self, rank: int, number: int, what: str, value: Any) -> None:
        known = self._agreed.setdefault(number, {})
        known[rank] = (what, value)
        if len(known) < self.size:
            return
        del self._agreed[number]
        counted = Counter(repr(known[r]) for r in range(self.size))
        usual = counted.most_common(1)[0][0]
        odd = [r for r in range(self.size) if repr(known[r]) != usual]
        if odd:
            what, value = known[odd[0]]
            elsewhere = next(known[r] for r in range(self.size) if r not in odd)[1]
            if isinstance(value, Mapping) and isinstance(elsewhere, Mapping):
                name = next(n for n in [*value, *elsewhere] if value.get(n) != elsewhere.get(n))
                what, value, elsewhere = f"{what}: {name}", value.get(name), elsewhere.get(name)
            raise Disagreement(
                f"{what} is {value} on {self.describe(odd[0])}, elsewhere it is {elsewhere}: every process "
                f"must run the same program on the same data",
                odd[0],
            )

    def _await(self, what: str, values: Mapping[int, Any], limit: float) -> None:
        assert self.mailbox is not None
        began = perf_counter()

        def missing() -> list[int]:
            return [rank for rank in range(self.size) if rank not in values]

        def waiting() -> list[str]:
            who = ", ".join(self.describe(rank) for rank in missing())
            return [f"{what} from {who}, since {perf_counter() - began:.1f} s"]

        self.waiting, before = waiting, self.waiting
        known = self.mailbox.gone
        self.mailbox.pump()
        while awaited := missing():
            self.mailbox.require(awaited, known)
            if perf_counter() - began > limit:
                raise TrainingError(f"{self.describe(self.rank)} gives up waiting for {waiting()[0]}")
            self.mailbox.sleep(LONGEST_SLEEP_SECONDS)
            known = self.mailbox.gone
            self.mailbox.pump()
        self.waiting = before

    def await_ready(self, what: str, arrays: Sequence[jax.Array]) -> None:
        """Wait for what several processes compute together.

        Args:
            what: it is, for messages.
            arrays: that are being computed.

        Raises:
            PeerLost: a process is gone.
            TrainingError: the computation failed, or nothing came of it for `stall_seconds`.
        """
        began = perf_counter()
        self.waiting, before = lambda: [f"{what}, since {perf_counter() - began:.1f} s"], self.waiting
        try:
            while self.mailbox is not None and not all(map(_is_ready, arrays)):
                self.mailbox.pump()
                self.mailbox.require(self.mailbox.ranks)
                if perf_counter() - began > self.stall_seconds:
                    me = self.describe(self.rank)
                    raise TrainingError(f"{me} gives up waiting for {self.waiting()[0]}")
                self.mailbox.sleep(READY_SECONDS)
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError as error:
            if self.mailbox is not None:
                self.mailbox.hear_of_losses()
            raise TrainingError(f"{what}: {error}") from error
        self.waiting = before

    # Time.

    @property
    def clock(self) -> tuple[float, float]:
        """What to add to a `perf_counter` time of this process to have it on rank 0's, and how wrong (s)."""
        if self.mailbox is None:
            return 0.0, 0.0
        return self.mailbox.clock.offset, self.mailbox.clock.precision

    def set_clock(self) -> None:
        """Learn rank 0's clock from a few quick round trips; all processes together."""
        if self.mailbox is not None and self.rank > 0:
            deadline = perf_counter() + CLOCK_SECONDS
            for wanted in range(1, CLOCK_ROUNDS + 1):
                self.mailbox.post(0, "beat", perf_counter())
                while self.mailbox.clock.samples < wanted:
                    self.mailbox.require([0])
                    if perf_counter() > deadline:
                        raise TrainingError(f"{self.describe(self.rank)}: rank 0 does not tell its time")
                    self.mailbox.sleep(LONGEST_SLEEP_SECONDS)
                    self.mailbox.pump()
        self.gather("the clocks", None)  # so that rank 0 is there to answer


def _is_ready(array: jax.Array) -> bool:
    return bool(array.is_ready())  # type: ignore[attr-defined]
