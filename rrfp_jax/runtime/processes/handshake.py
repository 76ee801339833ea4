"""Connecting every pair of processes, with a token that only those of this run know."""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
from collections.abc import Mapping, Sequence
from time import monotonic

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.processes.frames import HEADER, pack, unpack

LARGEST_HELLO = 1024

log = logging.getLogger(__name__)


def listen(host: str) -> socket.socket:
    """A listening socket on a free port of one of this machine's addresses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    return listener


def connect(
    listener: socket.socket, addresses: Sequence[tuple[str, int]], rank: int, token: str, seconds: float
) -> dict[int, socket.socket]:
    """A socket to every other rank: this one calls those below it and is called by those above.

    Args:
        listener: of this rank; closed at the end, so that nobody can connect later.
        addresses: where each rank listens.
        rank: of this process.
        token: the run's secret. Whoever calls without it is dropped, with a line in the log.
        seconds: limit for all connections together.

    Raises:
        TrainingError: a rank did not answer or call in time, naming it.
    """
    deadline = monotonic() + seconds
    try:
        sockets = {r: _call(r, addresses[r], rank, token, deadline) for r in range(rank)}
        sockets |= _be_called(listener, range(rank + 1, len(addresses)), token, deadline)
    finally:
        listener.close()
    for connection in sockets.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


def _call(peer: int, address: tuple[str, int], rank: int, token: str, deadline: float) -> socket.socket:
    try:
        connection = socket.create_connection(address, timeout=max(deadline - monotonic(), 0.1))
        connection.sendall(pack("hello", token, rank))
    except OSError as error:
        raise TrainingError(
            f"rank {rank} cannot reach rank {peer} at {address[0]}:{address[1]}: {error}. Is that address "
            f"open between the machines? RRFP_BIND chooses the address that a rank listens on"
        ) from None
    return connection


def _be_called(
    listener: socket.socket, awaited: range, token: str, deadline: float
) -> Mapping[int, socket.socket]:
    """Accept calls until every awaited rank has said hello."""
    found: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)
    strangers: dict[socket.socket, bytearray] = {}
    try:
        while len(found) < len(awaited):
            if (left := deadline - monotonic()) <= 0:
                missing = ", ".join(str(r) for r in awaited if r not in found)
                raise TrainingError(f"rank {awaited.start - 1}: no connection from rank {missing} in time")
            for key, _ in selector.select(left):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is listener:
                    try:
                        caller, _ = listener.accept()
                    except (BlockingIOError, ConnectionError):
                        continue  # hung up already
                    caller.setblocking(False)
                    strangers[caller] = bytearray()
                    selector.register(caller, selectors.EVENT_READ)
                elif (rank := _hello(connection, strangers[connection], token)) is not None:
                    selector.unregister(connection)
                    del strangers[connection]
                    if rank in awaited and rank not in found:
                        found[rank] = connection
                    else:
                        connection.close()
    finally:
        selector.close()
        for stranger in strangers:
            stranger.close()
    return found


def _hello(connection: socket.socket, buffer: bytearray, token: str) -> int | None:
    """The rank of a caller; None if its hello is not there in full, -1 if it is to be dropped."""
    try:
        # Not a byte beyond the hello: what follows it belongs to the mailbox.
        wanted = HEADER - len(buffer)
        if wanted <= 0:
            wanted = HEADER + int.from_bytes(buffer[:HEADER], "big") - len(buffer)
        data = connection.recv(wanted) if wanted <= LARGEST_HELLO else b""
        buffer += data
        match unpack(buffer):
            case None if data:
                return None
            case ["hello", str(given), int(rank)] if hmac.compare_digest(given.encode(), token.encode()):
                return rank
    except BlockingIOError:
        return None
    except (OSError, ValueError):
        pass
    try:
        caller = connection.getpeername()
    except OSError:
        caller = "somebody"
    log.warning("dropped a connection from %s that is not of this run", caller)
    return -1
