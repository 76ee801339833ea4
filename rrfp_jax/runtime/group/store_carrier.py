"""The messages of a group by the key-value store of `jax.distributed`.

A process writes numbered batches of messages. For each partner a thread waits for that partner's next batch
with a long poll. Another thread does the writing, so that the driver never waits for the store. What has
collected while a call was under way makes one batch. So several messages share a batch only if they come
faster than the store takes them. What all partners have read is deleted, a block at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter
from types import TracebackType
from typing import Any

import msgspec

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.group.carrier import Plain
from rrfp_jax.runtime.processes.frames import encoded
from rrfp_jax.runtime.processes.sealed_store import Store

POLL_SECONDS = 2.0
"""How long one call waits for a batch before it asks anew."""

JOIN_SECONDS = 1.0

LOOK_SECONDS = 1.0
"""A driver that waits polls at least as often."""

BLOCK = 64
"""Batches that are deleted together."""


class StoreCarrier:
    """See `Carrier`. Its threads live until `close` or `leave`, and rest between steps.

    Args:
        store: the client.
        name: of this carrier, equal on all processes and never used before.
        rank: of this process.
        partners: their ranks.
        ring: wakes the driver; called in any thread.
        silence_seconds: if the store does not answer for so long, it is given up.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        partners: Sequence[int],
        ring: Callable[[], None],
        silence_seconds: float,
    ) -> None:
        self._store, self._name, self._rank = store, f"rrfp/{name}", rank
        self._ring, self._silence = ring, silence_seconds
        self._outbox: SimpleQueue[Plain | str | None] = SimpleQueue()  # messages; folders to delete; the end
        self._come: deque[bytes] = deque()
        self._heard = dict.fromkeys(partners, 0)
        self._forgotten = 0  # blocks
        # By the partner that a thread serves, this process's own rank for writing:
        self._calls = dict.fromkeys([rank, *partners], 0)
        self._overdue = dict.fromkeys([rank, *partners], inf)  # when the call under way will be
        self._looked, self._excused = perf_counter(), 0.0  # when last; until when silence says nothing
        self._failure: RuntimeError | None = None
        self._open, self._closed = threading.Event(), False
        self._threads = [_thread(self._write)]
        self._threads += [_thread(partial(self._read, partner)) for partner in partners]

    @property
    def calls(self) -> int:
        """See `Carrier.calls`."""
        return sum(self._calls.values())

    def post(self, message: Plain) -> None:
        """See `Carrier.post`."""
        self._outbox.put(message)

    def poll(self) -> list[Plain]:
        """See `Carrier.poll`.

        Raises:
            TrainingError: the store failed, or does not answer.
        """
        come: list[Plain] = []
        while self._come:
            come += msgspec.msgpack.decode(self._come.popleft(), type=list[list[Any]])
        what = "the key-value store, through which its group agrees on what to run,"
        if self._failure is not None:
            raise TrainingError(f"{what} failed: {self._failure}")
        if self._is_silent(perf_counter()):
            raise TrainingError(
                f"{what} has not answered for {self._silence:g} s: is the process that serves it, started by "
                f"the launcher or rank 0, frozen or cut off?"
            )
        return come

    def heard(self) -> Mapping[int, int]:
        """See `Carrier.heard`."""
        return dict(self._heard)

    def forget(self, batches: int) -> None:
        """See `Carrier.forget`."""
        blocks = max(batches // BLOCK, self._forgotten)
        for block in range(self._forgotten, blocks):
            self._outbox.put(f"{self._name}/{self._rank}/{block}")
        self._forgotten = blocks

    def __enter__(self) -> StoreCarrier:
        self._open.set()
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()

    def close(self) -> None:
        """See `Carrier.close`. Threads end within a long poll; what this process wrote is deleted."""
        if not self._closed:
            self._end(f"{self._name}/{self._rank}")

    def leave(self) -> None:
        """End the threads now, when the client has been shut down, which ends its calls.

        At Python's end a thread inside the client would abort the process.
        """
        self._end()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(JOIN_SECONDS)

    def _end(self, *folders: str) -> None:
        self._closed = True
        for item in (*folders, None):
            self._outbox.put(item)
        self._open.set()

    def _is_silent(self, now: float) -> bool:
        """Whether the store is; if this process itself stood still (Ctrl-Z), so may the store have."""
        if now - self._looked > LOOK_SECONDS + self._silence / 2:
            self._excused = now + self._silence
        self._looked = now
        return min(self._overdue.values()) < now and self._excused < now

    def _write(self) -> None:
        number, ended = 0, False
        while not ended:
            items = [self._outbox.get()]
            with suppress(Empty):
                while True:
                    items.append(self._outbox.get_nowait())
            ended = None in items
            messages = [item for item in items if item is not None and not isinstance(item, str)]
            if messages:
                key, batch = self._key(self._rank, number), encoded(messages)
                self._call(self._rank, 0.0, self._store.key_value_set_bytes, key, batch)
                number += 1
            for item in items:
                if isinstance(item, str):
                    self._call(self._rank, 0.0, self._store.key_value_delete, item)

    def _read(self, partner: int) -> None:
        timed_out = False
        while self._open.wait() and not self._closed:
            key, limit = self._key(partner, self._heard[partner]), int(1000 * POLL_SECONDS)
            if timed_out:  # by the client's own clock: so ask for something that only the store can answer
                self._call(partner, 0.0, self._store.key_value_dir_get_bytes, f"{key}/none")
                timed_out = False
            try:
                get = self._store.blocking_key_value_get_bytes
                self._come.append(self._call(partner, POLL_SECONDS, get, key, limit))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                timed_out = True
            else:
                self._heard[partner] += 1
                self._ring()

    def _call(self, who: int, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the store, which may take so many seconds and the time after which it counts as silent.

        It may be out of time only if it was given some.
        """
        self._calls[who] += 1
        self._overdue[who] = perf_counter() + seconds + self._silence
        try:
            return function(*arguments)
        except RuntimeError as error:
            if not seconds or "DEADLINE_EXCEEDED" not in str(error):
                self._failure = error
                self._ring()
            raise
        finally:
            self._overdue[who] = inf

    def _key(self, rank: int, number: int) -> str:
        return f"{self._name}/{rank}/{number // BLOCK}/{number}"


def _thread(body: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        with suppress(RuntimeError):  # it has been noted
            body()

    return threading.Thread(target=run, name="rrfp-group", daemon=True)
