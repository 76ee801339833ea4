"""JAX's coordination service, in a process that is no rank.

In JAX's own way rank 0 hosts it. Then the death of rank 0 aborts all other ranks at once, inside C++, before
any of them can say what it waited for. So the launcher, or rank 0 without one, starts a small program for it
(`_service.py`).
"""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rrfp_jax.runtime.run.place import NO_PORT

CLOSE_SECONDS = 2.0

LINGER_SECONDS = 10.0
"""How long the service outlives a process that dies without ending it."""


class Coordinator:
    """Serves processes that call `jax.distributed.initialize(address, count, rank)`, until it is closed.

    Raises:
        RuntimeError: the address cannot be used.
    """

    def __init__(self, address: str, count: int, linger_seconds: float = LINGER_SECONDS) -> None:
        program = Path(__file__).with_name("_service.py")
        with tempfile.TemporaryFile() as complaints:  # and the service's greeting, which nobody needs
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(program), address, str(count), str(linger_seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,  # Ctrl-C is for the ranks
            )
            assert self._process.stdout is not None
            if not self._process.stdout.readline():
                self._process.wait()
                complaints.seek(0)
                said = complaints.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
                reason = said.rpartition(": ")[2] or f"status {self._process.returncode}"
                raise RuntimeError(f"cannot serve the run at {address}; is the port taken? ({reason})")

    def close(self) -> None:
        """End it."""
        try:
            with suppress(BrokenPipeError):  # it has ended before
                self._process.communicate(b"\n", CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # it stands still
            self._process.kill()
            self._process.wait()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free TCP port of 127.0.0.1 that nobody else is given until the exit.

    The socket is bound, never listening, and shares its port, as gRPC does with its own: so the service can
    have the port, and the kernel hands it to no one who asks for any.

    Raises:
        OSError: there is none.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind(("127.0.0.1", 0))
        except OSError as error:
            raise OSError(
                error.errno, NO_PORT if error.errno == errno.EADDRINUSE else error.strerror
            ) from None
        yield holder.getsockname()[1]
