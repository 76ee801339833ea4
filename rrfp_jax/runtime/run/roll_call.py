"""Who of a run has come: at the coordinator's port, before JAX's own meeting, which does not tell."""

from __future__ import annotations

import socket
from contextlib import suppress
from time import monotonic, sleep

from msgspec import MsgspecError, Struct, json
from msgspec.structs import replace

from rrfp_jax.runtime.run.alike import enumerated
from rrfp_jax.runtime.run.coordinator import retry_often
from rrfp_jax.runtime.run.place import PROCESSES, RANK, Place, join_seconds

CALL_SECONDS, PAUSE_SECONDS = 5.0, 0.1

QUIET_SECONDS = 10.0
"""After which a rank calls again: it is told every second who is missing."""

SETTINGS = b"\x04\0\0\0\0\0"
"""What gRPC's server says first, after three bytes."""

LONGEST_SAID = 2**20
"""Bytes without an end of line, after which it is no coordinator of ours that speaks."""


class News(Struct):
    """A line of the coordinator's: who is missing, whose number several have, who take each other's place.

    Or that a rank counts other processes, how many, and how many rank 0 counts; or that all have come.
    """

    missing: list[int] = []
    twice: list[int] = []
    apart: tuple[int, int, int] | None = None
    go: str | None = None


class RollCall:
    """A rank's part: it says that it is there, and hears the latest `news`.

    `card` is what it says of itself besides, `told` what it hears when all have come; `limit` names what
    allows them more time.
    """

    def __init__(
        self, place: Place, server: str = "rank 0", card: str = "", limit: str = join_seconds.name
    ) -> None:
        self._where, self._server, self._limit = place.coordinator, server, limit
        self._call = f"{place.rank} {place.processes} {card}\n".encode()
        self.news, self.told = News(), ""
        self._is_counted = False  # it has heard that others are missing, so the coordinator knows of it

    def answer(self, seconds: float) -> bool:
        """Wait until all ranks are there; whether they are within so long."""
        deadline = monotonic() + seconds
        while (left := deadline - monotonic()) > 0:
            # Nobody may serve yet, or still another run, for the seconds by which it outlives its rank 0.
            with suppress(OSError, MsgspecError, RecursionError):
                self.news = replace(self.news, missing=[])
                with socket.create_connection(self._where, min(left, CALL_SECONDS)) as line:
                    if self._heard(line, deadline):
                        return True
            sleep(PAUSE_SECONDS)
        return False

    def said(self) -> str:
        """How far it has come, in words."""
        news, more = self.news, f"{self._limit} allows more time"
        if news.apart:
            rank, count, first = news.apart
            return f"rank {rank} is started with {PROCESSES}={count}, rank 0 with {first}: give all the same"
        if news.twice:
            return f"several processes are started as rank {enumerated(news.twice)}: give each its own {RANK}"
        if not news.missing:
            asks = f"is {self._server}, which serves there, started, and is that address right? {more}"
            return f"{self._where.tried()}; {asks}"
        several = len(news.missing) > 1
        named = f"rank{'s' * several} {enumerated(news.missing)} {'are' if several else 'is'}"
        return f"{named} missing: started, and alive? {more}"

    def _heard(self, line: socket.socket, deadline: float) -> bool:
        """Hear who is missing until nobody is, for True, or the other end closes; raises for nonsense."""
        retry_often(line)
        line.sendall(self._call)
        said = b""
        while len(said) < LONGEST_SAID:
            line.settimeout(min(max(deadline - monotonic(), PAUSE_SECONDS), QUIET_SECONDS))
            if not (data := line.recv(2**16)):
                break
            if self._is_counted and data[3:].startswith(SETTINGS):  # JAX's service: all came while it called
                return True
            *lines, said = (said + data).split(b"\n")
            for each in lines:
                self.news = json.decode(each, type=News)
                if self.news.go is not None:
                    self.told = self.news.go
                    return True
                self._is_counted |= bool(self.news.missing)
        return False
