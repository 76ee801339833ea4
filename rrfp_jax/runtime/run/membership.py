"""Who takes part in a run, who is gone, and why: a machine without socket, clock or thread.

Signs of life, messages, closed connections, ticks and requests go in, each with the time; messages to send
come out. The rules:

- The first reason for which a process is gone stays, but its own word on its failure explains more.
- A process that stood still itself, as by Ctrl-Z of all, judges nobody by the silence before.
- Whoever is silent for half of the limit is told of. So at the limit all know who does not hear whom, and
  blame the rank or the host that all these pairs share, or the link between two that others hear (`blamed`).
- A process that lost several others, and all of them without a word, is itself the one that is cut off.
- A process that lives and is accused of silence says that it is the link.
- After its own goodbye or failure a process says and judges nothing more.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from math import inf
from typing import Literal, NamedTuple, TypeAlias

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


class Silent(Struct, frozen=True, array_like=True):
    """All from whom the sender has heard nothing for half of the limit; nobody, once it has again."""

    ranks: tuple[int, ...]


class Failed(Struct, frozen=True, array_like=True):
    """The sender ends: by whose fault, and why."""

    culprit: int
    sentence: str


Said: TypeAlias = Beat | Echo | Goodbye | Silent | Failed
Send: TypeAlias = tuple[Collection[int], Said]
"""A message to send to these ranks."""


MOST_TELLING = ("failed", "lost", "left")


class Gone(NamedTuple):
    """Why a process takes no further part: it `left` in good order, `failed` and said so, or is `lost`."""

    how: Literal["failed", "lost", "left"]
    culprit: int  # the rank whose trouble this is
    sentence: str
    since: float


Deafness: TypeAlias = tuple[int, int]
"""A rank that does not hear another one, and that one."""

Place: TypeAlias = frozenset[int]
"""Ranks on one host, or one of them."""


class Blame(NamedTuple):
    """Where the trouble is: at these places, or in the `link` between two."""

    places: Sequence[Place]
    link: bool = False


def blamed(pairs: Collection[Deafness], alive: Collection[int], hosts: Collection[Place]) -> Blame:
    """The one place that all pairs share, or the link between two; else several places.

    Args:
        pairs: who does not hear whom; at least one.
        alive: ranks that have been heard from lately.
        hosts: the ranks of each.
    """
    ranks = [frozenset([rank]) for rank in sorted({rank for pair in pairs for rank in pair})]
    for places in (ranks, hosts):
        of = {rank: place for place in places for rank in place}
        ends = [frozenset([of[a], of[b]]) for a, b in pairs]
        shared = frozenset.intersection(*ends)
        # Whether nobody of one place hears, or is heard by, anybody of the other.
        whole = {frozenset(pair) for pair in pairs} == {frozenset(pair) for pair in product(*shared)}
        if min(map(len, ends)) < 2 or (len(shared) == 2 and places is hosts and not whole):
            continue
        if len(shared) == 2:
            deaf = {of[rank] for rank, _ in pairs}
            link = deaf == shared or not frozenset.union(*shared).issuperset(alive)
            return Blame(sorted(shared if link else shared - deaf, key=sorted), link)
        if len(shared) == 1:
            return Blame([*shared])
    return Blame(_cover(pairs))


def _cover(pairs: Collection[Deafness]) -> Sequence[Place]:
    """A few ranks that explain all: those in the most pairs, of two rather who is not heard."""
    found, left = set[int](), set(pairs)
    count, of = Counter[int](), defaultdict[int, list[Deafness]](list)
    for pair in left:
        count.update((*pair, pair[1]))
        of[pair[0]].append(pair)
        of[pair[1]].append(pair)
    while left:
        found.add(worst := max(sorted(count), key=count.__getitem__))
        for pair in left.intersection(of[worst]):
            count.subtract((*pair, pair[1]))
        left.difference_update(of[worst])
    return [frozenset([rank]) for rank in sorted(found)]


class PeerClock:
    """Rank 0's clock, from round trips; known to within half of one, as in NTP."""

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)  # round trip, offset
        # What to add to a time of this process, and how wrong that may be (s); other threads read both.
        self.offset = self.precision = 0.0

    def sample(self, sent: float, theirs: float, back: float) -> None:
        """Note one round trip: `theirs` is on rank 0's clock, the other times on this process's."""
        self.samples.append((back - sent, theirs - (sent + back) / 2))
        round_trip, self.offset = min(self.samples)
        self.precision = round_trip / 2


class Membership:
    """What one process knows of the others (s). One thread feeds it, any may look."""

    def __init__(
        self, rank: int, others: Collection[int], now: float, silence: float = inf, nodes: Sequence[str] = ()
    ) -> None:
        self.rank, self.others, self.silence = rank, others, silence
        self._nodes = nodes if len({*nodes}) > 1 else ()
        self.gone: Mapping[int, Gone] = {}
        self.clock = PeerClock()
        self.stages: Sequence[str] = [""] * (1 + max([rank, *others]))
        self._heard = dict.fromkeys(others, now)
        self._ticked, self._stood_still = now, -inf  # until when
        self._silent: Mapping[int, tuple[int, ...]] = {}  # to whom, by who says so; this process, too
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
            case Silent(ranks):
                self._silent = {**self._silent, rank: ranks}
            case Failed(self.rank, _) if self._is_not_heard_by(rank, now):
                self._note(rank, Gone("failed", rank, self._link([{rank}, {self.rank}]), now))
            case Failed(culprit, sentence):
                self._note(rank, Gone("failed", culprit, sentence, now))
        return ()

    def closed(self, rank: int, reason: str, now: float) -> None:
        """Nothing more can come from a process: it has ended, is cut off, or sent nonsense."""
        self._note(rank, Gone("lost", rank, f"{self.describe(rank)} {reason}", now))

    def tick(self, now: float) -> Sequence[Send]:
        """Judge silence and show a sign of life; call often, after everything that has come was taken in."""
        stood_still, self._ticked = now - self._ticked > self.silence / 2, now
        if stood_still:
            self._stood_still = now
            self._heard = dict.fromkeys(self._heard, now)
        explained = {rank for rank, one in self.gone.items() if one.how != "lost"}
        ages = {rank: now - heard for rank, heard in self._heard.items() if rank not in explained}
        silent = tuple(rank for rank, age in ages.items() if age > self.silence / 2)
        before, self._silent = self._silent.get(self.rank, ()), {**self._silent, self.rank: silent}
        if any(age > self.silence for rank, age in ages.items() if rank not in self.gone):
            self._judge(silent, now)
        # Also to those given up: one that goes on must hear who is there.
        return [*self._to_all(Beat(now)), *(self._to_all(Silent(silent)) if silent != before else ())]

    def quietest(self, now: float) -> float:
        """For how long nothing has come from the most silent of those that are not gone (s)."""
        return max((now - heard for rank, heard in self._heard.items() if rank not in self.gone), default=0.0)

    def in_doubt(self, now: float, quiet: float) -> bool:
        """Whether nothing has come from somebody for so long, or others say so, and none is given up yet."""
        return self.quietest(now) > quiet or any(self._silent.values())

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
        late = (one for one in self.gone.values() if self.is_cut_off or now - one.since > GRACE_SECONDS)
        return next((one for one in late if one.how != "left"), None)

    def describe(self, rank: int) -> str:
        """A rank as messages name it: "rank 2 (stage 2)", with its host if there are several."""
        host = f"host {self._nodes[rank]}" if self._nodes else ""
        more = ", ".join(filter(None, [self.stages[rank], host]))
        return f"rank {rank} ({more})" if more else f"rank {rank}"

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
        bad = [one for one in self.gone.values() if one.how != "left"]
        gone = [one for one in bad if one.how == "lost" or one.culprit in self.others]
        return min(gone, key=lambda one: (one.how == "lost", one.since), default=None)

    @property
    def all_gone(self) -> bool:
        """Whether no other process takes part any more."""
        return len(self.gone) == len(self.others)

    @property
    def is_cut_off(self) -> bool:
        """Whether all other processes, of several, are lost and not one said why."""
        return 1 < len(self.others) == sum(one.how == "lost" for one in self.gone.values())

    def _judge(self, silent: Collection[int], now: float) -> None:
        """Give up whoever is silent, for a reason on which all agree that hear each other."""
        # Somebody may have judged before, or something else have come first.
        told = next((one for one in self.gone.values() if one.how == "failed"), None)
        culprit, sentence = (told.culprit, told.sentence) if told else self._blame(silent)
        for rank in silent:
            self._note(rank, Gone("lost", culprit, sentence, now))

    def _blame(self, silent: Collection[int]) -> tuple[int, str]:
        """Whose trouble it is that these are silent, and in words."""
        here = {self.rank, *self.others} - self.gone.keys()
        pairs = {(a, b) for a, ranks in self._silent.items() if a in here for b in ranks if b in here}
        nodes = {self._nodes[rank] if self._nodes else "" for rank in here}
        hosts = [frozenset(r for r in here if not self._nodes or self._nodes[r] == node) for node in nodes]
        blame = blamed(pairs, here - {*silent}, hosts)
        culprit = min(map(min, blame.places))
        if blame.link:
            return culprit, self._link(blame.places)
        who, unheard = " and ".join(map(self._named, blame.places)), frozenset().union(*blame.places)
        has = f"{who} {'has' if len(blame.places) == 1 else 'have'}"
        if any(rank in unheard for _, rank in pairs):
            return culprit, f"{has} not been heard from for {self.silence:g} s: frozen or cut off"
        return culprit, f"{has} heard nothing for {self.silence:g} s: cut off"

    def _link(self, places: Sequence[Collection[int]]) -> str:
        first, second = map(self._named, places)
        return f"the connection between {first} and {second} was dead for {self.silence:g} s"

    def _named(self, ranks: Collection[int]) -> str:
        """Ranks of one place: "rank 1 (host n1)", "host n1 (ranks 2, 3)"."""
        if len(ranks) == 1:
            return self.describe(*ranks)
        return f"host {self._nodes[min(ranks)]} (ranks {', '.join(map(str, sorted(ranks)))})"

    def _is_not_heard_by(self, rank: int, now: float) -> bool:
        """Whether the only other one has said that it does not hear this process, which was running."""
        ran = now - self._ticked <= self.silence / 2 and now - self._stood_still > self.silence
        return ran and len(self.others) == 1 and self.rank in self._silent.get(rank, ())

    def _note(self, rank: int, gone: Gone) -> None:
        if (known := self.gone.get(rank)) is None or (gone.how == "failed" and known.how != "failed"):
            self.gone = {**self.gone, rank: gone}

    def _to_all(self, said: Said) -> Sequence[Send]:
        return () if self._ended else [(self.others, said)]
