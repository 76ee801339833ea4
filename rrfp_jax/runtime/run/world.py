"""The processes of a run, as one of them sees them, and what all of them do together.

- `membership.py`: who there is, and who is gone;
- `mailbox.py`: messages between the processes, signs of life, and rank 0's clock;
- `recorder.py`: what this process last did;
- `waits.py`: what the main thread waits for, and how long;
- `signals.py`: whether the run is to stop.
"""

from __future__ import annotations

import os
import platform
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from rrfp_jax.errors import Disagreement, TrainingError, UsageError
from rrfp_jax.fields import without_addresses
from rrfp_jax.runtime.run.mailbox import Mailbox, Message, pieces, whole
from rrfp_jax.runtime.run.membership import Beat, Membership
from rrfp_jax.runtime.run.recorder import FlightRecorder
from rrfp_jax.runtime.run.signals import Stop, StopReason
from rrfp_jax.runtime.run.token import SealedStore
from rrfp_jax.runtime.run.waits import LONGEST_SLEEP_SECONDS, ForAnswer, ForDevices, ForGather, Waits, pause

if TYPE_CHECKING:
    import jax

START_SECONDS = 3600.0
"""Limit for all processes to have compiled: one may have much more to compile than another."""


CLOCK_SECONDS = 10.0
"""Limit for rank 0 to tell its time."""

CLOCK_ROUNDS = 10
"""Round trips to rank 0 at the start, to know its clock."""


class Gathered(Message, frozen=True):
    """A piece of a rank's value for a gather; pieces of one rank come in order."""

    number: int
    what: str
    piece: bytes
    is_last: bool


class Compared(Message, frozen=True):
    """A rank's value of something that must be equal everywhere."""

    number: int
    what: str
    value: dict[str, str]  # by name; one that stands alone has none


class World:
    """The processes of this run. All call `gather` and `agree` in the same order.

    A process that is alone has no mailbox and no store, one without a launcher no folder, in which that
    collects what ranks leave.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        mailbox: Mailbox | None = None,
        folder: Path | None = None,
        recorder: FlightRecorder | None = None,
        store: SealedStore | None = None,
    ) -> None:
        self.rank, self.size, self.mailbox, self.store, self.folder = rank, size, mailbox, store, folder
        # The descriptor still leads to the folder when that has been renamed.
        self.folder_descriptor = None if folder is None else os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.recorder = recorder or FlightRecorder(None, rank, "")
        self.stop = Stop()
        self.at_last: list[Callable[[], None]] = []  # done before a process ends that ends in good order
        self.hosts: Sequence[str] = [platform.node()] * size  # of all ranks, once they have met
        self.says_goodbye = False  # it is taking its leave of the others, and may wait for them
        self.ending = threading.Lock()  # of the one thread that ends the process
        others = [other for other in range(size) if other != rank]
        self.membership = mailbox.membership if mailbox else Membership(rank, others, perf_counter())
        self.describe = self.membership.describe
        self.waits = Waits(rank, self.describe)
        self.waits_for = self.waits.waits_for
        self._rounds = self.gathers = self._comparisons = 0
        self._values: dict[int, dict[int, tuple[str, Any, int]]] = {}  # by gather and rank
        self._pieces = defaultdict[tuple[int, int], list[bytes]](list)  # by rank and gather
        self._compared: dict[int, dict[int, Compared]] = {}
        if mailbox is not None:
            mailbox.on(Gathered, self._on_gathered)
            mailbox.on(Compared, self._on_compared)

    def has_folder(self, folder: Path) -> bool:
        """Whether a folder is the one in which the launcher collects what ranks leave."""
        own = self.folder_descriptor
        with suppress(OSError):
            return own is not None and os.path.samestat(os.fstat(own), folder.stat())
        return False

    def run_stages(self, stages: Sequence[str], own: Collection[int] = ()) -> None:
        """Say which stages each rank runs, as text, and this one's numbers, once a mesh has been laid out."""
        self.membership.stages = stages
        self.recorder.runs(stages[self.rank], own)

    def next_round(self) -> int:
        """A number for the next run of tasks, equal on all processes, which all run the same."""
        self._rounds += 1
        return self._rounds

    @property
    def clock(self) -> tuple[float, float]:
        """What to add to a `perf_counter` time of this process to have it on rank 0's, and how wrong (s)."""
        clock = self.membership.clock
        return clock.offset, clock.precision

    def learn_clock(self, limit: float | None = None) -> None:
        """Learn rank 0's clock from a few quick round trips; all processes together, as `gather` waits."""
        assert self.mailbox is not None
        if self.rank > 0:
            with self.waits_for(ForAnswer(what="the time", ranks=(0,)), CLOCK_SECONDS) as wait:
                for wanted in range(1, CLOCK_ROUNDS + 1):
                    self.mailbox.post(0, Beat(perf_counter()))
                    while len(self.membership.clock.samples) < wanted:
                        self.membership.require([0])
                        wait.check()
                        self.mailbox.sleep(wait.shortened(LONGEST_SLEEP_SECONDS))
                        self.mailbox.pump()
        self.gather("the clocks", None, limit)  # so that rank 0 is there to answer

    def gather(self, what: str, value: Any, limit: float | None = None) -> list[Any]:
        """Every rank's value, of plain data, in rank order; waits for all, up to a limit in seconds.

        Raises PeerLost for a rank that is gone, Disagreement if another rank is at something else, and
        TrainingError at the limit, which is `waits.stall_seconds` unless it is given.
        """
        number, self.gathers = self.gathers, self.gathers + 1
        values = self._values.setdefault(number, {})
        requested = int(self.stop.requested)
        values[self.rank] = (what, value, requested)
        if self.mailbox is not None:
            parts = pieces([value, requested])
            for index, piece in enumerate(parts, 1):
                self.mailbox.post_all(Gathered(number, what, piece, index == len(parts)))
            self._await(self.mailbox, what, values, limit)
        del self._values[number]
        told = [values[rank] for rank in range(self.size)]
        for rank, (theirs, _, _) in enumerate(told):
            if theirs != what:
                raise self._apart(self.rank, what, rank, theirs)
        self.stop.agreed = max(self.stop.agreed, StopReason(max(wanted for _, _, wanted in told)))
        return [own for _, own, _ in told]

    def decide(self, what: str, find: Callable[[], Any], limit: float | None = None) -> Any:
        """What rank 0 finds, as plain data, told to all, which ask together; raises as `gather` does.

        A UsageError that rank 0 finds instead is raised by all.
        """
        told, failure = None, None
        if self.rank == 0:
            try:
                told = [find(), ""]
            except UsageError as error:
                told, failure = [None, str(error)], error
        found, refusal = self.gather(what, told, limit)[0]
        if refusal:
            raise failure or UsageError(refusal)
        return found

    def agree(self, what: str, value: str | Mapping[str, str]) -> None:
        """Compare a value, or several by name, with the other ranks' without waiting for theirs.

        Every rank raises Disagreement, now or whenever it handles messages next, naming the odd one.
        """
        if self.mailbox is not None:
            number, self._comparisons = self._comparisons, self._comparisons + 1
            values = {"": value} if isinstance(value, str) else value
            message = Compared(number, what, {name: without_addresses(own) for name, own in values.items()})
            self.mailbox.post_all(message)
            self._on_compared(self.rank, message)

    def _apart(self, rank: int, what: str, odd: int, theirs: str) -> Disagreement:
        return Disagreement(
            f"{self.describe(rank)} is at {what}, {self.describe(odd)} at {theirs}: every process must run "
            f"the same program, with the same calls of a Trainer and the same arguments",
            odd,
        )

    def await_ready(self, what: str, arrays: Sequence[jax.Array], limit: float | None = None) -> None:
        """Wait for what this process's devices, or those of several processes together, compute.

        Raises PeerLost if a process is gone, TrainingError if the computation failed, or at the limit.
        """
        import jax  # here: the launcher reads this package without JAX

        with self.waits_for(ForDevices(what=what), limit) as wait:
            try:
                for array in arrays:
                    while not array.is_ready():  # type: ignore[attr-defined]
                        wait.check()
                        seconds = wait.shortened(min(pause(wait.waited), LONGEST_SLEEP_SECONDS))
                        if self.mailbox is None:
                            sleep(seconds)
                        else:
                            self.mailbox.pump()
                            self.membership.require_all()
                            self.mailbox.sleep(seconds)
                jax.block_until_ready(arrays)
            except jax.errors.JaxRuntimeError as error:
                if self.mailbox is not None:
                    self.mailbox.hear_of_losses()
                raise TrainingError(f"{what}: {error}") from error

    def _await(self, mailbox: Mailbox, what: str, values: Mapping[int, Any], limit: float | None) -> None:

        def missing() -> tuple[int, ...]:
            return tuple(rank for rank in range(self.size) if rank not in values)

        def awaited() -> Sequence[ForGather]:
            return [ForGather(number=self.gathers, what=what, ranks=missing())]

        with self.waits_for(awaited, limit) as wait:
            while True:
                known = self.membership.gone
                mailbox.pump()
                if not (ranks := missing()):
                    return
                for rank, ahead in self._compared.get(self._comparisons, {}).items():
                    if rank in ranks:  # as its messages come in order, it will not come to this
                        raise self._apart(self.rank, what, rank, ahead.what)
                self.membership.require(ranks, known)
                wait.check()
                mailbox.sleep(wait.shortened(LONGEST_SLEEP_SECONDS))

    def _on_gathered(self, rank: int, message: Gathered) -> None:
        self._pieces[rank, message.number].append(message.piece)
        if message.is_last:
            value, requested = whole(self._pieces.pop((rank, message.number)))
            self._values.setdefault(message.number, {})[rank] = (message.what, value, requested)

    def _on_compared(self, rank: int, message: Compared) -> None:
        known = self._compared.setdefault(message.number, {})
        known[rank] = message
        if len(known) < self.size:
            return
        del self._compared[message.number]
        texts = {rank: repr(one) for rank, one in sorted(known.items())}
        usual = Counter(texts.values()).most_common(1)[0][0]
        if (odd := next((rank for rank, text in texts.items() if text != usual), None)) is None:
            return
        value = known[odd].value
        other, elsewhere = next((rank, known[rank].value) for rank, text in texts.items() if text == usual)
        if known[odd].what != known[other].what:
            raise self._apart(other, known[other].what, odd, known[odd].what)
        name = next((name for name in [*value, *elsewhere] if value.get(name) != elsewhere.get(name)), "")
        raise Disagreement(
            f"{known[odd].what}{name and ': '}{name} is {value.get(name)} on {self.describe(odd)}, elsewhere "
            f"it is {elsewhere.get(name)}: every process must run the same program on the same data",
            odd,
        )
