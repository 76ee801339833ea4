"""Who takes no further part in a run, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from rrfp_jax.errors import PeerLost


class Roster:
    """Who is in the run.

    Args:
        rank: of this process.
        size: how many there are.

    Attributes:
        stages: of each rank as text, such as "stage 2"; empty until a mesh has been laid out.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.stages: Sequence[str] = [""] * size

    def describe(self, rank: int) -> str:
        """A rank as messages name it: "rank 2 (stage 2)"."""
        return f"rank {rank} ({self.stages[rank]})" if self.stages[rank] else f"rank {rank}"


@dataclass(frozen=True)
class Gone:
    """Why a process takes no further part: it `left` in good order, `failed` and said so, or is `lost`."""

    how: Literal["left", "failed", "lost"]
    culprit: int  # the rank whose trouble this is
    sentence: str
    since: float  # perf_counter seconds


class Departures:
    """The processes that are gone. Noted by whoever reads messages; any thread may look.

    Args:
        others: the ranks of the other processes.

    Attributes:
        gone: by rank; replaced as a whole, so that any thread may look.
        describe: names a rank in messages.
    """

    def __init__(self, others: Collection[int]) -> None:
        self._others = others
        self.gone: Mapping[int, Gone] = {}
        self.describe: Callable[[int], str] = "rank {}".format

    def left(self, rank: int) -> None:
        """It said goodbye."""
        self._note(rank, Gone("left", rank, "has ended", perf_counter()))

    def failed(self, rank: int, culprit: int, sentence: str) -> None:
        """It said that it fails, and why."""
        self._note(rank, Gone("failed", culprit, sentence, perf_counter()))

    def lost(self, rank: int, reason: str) -> None:
        """It has ended, or is cut off, without a word."""
        self._note(rank, Gone("lost", rank, f"{self.describe(rank)} {reason}", perf_counter()))

    def _note(self, rank: int, gone: Gone) -> None:
        """The first reason stays, except that a process's own word on its failure explains more."""
        known = self.gone.get(rank)
        if known is None or (gone.how == "failed" and known.how != "failed"):
            self.gone = {**self.gone, rank: gone}

    def require(self, needed: Collection[int], known: Mapping[int, Gone] | None = None) -> None:
        """Raise for the most telling of these processes that are gone: one that failed, else one lost.

        Args:
            needed: ranks that the caller cannot do without.
            known: who was gone at some earlier moment; None for now. Of a process that left, something may
                still be unread if it was read by the watchdog just now, so look before pumping.

        Raises:
            PeerLost: one of them is gone.
        """
        known = self.gone if known is None else known
        if not known:
            return
        gone = [one for rank, one in sorted(known.items()) if rank in needed]
        for how in ("failed", "lost", "left"):
            for one in gone:
                if one.how == how:
                    left = f"{self.describe(one.culprit)} has ended while this process still needs it"
                    raise PeerLost(left if how == "left" else one.sentence, one.culprit)

    def require_all(self) -> None:
        """Raise if any process is gone; see `require`."""
        self.require(self._others)

    def in_trouble(self) -> Gone | None:
        """The most telling of those who did not leave in good order, through no fault of this process."""
        gone = [one for one in self.gone.values() if one.how != "left" and one.culprit in self._others]
        return min(gone, key=lambda one: (one.how == "lost", one.since), default=None)

    def is_cut_off(self) -> bool:
        """Whether all other processes, of several, are lost and not one said why."""
        return 1 < len(self._others) == sum(one.how == "lost" for one in list(self.gone.values()))
