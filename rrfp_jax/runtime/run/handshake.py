"""Connecting every pair of processes, each of which proves to the other that it is of this run.

The run's token never travels. Either side sends a number that was never used before, and gets back a hash of
both numbers and both ranks that only who has the token can compute:

    caller -> called: MAGIC, its rank, its number
    called -> caller: its number, its proof
    caller -> called: its proof
    called -> caller: HEARD, without which the caller calls again

All of these have fixed lengths, so nothing that a stranger sends is decoded. Strangers are few at a time and
have little time each.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from hashlib import sha256
from struct import Struct
from time import monotonic, sleep

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.run.coordinator import RETRY_SECONDS, Conversation, Door, received, retry_often
from rrfp_jax.runtime.run.place import NO_PORT

MAGIC, HEARD = b"RRFP3", b"\1"
NUMBER = PROOF = 32  # bytes
GREETING = Struct(f"!5sI{NUMBER}s")
RANKS = Struct("!II")


class _NotOfThisRun(ValueError):
    pass


def bound(host: str, kind: socket.SocketKind) -> socket.socket:
    """A socket on a free port of one of this machine's addresses."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
    found.bind((host, 0))
    return found


def listen(host: str) -> socket.socket:
    """A listening socket on a free port of one of this machine's addresses."""
    listener = bound(host, socket.SOCK_STREAM)
    listener.listen(128)
    return listener


def connect(
    listener: socket.socket, addresses: Sequence[tuple[str, int]], rank: int, token: bytes, seconds: float
) -> dict[int, socket.socket]:
    """A socket to every other rank; TrainingError for one that is late, or has another token."""
    deadline = monotonic() + seconds
    with listener:
        sockets = {r: _call(r, addresses[r], rank, token, deadline) for r in range(rank)}
        with closing(Acceptor(listener, rank, range(rank + 1, len(addresses)), token)) as acceptor:
            sockets |= acceptor.open(deadline)
    for connection in sockets.values():
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        retry_often(connection)
    return sockets


def proof(token: bytes, role: bytes, caller: int, called: int, numbers: bytes) -> bytes:
    """What only who has the token can say, in this role, to these numbers (the caller's, the other's)."""
    return hmac.digest(token, role + RANKS.pack(caller, called) + numbers, sha256)


def _call(peer: int, address: tuple[str, int], rank: int, token: bytes, deadline: float) -> socket.socket:
    """Connect to a rank. A call that it drops unheard is made again: it may have had too many strangers."""
    where = f"rank {peer} at {address[0]}:{address[1]}"
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(deadline - monotonic(), 0.1))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise TrainingError(f"rank {rank} cannot call {where}: {NO_PORT}") from None
            raise _cannot_reach(rank, where, str(error)) from None
        try:
            _introduce(connection, peer, rank, token)
            return connection
        except _NotOfThisRun:
            connection.close()
            raise TrainingError(
                f"rank {rank}: who answers as {where} has another token than this rank: give all ranks the "
                f"same, or see who listens there"
            ) from None
        except OSError as error:
            connection.close()
            if monotonic() + RETRY_SECONDS >= deadline:
                raise _cannot_reach(rank, where, str(error)) from None
            sleep(RETRY_SECONDS)


def _cannot_reach(rank: int, where: str, why: str) -> TrainingError:
    return TrainingError(
        f"rank {rank} cannot reach {where}: {why}. Is that address open between the machines? RRFP_BIND "
        f"chooses the address that a rank listens on"
    )


def _introduce(connection: socket.socket, peer: int, rank: int, token: bytes) -> None:
    """The caller's part; its own proof is given only to who has proved to have the token."""
    own = secrets.token_bytes(NUMBER)
    connection.sendall(GREETING.pack(MAGIC, rank, own))
    answer = b""
    while len(answer) < NUMBER + PROOF:
        if not (data := connection.recv(NUMBER + PROOF - len(answer))):
            raise ConnectionError("it hung up")
        answer += data
    numbers = own + answer[:NUMBER]
    if not hmac.compare_digest(answer[NUMBER:], proof(token, b"called", rank, peer, numbers)):
        raise _NotOfThisRun
    connection.sendall(proof(token, b"caller", rank, peer, numbers))
    if connection.recv(1) != HEARD:
        raise ConnectionError("it hung up")


def _exactly(caller: socket.socket, count: int) -> Generator[None, None, bytes]:
    """So many bytes, and not one beyond: what follows the proof belongs to the mailbox."""
    said = b""
    while len(said) < count:
        said += yield from received(caller, count - len(said))
    return said


class Acceptor(Door):
    """Where the ranks above this one call."""

    def __init__(self, listener: socket.socket, rank: int, awaited: Sequence[int], token: bytes) -> None:
        super().__init__(listener)
        self._rank, self._token, self._awaited = rank, token, list(awaited)
        self._found: dict[int, socket.socket] = {}

    def open(self, deadline: float) -> Mapping[int, socket.socket]:
        """Accept calls until every awaited rank has proved that it is there."""
        while self._awaited:
            if (left := deadline - monotonic()) <= 0:
                missing = ", ".join(map(str, self._awaited))
                raise TrainingError(f"rank {self._rank}: no connection from rank {missing} in time")
            self.turn(min(left, 1.0))
        return self._found

    def greet(self, caller: socket.socket) -> Conversation:
        """The called one's part."""
        magic, rank, number = GREETING.unpack((yield from _exactly(caller, GREETING.size)))
        if magic != MAGIC or rank not in self._awaited:
            raise _NotOfThisRun
        own = secrets.token_bytes(NUMBER)
        caller.send(own + proof(self._token, b"called", rank, self._rank, number + own))
        said = yield from _exactly(caller, PROOF)
        proved = hmac.compare_digest(said, proof(self._token, b"caller", rank, self._rank, number + own))
        if not proved or rank not in self._awaited:
            raise _NotOfThisRun
        caller.send(HEARD)
        return int(rank)

    def take(self, rank: int, caller: socket.socket) -> None:
        self._awaited.remove(rank)
        self._found[rank] = caller
