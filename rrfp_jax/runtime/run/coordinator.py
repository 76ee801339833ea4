"""JAX's coordination service, in a process that is no rank.

In JAX's own way rank 0 hosts it. Then the death of rank 0 aborts all other ranks at once, inside C++, before
any of them can say what it waited for. So the launcher, or rank 0 without one, starts this file as a program:

    python -P coordinator.py ADDRESS PROCESSES LINGER_SECONDS

The program imports nothing but jaxlib, so that it is there in half a second. It writes a line once ranks can
call. They say their numbers and are told who is missing, which JAX's service would not tell. When all have
come, that service takes over the port. A line on standard input ends the program at once. It ignores signals
that ask a run to end, because SLURM sends them to every process of a step, and the ranks need it until they
have saved. If its parent dies, it goes on for LINGER_SECONDS. JAX aborts every process that loses the
service, and before that they should be able to say whom they lost.

Tried on jaxlib 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from glob import glob
from math import inf
from typing import TypeAlias

CLOSE_SECONDS = 2.0

LINGER_SECONDS = 10.0
"""How long the service outlives a process that dies without ending it."""

HEARTBEAT_SECONDS = 10**6
"""Never: RRFP_SILENCE_SECONDS says after how long a silent rank is given up. After this JAX aborts all ranks,
even if it was the whole run that stood still, the service with it."""

SHUTDOWN_SECONDS, POLL_SECONDS, TELL_SECONDS, TEND_SECONDS = 5, 0.2, 1.0, 1.0

MOST_REPLACED = 3
"""A rank may call again. If it takes its own place more often, two processes take each other's."""

LONGEST_CALL = 512
"""Bytes in which a rank says its number, and what else there is to say of it."""

MOST_STRANGERS, STRANGER_SECONDS = 64, 5.0
"""Callers at once that have not said who they are, for one more of which the oldest is dropped; how long each
may take to say so."""

RETRY_SECONDS = 0.05
"""Pause before something is tried again that failed for want of descriptors, or among strangers."""

TCP_RTO_MAX_MS = 44
"""An option of `linux/tcp.h` that Python has no name for."""

RETRY_MILLISECONDS, NEVER_MILLISECONDS = 1000, 2**31 - 1  # of tries, the least that the kernel takes


log = logging.getLogger(__name__)


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

    def leave(self) -> None:
        """Serve for so many seconds more, as if this process had died."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        try:
            self._process.communicate(b"\n", CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # it stands still
            self._process.kill()
            self._process.wait()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free TCP port of 127.0.0.1 that nobody else is given until the exit; OSError if there is none.

    The socket is bound, never listening, and may be bound again: so the coordinator can have the port, and
    the kernel hands it to no one who asks for any.
    """
    from rrfp_jax.runtime.run.place import NO_PORT  # here: the program imports nothing of ours

    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", 0))
        except OSError as error:
            reason = NO_PORT if error.errno == errno.EADDRINUSE else error.strerror
            raise OSError(error.errno, reason) from None
        yield holder.getsockname()[1]


def retry_often(connection: socket.socket) -> None:
    """Have TCP try again every second, and give up never: that is judged by signs of life.

    gRPC's server would give up after 20 s, and JAX aborts a process whose connection it has closed.
    """
    with suppress(OSError):  # an older kernel doubles its pauses
        connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, RETRY_MILLISECONDS)
    with suppress(OSError):  # it has been closed just now
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, NEVER_MILLISECONDS)


def tcp_connections() -> Iterator[tuple[socket.socket, str]]:
    """Those that this process has, each until the next, with the IP addresses of their other ends."""
    for path in glob("/proc/self/fd/*"):  # none, where there is no /proc
        with suppress(OSError):  # it has been closed just now, or is no connection
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(os.path.basename(path)))) as own:
                if own.type == socket.SOCK_STREAM and own.family in (socket.AF_INET, socket.AF_INET6):
                    yield own, own.getpeername()[0].removeprefix("::ffff:")


Conversation: TypeAlias = Generator[None, None, int]
"""What a caller is asked, resumed whenever something has come; the rank that it is, or an error."""


def received(caller: socket.socket, most: int) -> Generator[None, None, bytes]:
    """The next bytes that come, at most so many; OSError says that no more can."""
    while True:
        yield
        with suppress(BlockingIOError):
            if data := caller.recv(most):
                return data
            raise ConnectionError("it hung up")


class Door(ABC):
    """Where ranks call. Until they have said who they are, callers are few and have little time."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._strangers: dict[socket.socket, tuple[float, Conversation]] = {}  # since when; oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    @abstractmethod
    def greet(self, caller: socket.socket) -> Conversation:
        """Find out who has called; ValueError or OSError for nobody that is awaited."""

    @abstractmethod
    def take(self, rank: int, caller: socket.socket) -> None:
        """A rank has called."""

    def turn(self, seconds: float) -> None:
        """Hear who calls, for so long at most."""
        for key, _ in self._selector.select(seconds):
            key.data()
        for caller, (since, _) in list(self._strangers.items()):
            if time.monotonic() - since > STRANGER_SECONDS:
                self._drop(caller)

    def close(self) -> None:
        """No more calls: another may listen on the port."""
        self._selector.close()
        self._listener.close()
        for caller in self._strangers:
            caller.close()

    def _accept(self) -> None:
        if len(self._strangers) >= MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))
        try:
            caller, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # hung up already
        except OSError:  # no more descriptors
            if self._strangers:
                self._drop(next(iter(self._strangers)))
            time.sleep(RETRY_SECONDS)
            return
        caller.setblocking(False)
        conversation = self.greet(caller)
        next(conversation)
        self._strangers[caller] = time.monotonic(), conversation
        self._selector.register(caller, selectors.EVENT_READ, partial(self._hear, caller))

    def _hear(self, caller: socket.socket) -> None:
        if caller not in self._strangers:  # it has been dropped just now
            return
        try:
            next(self._strangers[caller][1])
        except StopIteration as end:
            self._forget(caller)
            self.take(end.value, caller)
        except (OSError, ValueError):
            self._drop(caller)

    def _drop(self, caller: socket.socket) -> None:
        self._forget(caller)
        name = "somebody"
        with suppress(OSError):
            name = caller.getpeername()
        caller.close()
        log.warning("dropped a connection from %s that is not of this run", name)

    def _forget(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        del self._strangers[caller]


class RollCallDoor(Door):
    """Where the ranks of a run say that they are there. Nobody proves anything: they do so once all have met.

    Attributes:
        cards: what ranks say of themselves besides, of all that ever came.
    """

    def __init__(self, listener: socket.socket, processes: int) -> None:
        super().__init__(listener)
        self._processes = processes
        self._here: dict[int, socket.socket] = {}
        self._replaced = Counter[int]()  # how often a rank has called in its own place
        self._told = -inf
        self._apart: list[int] | None = None  # the latest rank that counts other processes, its count, ours
        self.cards: dict[int, str] = {}

    @property
    def complete(self) -> bool:
        return len(self._here) == self._processes

    def turn(self, seconds: float = POLL_SECONDS) -> None:
        """Hear who calls or leaves, and tell all from time to time who is missing."""
        super().turn(seconds)
        if time.monotonic() - self._told > TELL_SECONDS and not self.complete:
            self._told = time.monotonic()
            # Those that never came; if all have, those that have gone again.
            ranks = {*range(self._processes)}
            missing = sorted((ranks - self.cards.keys()) or (ranks - self._here.keys()))
            line = _line(missing=missing, twice=self._twice(), apart=self._apart)
            for caller in self._here.values():
                with suppress(OSError):  # it has just gone, or has not read for long
                    caller.send(line)

    def go(self, said: str = "") -> None:
        """Tell all that they are complete, and this, and hang up."""
        for caller in self._here.values():
            with suppress(OSError), caller:  # it has just gone, or does not read
                caller.settimeout(CLOSE_SECONDS)
                caller.sendall(_line(go=said))

    def greet(self, caller: socket.socket) -> Conversation:
        said = b""
        while not said.endswith(b"\n"):
            said += yield from received(caller, LONGEST_CALL - len(said))  # of 0 bytes: none are left
        number, count, card = said.decode().split(" ", 2)
        rank = int(number)
        if self._apart and self._apart[0] == rank:
            self._apart = None
        if int(count) != self._processes:
            self._apart = [rank, int(count), self._processes]
            caller.send(_line(apart=self._apart))
            yield from received(caller, 0)  # until it hangs up: else it would call again at once
        if rank not in range(self._processes):
            raise ValueError(f"there is no rank {rank}")
        self.cards[rank] = card
        return rank

    def take(self, rank: int, caller: socket.socket) -> None:
        """A rank is there, maybe once more."""
        retry_often(caller)
        if (before := self._here.get(rank)) is not None:
            self._replaced[rank] += 1
            if rank in self._twice():
                with suppress(OSError):
                    before.send(_line(twice=[rank]))
            self._leave(rank, before)
        self._here[rank] = caller
        self._selector.register(caller, selectors.EVENT_READ, partial(self._leave, rank, caller))

    def _leave(self, rank: int, caller: socket.socket) -> None:
        """A rank has hung up, or says more than it should."""
        if self._here.get(rank) is caller:  # else another has taken its place just now
            del self._here[rank]
            self._selector.unregister(caller)
            caller.close()

    def _twice(self) -> Collection[int]:
        return sorted(rank for rank, times in self._replaced.items() if times > MOST_REPLACED)


def _line(**told: Collection[int] | str | None) -> bytes:
    """What ranks are told, as `roll_call.News` reads it."""
    return json.dumps(told).encode() + b"\n"


def listening(address: str, seconds: float = LINGER_SECONDS + CLOSE_SECONDS) -> socket.socket:
    """At "host:port"; while another run's service outlives its rank 0 there, it is waited for, so long.

    The port is not shared as gRPC does: else callers of this run would reach that one.
    """
    host, _, port = address.rpartition(":")
    host, deadline = host.strip("[]"), time.monotonic() + seconds
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family, *_, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    while True:
        try:
            return socket.create_server(where, family=family, backlog=1024, dualstack_ipv6=host == "::")
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)


def _serve(address: str, processes: int, linger_seconds: float) -> None:
    """Serve until a line comes on standard input, or until some time after this process's parent has died.

    The pipe alone would not tell of that: whatever the parent has forked holds its other end, too.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, ValueError):  # a descriptor for every rank, and gRPC's own
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.disable()  # nobody reads of strangers here
    parent, ends = os.getppid(), inf
    roll_call = RollCallDoor(listening(address), processes)
    print("serving", flush=True)
    from jaxlib import _jax  # type: ignore[attr-defined]

    ended = selectors.DefaultSelector()
    ended.register(0, selectors.EVENT_READ)
    service, tended = None, -inf
    while time.monotonic() < ends:
        if ended.select(0 if service is None else POLL_SECONDS):
            if os.read(0, 1):
                break
            ended.unregister(0)  # nobody is there to say more
            parent = 0
        if os.getppid() != parent:
            ends = min(ends, time.monotonic() + linger_seconds)
        if service is None:
            roll_call.turn()
            if roll_call.complete:
                roll_call.close()
                service = _jax.get_distributed_runtime_service(
                    address,
                    processes,
                    heartbeat_timeout=HEARTBEAT_SECONDS,
                    shutdown_timeout=SHUTDOWN_SECONDS,
                    recoverable=True,
                )
                roll_call.go()
        elif time.monotonic() - tended > TEND_SECONDS:
            tended = time.monotonic()
            for connection, _ in tcp_connections():
                retry_often(connection)
    os._exit(0)  # without the service's own way out, which waits for processes that may be gone


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
