"""The latest events of a stage, always kept: errors quote them, and `replay` tells them to a new scheduler.

Only what changed the scheduler is kept: inputs that arrived, and room that was used, each with its answer.
What is kept are references to what exists anyway, in a ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from rrfp_jax.core.events import Arrived, Dispatch, Event

KEPT = 4096
"""Events of a stage: a whole step of 1,000 microbatches on one chunk, with arrivals of all F's and B's."""

QUOTED = 12
"""Of these, as many as a message quotes."""


class EventLog:
    """A ring of events and their answers, the oldest first.

    Attributes:
        events: what the scheduler was told.
        answers: what it answered to each.
    """

    __slots__ = ("answers", "events")

    def __init__(self, kept: int | None = KEPT) -> None:
        self.events: deque[Event] = deque(maxlen=kept)
        self.answers: deque[Dispatch | None] = deque(maxlen=kept)

    def __iter__(self) -> Iterator[tuple[Event, Dispatch | None]]:
        return zip(self.events, self.answers, strict=True)

    @property
    def whole(self) -> bool:
        """Whether nothing can have been dropped."""
        return len(self.events) != self.events.maxlen

    def recently(self) -> str:
        """The latest events in words."""
        first = max(len(self.events) - QUOTED, 0)
        return _in_words(entry for at, entry in enumerate(self) if at >= first)

    def story(self, microbatch: int) -> str:
        """What is kept of one microbatch, in words."""
        return _in_words(entry for entry in self if _microbatch(*entry) == microbatch)


def _microbatch(event: Event, answer: Dispatch | None) -> int | None:
    if isinstance(event, Arrived):
        return event.input.microbatch
    return None if answer is None else answer.task.microbatch


def _in_words(entries: Iterable[tuple[Event, Dispatch | None]]) -> str:
    words = (str(event) if answer is None else f"dispatched {answer.task}" for event, answer in entries)
    return ", ".join(words) or "nothing yet"
