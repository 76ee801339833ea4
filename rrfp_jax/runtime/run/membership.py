"""Who takes part in a run, who is gone, and why: a machine without socket, clock or thread.

Signs of life, messages, closed connections, ticks and requests go in, each with the time; messages to send
come out. The rules:

- The first reason for which a process is gone stays, but its own word on its failure explains more.
- A process that stood still itself, as by Ctrl-Z of all, judges nobody by the silence before.
- A process that lost several others, and all of them without a word, is itself the one that is cut off.
- After its own goodbye or failure a process says and judges nothing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

from msgspec import Struct

from rrfp_jax.errors import PeerLost

GRACE_SECONDS = 4.0
"""How long the main thread may take to notice by itself that a process is gone."""

SAMPLES = 32
"""The quickest of so many latest round trips counts; older ones may have drifted."""


class Beat(Struct, frozen=True, array_like=True):
    """The sender lives; rank 0 answers with its time."""

    sent: float  # by the sender's `perf_counter`, in seconds, as are all times here


class Echo(Struct, frozen=True, array_like=True):
    """Rank 0's answer: the time at which the beat was sent, and rank 0's own."""

    sent: float
    theirs: float


class Goodbye(Struct, frozen=True, array_like=True):
    """The sender has done its part."""


class Failed(Struct, frozen=True, array_like=True):
    """The sender ends: by whose fault, and why."""

    culprit: int
    sentence: str


Said: TypeAlias = Beat | Echo | Goodbye | Failed
Send: TypeAlias = tuple[Collection[int], Said]
"""A message to send to these ranks."""


MOST_TELLING = ("failed", "lost", "left")


@dataclass(frozen=True)
class Gone:
    """Why a process takes no further part: it `left` in good order, `failed` and said so, or is `lost`."""

    how: Literal["failed", "lost", "left"]
    culprit: int  # the rank whose trouble this is
    sentence: str
    since: float


class PeerClock:
    """Rank 0's clock, from round trips; known to within half of one, as in NTP."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)  # round trip, offset
        # What to add to a time of this process, and how wrong that may be (s); other threads read both.
        self.offset = self.precision = 0.0

    def sample(self, sent: float, theirs: float, back: float) -> None:
        """Note one round trip: `theirs` is on rank 0's clock, the other times on this process's."""
        self._samples.append((back - sent, theirs - (sent + back) / 2))
        round_trip, self.offset = min(self._samples)
        self.precision = round_trip / 2

    @property
    def samples(self) -> int:
        """How many round trips are known, at most `SAMPLES`."""
        return len(self._samples)


class Membership:
    """What one process knows of the others (s). One thread feeds it, any may look."""

    def __init__(self, rank: int, others: Collection[int], now: float, silence: float = inf) -> None:
        self.rank, self.others, self.silence = rank, others, silence
        self.gone: Mapping[int, Gone] = {}
        self.clock = PeerClock()
        self.stages: Sequence[str] = [""] * (1 + max([rank, *others]))
        self._heard = dict.fromkeys(others, now)
        self._ticked = now
        self._ended = False

    def heard(self, rank: int, now: float) -> None:
        """Note a sign of life: bytes have come, whatever they say."""
        self._heard[rank] = now

    def received(self, rank: int, said: Said, now: float) -> Sequence[Send]:
        """Take in what a process says of itself."""
        match said:
            case Beat(sent) if self.rank == 0:
                return [([rank], Echo(sent, now))]
            case Echo(sent, theirs) if rank == 0:
                self.clock.sample(sent, theirs, now)
            case Goodbye():
                self._note(rank, Gone("left", rank, "has ended", now))
            case Failed(culprit, sentence):
                self._note(rank, Gone("failed", culprit, sentence, now))
        return ()

    def closed(self, rank: int, reason: str, now: float) -> None:
        """Nothing more can come from a process: it has ended, is cut off, or sent nonsense."""
        self._note(rank, Gone("lost", rank, f"{self.describe(rank)} {reason}", now))

    def tick(self, now: float) -> Sequence[Send]:
        """Judge silence and show a sign of life; call often, after everything that has come was taken in."""
        stood_still, self._ticked = now - self._ticked > self.silence / 2, now
        for rank, heard in self._heard.items():
            if stood_still:
                self._heard[rank] = now
            elif now - heard > self.silence:
                reason = f"has not been heard from for {now - heard:.0f} s: frozen or cut off"
                self.closed(rank, reason, now)
        return self._to_all(Beat(now))  # also to those given up: one that goes on must hear who is there

    def end(self, word: Goodbye | Failed) -> Sequence[Send]:
        """Tell the others that this process ends, and say nothing more."""
        sends = self._to_all(word)
        self._ended = True
        return sends

    def overdue(self, now: float) -> Gone | None:
        """For whom this process must end now, because its main thread has not noticed; None for nobody.

        A process that is cut off is not waited for: JAX would abort it.
        """
        if self._ended:
            return None
        at_once = self.is_cut_off
        late = (one for one in self.gone.values() if at_once or now - one.since > GRACE_SECONDS)
        return next((one for one in late if one.how != "left"), None)

    def describe(self, rank: int) -> str:
        """A rank as messages name it: "rank 2 (stage 2)"."""
        return f"rank {rank} ({self.stages[rank]})" if self.stages[rank] else f"rank {rank}"

    def require(self, needed: Collection[int], known: Mapping[int, Gone] | None = None) -> None:
        """Raise PeerLost for the most telling of processes that are gone: one that failed, else one lost.

        With `known`, those who were gone before the mailbox was pumped: of a process that left, something
        that the watchdog has read just now may not have been handled yet.
        """
        if not (known := self.gone if known is None else known):
            return
        gone = [one for rank, one in sorted(known.items()) if rank in needed]
        if (one := min(gone, key=lambda one: MOST_TELLING.index(one.how), default=None)) is None:
            return
        sentence = one.sentence
        if one.how == "left":
            sentence = f"{self.describe(one.culprit)} has ended while this process still needs it"
        raise PeerLost(sentence, one.culprit)

    def require_all(self) -> None:
        """Raise if any process is gone; see `require`."""
        self.require(self.others)

    @property
    def trouble(self) -> Gone | None:
        """The most telling of those who did not leave in good order, through no fault of this process."""
        gone = [one for one in self.gone.values() if one.how != "left" and one.culprit in self.others]
        return min(gone, key=lambda one: (one.how == "lost", one.since), default=None)

    @property
    def all_gone(self) -> bool:
        """Whether no other process takes part any more."""
        return len(self.gone) == len(self.others)

    @property
    def is_cut_off(self) -> bool:
        """Whether all other processes, of several, are lost and not one said why."""
        return 1 < len(self.others) == sum(one.how == "lost" for one in self.gone.values())

    def _note(self, rank: int, gone: Gone) -> None:
        known = self.gone.get(rank)
        if known is None or (gone.how == "failed" and known.how != "failed"):
            self.gone = {**self.gone, rank: gone}

    def _to_all(self, said: Said) -> Sequence[Send]:
        return () if self._ended else [(self.others, said)]
