"""What carries the messages of a group's agreement between its processes, in one of two ways.

A process tells all its partners the same, and hears all that they tell, in order per sender. A follower's
only partner is its leader (`core.group.partners`). Messages are plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from rrfp_jax.runtime.processes.frames import Message
from rrfp_jax.runtime.processes.world import World

Plain: TypeAlias = Sequence[Any]
"""A message as plain data."""


class Carrier(Protocol):
    """Use as a context manager, once a step: whatever it does it does inside."""

    @property
    def calls(self) -> int:
        """Calls of the key-value store so far."""

    def post(self, message: Plain) -> None:
        """Tell all partners; returns at once."""

    def poll(self) -> list[Plain]:
        """What has come since the last call. What comes later wakes the driver.

        Raises:
            TrainingError: the carrier is out of order.
        """

    def heard(self) -> Mapping[int, int]:
        """How many batches, which hold one message or several, have come of each partner's rank so far."""

    def forget(self, batches: int) -> None:
        """All partners have so many of this process's batches, which need not be kept any longer."""

    def close(self) -> None:
        """No step follows; returns at once, and does nothing the second time."""

    def __enter__(self) -> Carrier: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Told(Message, frozen=True):
    """What a partner tells, by the control sockets."""

    said: list[Any]


class SocketCarrier:
    """By the control sockets. Made by all processes of a run together, before the first step.

    Args:
        world: the run.
        partners: their ranks.
    """

    calls = 0

    def __init__(self, world: World, partners: Sequence[int]) -> None:
        assert world.mailbox is not None
        self._mailbox, self._partners = world.mailbox, partners
        self._channel = world.next_round()
        self._come: list[Plain] = []
        self._mailbox.on(Told, lambda rank, told: self._come.append(told.said), self._channel)

    def post(self, message: Plain) -> None:
        """See `Carrier.post`."""
        for rank in self._partners:
            self._mailbox.post(rank, Told(list(message)), self._channel)

    def poll(self) -> list[Plain]:
        """See `Carrier.poll`."""
        self._mailbox.pump()
        come, self._come = self._come, []
        return come

    def heard(self) -> Mapping[int, int]:
        """See `Carrier.heard`: nothing is kept, so nobody needs to know."""
        return {}

    def forget(self, batches: int) -> None:
        """See `Carrier.forget`."""

    def close(self) -> None:
        """See `Carrier.close`. What still comes is dropped."""
        self._mailbox.off(self._channel)

    def __enter__(self) -> SocketCarrier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is done outside `post` and `poll`."""
