"""Between processes, for what is small: data in the mailbox's own messages; what is larger goes another way.

A transfer is set up by messages to and fro, which take longer than it takes to send a few bytes with them. So
a small output is sent once it exists, without a question; there is nothing to give back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import numpy as np

from rrfp_jax.runtime._jax import HostCopier
from rrfp_jax.runtime.run.mailbox import Message
from rrfp_jax.runtime.transport.protocol import (
    UNOBSERVED,
    Arrival,
    Endpoints,
    Kept,
    Key,
    Messages,
    Offers,
    Rounds,
    Specs,
    TransferObserver,
    Transport,
    specs_of,
)

LARGEST_MAIL = 2**16
"""Bytes of the largest output that is mailed."""


class Mail(Message, frozen=True):
    """An input of these shapes, dtypes and bytes, whose program ended at this time (s, on rank 0's clock)."""

    key: Key
    ended: float
    specs: Specs
    arrays: list[bytes]


class MailedTransport(Transport):
    """Mails what is small, and leaves the rest to `larger`; made by all processes together."""

    def __init__(self, ends: Endpoints, larger: Transport) -> None:
        assert ends.world.mailbox is not None
        self._world, self._mailbox, self._receivers = ends.world, ends.world.mailbox, ends.receivers
        self._larger, self._offers, self._rounds = larger, Offers(), Rounds()
        self._copiers = {stage: [*map(HostCopier, own)] for stage, own in ends.devices.items()}
        self._written: dict[Key, Sequence[jax.Array]] = {}  # the producer is still running
        self._arrived: list[Arrival] = []
        self._number = self._world.next_round()
        self._mailbox.on(Mail, self._on_mail, self._number)

    def reserve(self, messages: Messages) -> Kept:
        return self._larger.reserve(messages)

    def begin(self, round: int, observer: TransferObserver = UNOBSERVED) -> None:
        self._offers.begin(round, observer)
        self._larger.begin(round, observer)
        for handler, rank, mail in self._rounds.begin(round):
            handler(rank, mail)

    def offer(self, key: Key, arrays: Sequence[jax.Array]) -> None:
        if sum(array.nbytes for array in arrays) > LARGEST_MAIL:
            self._larger.offer(key, arrays)
            return
        self._offers.add(key, len(self._receivers[key.stage]))
        # Where stages differ in width, some ranks have no receivers.
        self._written[key] = arrays if self._receivers[key.stage] else []

    def produced(self, key: Key, at: float) -> None:
        if (arrays := self._written.pop(key, None)) is None:
            self._larger.produced(key, at)
            return
        data = [np.asarray(array).tobytes() for array in arrays]
        mail = Mail(key, at + self._world.clock[0], specs_of(arrays), data)
        for rank in self._receivers[key.stage]:
            self._mailbox.post(rank, mail, self._number)
            self._offers.delivered(key)

    def poll(self) -> list[Arrival]:
        arrived = self._larger.poll()  # which pumps
        arrived, self._arrived = arrived + self._arrived, []
        return arrived

    def seconds_until_poll(self) -> float | None:
        return 0.0 if self._arrived else self._larger.seconds_until_poll()

    def finish(self, *, broken: bool = False) -> None:
        self._offers.finish()
        self._larger.finish(broken=broken)
        if broken:
            self._rounds.over = True
            self._written.clear()
            self._arrived.clear()

    def close(self) -> None:
        self._mailbox.off(self._number)
        self._larger.close()

    def _on_mail(self, rank: int, mail: Mail) -> None:
        if not self._rounds.takes(mail.key, (self._on_mail, rank, mail)):
            return
        self._offers.observer.coming(mail.key)
        copiers = itertools.cycle(self._copiers[mail.key.stage])
        sent = zip(mail.arrays, mail.specs, strict=True)
        values = (np.frombuffer(data, np.dtype(dtype)).reshape(shape) for data, (shape, dtype) in sent)
        arrays = [copy([value])[0] for copy, value in zip(copiers, values, strict=False)]
        self._arrived.append(Arrival(mail.key, arrays, mail.ended - self._world.clock[0]))
