"""The tasks of a step call each other like ranks of a run: rank 0 at the coordinator's port, then every pair.

Rank 0 serves. Each task says where it listens and is told rank 0's time. Once all have come, or the limit is
over, it is told of all others, calls them, and says whether it sees rank 0's files. Messages are lines of
JSON.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rrfp_jax.commands.preflight.surroundings import Meeting, code_hash
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.runtime.run.alike import found_versions
from rrfp_jax.runtime.run.handshake import connect, listen
from rrfp_jax.runtime.run.links import require_reachable
from rrfp_jax.runtime.run.place import Address, Place

ANSWER_SECONDS = 5.0
"""Within which a task that has come speaks and is answered; also for a file to be seen by another node."""

CONNECT_SECONDS = 15.0
"""For all pairs, once all have come."""

PAUSE_SECONDS = 0.2

HOME = Path("~/.rrfp").expanduser()
"""Where ranks of a SLURM step find the run's token."""

LONGEST_LINE = 1 << 20
"""Characters that are read of whoever calls."""


def meet(place: Place, host: str, address: str, folder: Path, limit: float) -> Meeting:
    """Call the other tasks.

    Args:
        place: of this task.
        host: its node's name.
        address: at which it listens.
        folder: of the runs.
        limit: for all tasks to come, in seconds.
    """
    deadline = time.monotonic() + limit
    server = None
    if place.rank == 0:
        try:
            door = _door(place.coordinator)
        except OSError as error:
            reason = error.strerror or str(error)
            return Meeting(error=f"rank 0 could not serve: {reason}", port_taken=reason)
        what = (door, place.processes, folder, deadline)
        server = threading.Thread(target=_serve, args=what, daemon=True)
        server.start()
    try:
        with listen(address) as listener, _call(place.coordinator, deadline) as line:
            found = _met(place, host, listener, line, deadline)
    except (OSError, ValueError, TrainingError, UsageError) as error:
        found = Meeting(error=str(error) or type(error).__name__)
    if server is not None:
        server.join(limit + CONNECT_SECONDS + 2 * ANSWER_SECONDS)
    return found


class Call:
    """A connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("r", encoding="utf-8")

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._connection.close()

    def send(self, message: Any) -> None:
        """Send one."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, what: str, seconds: float) -> Any:
        """The next one; `what` names it if it does not come in time."""
        self._connection.settimeout(seconds)
        try:
            return json.loads(self._file.readline(LONGEST_LINE))
        except (OSError, ValueError):
            raise TrainingError(f"{what} has not come") from None


def _door(coordinator: Address) -> socket.socket:
    """As the coordination service listens."""
    port = coordinator.port
    if (host := coordinator.served_at) is not None:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _call(coordinator: Address, deadline: float) -> Call:
    """Rank 0, which may not be there yet."""
    where = (coordinator.host, coordinator.port)
    while True:
        left = deadline - time.monotonic()
        try:
            return Call(socket.create_connection(where, max(left, PAUSE_SECONDS)))
        except OSError as error:
            if left <= 0 or isinstance(error, socket.gaierror):
                raise TrainingError(f"rank 0 cannot be reached at {coordinator}: {error}") from None
        time.sleep(PAUSE_SECONDS)


def _met(place: Place, host: str, listener: socket.socket, line: Call, deadline: float) -> Meeting:
    began = time.time()
    line.send([place.rank, host, *listener.getsockname()[:2], found_versions(), code_hash(Path.cwd())])
    theirs = line.receive("rank 0's answer", ANSWER_SECONDS)
    ended = time.time()
    ahead, ahead_error = theirs - (began + ended) / 2, (ended - began) / 2
    left = max(deadline - time.monotonic(), 0.0) + ANSWER_SECONDS
    all_ranks, token, mark, home_mark = line.receive("the list of all ranks", left)
    missing = [rank for rank, one in enumerate(all_ranks) if one is None]
    if missing:
        line.send(False)
        raise TrainingError(f"ranks {', '.join(map(str, missing))} have not called rank 0 in time")
    hosts, addresses = [one[0] for one in all_ranks], [(one[1], one[2]) for one in all_ranks]
    sees, sees_home = _sees(Path(mark)), place.step is None or _sees(HOME / home_mark)
    try:
        if not place.coordinator.is_loopback:  # else all are on one machine, whatever that is called
            require_reachable(hosts, [host for host, _ in addresses])
        for connection in connect(listener, addresses, place.rank, token.encode(), CONNECT_SECONDS).values():
            connection.close()
    finally:
        line.send(sees)
    return Meeting(
        hosts=tuple(hosts),
        versions=tuple(one[3] for one in all_ranks),
        code=tuple(one[4] for one in all_ranks),
        ahead=ahead,
        ahead_error=ahead_error,
        sees_folder=sees,
        sees_home=sees_home,
    )


def _sees(mark: Path) -> bool:
    deadline = time.monotonic() + ANSWER_SECONDS
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
    return mark.exists()


def _serve(door: socket.socket, count: int, folder: Path, deadline: float) -> None:
    """Until all have said how it went, or the limit is over."""
    ranks: list[Sequence[Any] | None] = [None] * count
    lines = []
    with door:
        while None in ranks and (left := deadline - time.monotonic()) > 0:
            door.settimeout(left)
            with suppress(OSError, TrainingError, ValueError, TypeError, IndexError):
                line = Call(door.accept()[0])
                lines.append(line)
                rank, *one = line.receive("a task's place", ANSWER_SECONDS)
                line.send(time.time())
                ranks[rank] = one
    token = secrets.token_hex(16)
    marks = [folder / f".doctor-{secrets.token_hex(8)}", HOME / f".doctor-{secrets.token_hex(8)}"]
    with suppress(OSError):
        HOME.mkdir(mode=0o700, exist_ok=True)
    for mark in marks:
        with suppress(OSError):
            mark.write_text("")
    for line in lines:
        with suppress(OSError):
            line.send([ranks, token, str(marks[0].absolute()), marks[1].name])
    for line in lines:
        with suppress(OSError, TrainingError), line:
            line.receive("whether a task sees the folder", CONNECT_SECONDS + ANSWER_SECONDS)
    for mark in marks:
        with suppress(OSError):
            mark.unlink()
