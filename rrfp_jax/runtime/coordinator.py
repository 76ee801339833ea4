"""JAX's coordination service, hosted by a process that is no rank: the launcher.

Where rank 0 hosts it, the death of rank 0 aborts all other ranks at once, inside C++, before any of them can
say what it waited for. The launcher initialises no JAX backend: this needs none.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from rrfp_jax.runtime._jax import start_coordination_service

HEARTBEAT_SECONDS = 100
SHUTDOWN_SECONDS = 5


@contextmanager
def host_coordinator(address: str, count: int) -> Iterator[None]:
    """Serve `count` processes that call `jax.distributed.initialize(address, count, rank)`, until the exit.

    Args:
        address: host:port.
        count: of processes.

    Raises:
        RuntimeError: the address cannot be used.
    """
    with _without_greeting():
        service = start_coordination_service(address, count, HEARTBEAT_SECONDS, SHUTDOWN_SECONDS)
    try:
        yield
    finally:
        service.shutdown()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free TCP port of 127.0.0.1 that nobody else is given until the exit.

    The socket is bound, never listening, and shares its port, as gRPC does with its own: so the service can
    have the port, and the kernel hands it to no one who asks for any.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def leave_accelerators_alone() -> None:
    """Whatever this process may compute, it computes on the CPU; the ranks it starts are not concerned."""
    jax.config.update("jax_platforms", "cpu")


@contextmanager
def _without_greeting() -> Iterator[None]:
    """Keep back what C++ writes to stderr, unless it fails: the service warns that recoverability is new."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        except BaseException:
            file.seek(0)
            os.write(kept, file.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
