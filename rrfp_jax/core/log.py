"""The latest events of a stage, always kept: errors quote them, and `replay` tells them to a new scheduler.

Only what changed the scheduler is kept: inputs that arrived, and room, or a choice, that was used, with the
task that got it. (Which gradients were added then, follows from the tasks.) An arrival or a dispatch costs
one reference to what exists anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from rrfp_jax.core.events import ROOM, Arrived, Event
from rrfp_jax.core.tasks import Task

KEPT = 4096
"""Entries of a stage. A microbatch leaves about four on each chunk: two inputs and two tasks."""

QUOTED = 12
"""Of the latest events, as many as a message quotes."""


class EventLog:
    """A ring of events and the tasks dispatched on them, the oldest first.

    Attributes:
        entries: an arrival; or a task, after the event that led to its dispatch unless that is plain room.
    """

    __slots__ = ("entries",)

    def __init__(self, kept: int | None = KEPT) -> None:
        self.entries: deque[Event | Task] = deque(maxlen=kept)

    def __iter__(self) -> Iterator[tuple[Event, Task | None]]:
        """Events with what was dispatched on them."""
        event: Event = ROOM
        for entry in self.entries:
            if isinstance(entry, Arrived):
                yield entry, None
            elif isinstance(entry, Task):
                yield event, entry
                event = ROOM
            else:
                event = entry

    @property
    def whole(self) -> bool:
        """Whether nothing can have been dropped."""
        return len(self.entries) != self.entries.maxlen

    def recently(self) -> str:
        """The latest events in words."""
        return _in_words(list(self)[-QUOTED:])

    def story(self, microbatch: int) -> str:
        """What is kept of one microbatch, in words."""
        return _in_words(entry for entry in self if _microbatch(*entry) == microbatch)


def _microbatch(event: Event, task: Task | None) -> int | None:
    if isinstance(event, Arrived):
        return event.input.microbatch
    return None if task is None else task.microbatch


def _in_words(entries: Iterable[tuple[Event, Task | None]]) -> str:
    words = (str(event) if task is None else f"dispatched {task}" for event, task in entries)
    return ", ".join(words) or "nothing yet"
