"""One clock for all processes: rank 0's, known elsewhere to within half of the quickest round trip."""

from __future__ import annotations

from collections import deque

SAMPLES = 32
"""The quickest of so many latest round trips counts; older ones may have drifted."""


class PeerClock:
    """The offset of rank 0's clock, from round trips: sent here, answered there, back here.

    If the way there and the way back took equally long, the answer was given half-way; at worst one of them
    took no time at all, so the offset is known to within half of the round trip (as in NTP).
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)  # round trip, offset
        self._best = 0.0, 0.0  # kept apart, because one thread samples while another reads

    def sample(self, sent: float, theirs: float, back: float) -> None:
        """Note one round trip; times in seconds, `theirs` on rank 0's clock, the others on this one's."""
        self._samples.append((back - sent, theirs - (sent + back) / 2))
        self._best = min(self._samples)

    @property
    def offset(self) -> float:
        """Add this to a time of this process to have it on rank 0's clock (s); 0 before any sample."""
        return self._best[1]

    @property
    def precision(self) -> float:
        """Largest possible error of the offset (s)."""
        return self._best[0] / 2

    @property
    def samples(self) -> int:
        """How many round trips are known, at most `SAMPLES`."""
        return len(self._samples)
