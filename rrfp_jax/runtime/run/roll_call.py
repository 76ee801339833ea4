"""Who of a run has come: at the coordinator's port, before JAX's own meeting, which does not tell."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, sleep

from rrfp_jax.runtime.run.coordinator import GO, MISSING
from rrfp_jax.runtime.run.links import retry_often
from rrfp_jax.runtime.run.place import Address

CALL_SECONDS, PAUSE_SECONDS = 5.0, 0.1

LONGEST_SAID = 2**20
"""Bytes without an end of line, after which it is no coordinator of ours that speaks."""


class RollCall:
    """A rank's part: it says that it is there, and hears who is `missing`; None as long as nobody says so."""

    def __init__(self, where: Address, rank: int) -> None:
        self._where, self._rank = where, rank
        self.missing: Sequence[int] | None = None

    def answer(self, seconds: float) -> bool:
        """Wait until all ranks are there; whether they are within so long."""
        deadline = monotonic() + seconds
        while (left := deadline - monotonic()) > 0:
            # Nobody may serve yet, or still another run, for the seconds by which it outlives its rank 0.
            with suppress(OSError, ValueError):
                where = self._where.host, self._where.port
                with socket.create_connection(where, min(left, CALL_SECONDS)) as line:
                    if self._heard(line, deadline):
                        return True
            sleep(PAUSE_SECONDS)
        return False

    def _heard(self, line: socket.socket, deadline: float) -> bool:
        """Hear who is missing until nobody is, for True, or the other end closes; ValueError for nonsense."""
        retry_often(line)
        line.sendall(f"{self._rank}\n".encode())
        said = b""
        while len(said) < LONGEST_SAID:
            line.settimeout(max(deadline - monotonic(), PAUSE_SECONDS))
            if not (data := line.recv(2**16)):
                break
            *lines, said = (said + data).split(b"\n")
            for each in lines:
                word, *ranks = each.split()
                if word == GO:
                    self.missing = None
                    return True
                if word != MISSING:
                    raise ValueError(each)
                self.missing = [int(rank) for rank in ranks]
        return False
