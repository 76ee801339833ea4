"""JAX's coordination service, in a process that is no rank.

In JAX's own way rank 0 hosts it. Then the death of rank 0 aborts all other ranks at once, inside C++, before
any of them can say what it waited for. So the launcher, or rank 0 without one, starts this file as a program:

    python -P coordinator.py ADDRESS PROCESSES LINGER_SECONDS

The program imports nothing but jaxlib, so that it is there in half a second. It writes a line once it serves.
A line on standard input ends it at once. It ignores signals that ask a run to end, because SLURM sends them
to every process of a step, and the ranks need it until they have saved. If its parent dies, it goes on for
LINGER_SECONDS. JAX aborts every process that loses the service, and before that they should be able to say
whom they lost.

Tried on jaxlib 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CLOSE_SECONDS = 2.0

LINGER_SECONDS = 10.0
"""How long the service outlives a process that dies without ending it."""

HEARTBEAT_SECONDS = 10**6
"""Never: RRFP_SILENCE_SECONDS says after how long a silent rank is given up. After this JAX aborts all ranks,
even if it was the whole run that stood still, the service with it."""

SHUTDOWN_SECONDS, POLL_SECONDS = 5, 0.2


class Coordinator:
    """Serves processes that call `jax.distributed.initialize(address, count, rank)`, until it is closed.

    RuntimeError says that the address cannot be used.
    """

    def __init__(self, address: str, count: int, linger_seconds: float = LINGER_SECONDS) -> None:
        with tempfile.TemporaryFile() as complaints:  # and the service's greeting, which nobody needs
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, address, str(count), str(linger_seconds)],
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
        try:
            with suppress(BrokenPipeError):  # it has ended before
                self._process.communicate(b"\n", CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # it stands still
            self._process.kill()
            self._process.wait()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free TCP port of 127.0.0.1 that nobody else is given until the exit; OSError if there is none.

    The socket is bound, never listening, and shares its port, as gRPC does with its own: so the service can
    have the port, and the kernel hands it to no one who asks for any.
    """
    from rrfp_jax.runtime.run.place import NO_PORT  # here: the program imports nothing of ours

    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind(("127.0.0.1", 0))
        except OSError as error:
            none = error.errno == errno.EADDRINUSE
            raise OSError(error.errno, NO_PORT if none else error.strerror) from None
        yield holder.getsockname()[1]


def _serve(address: str, processes: int, linger_seconds: float) -> None:
    """Serve until a line comes on standard input, or until some time after this process's parent has died.

    The pipe alone would not tell of that: whatever the parent has forked holds its other end, too.
    """
    from jaxlib import _jax  # type: ignore[attr-defined]

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent, said = os.getppid(), b""
    _service = _jax.get_distributed_runtime_service(
        address,
        processes,
        heartbeat_timeout=HEARTBEAT_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,
        recoverable=True,
    )
    print("serving", flush=True)
    while os.getppid() == parent:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            said = os.read(0, 1)
            break
    if not said:
        time.sleep(linger_seconds)
    os._exit(0)  # without the service's own way out, which waits for processes that may be gone


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
