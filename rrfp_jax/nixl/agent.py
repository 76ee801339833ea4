"""NIXL's agent: it writes from this process's memory into another's, one-sidedly.

An agent is not thread-safe, so one thread at a time touches it. Its own progress thread sleeps on what UCX
gives it to wait for; with NIXL's own setting it would take a whole core.
"""

from __future__ import annotations

import importlib
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import TrainingError

MODULES = ("nixl_cu12", "nixl_cu13")
"""For CUDA 12 and 13; either will do for host memory. Their wheels also want torch, which nothing uses."""

PROGRESS_MICROSECONDS = 100_000
"""The progress thread looks around at least so often, and whenever something comes."""

NETWORKS, LOOPBACK = "UCX_NET_DEVICES", "lo"

ERRORS = "ucx_error_handling_mode"
"""With "peer" UCX tells of dead peers, and on one machine it then ends every write by a message by TCP, since
its way through shared memory knows of none. There a write to a dead process fails, or does not end; that it
is dead is heard by the mailbox."""


class NixlAbsent(Exception):
    """NIXL cannot be used here; says why."""


class WriteFailed(Exception):
    """A write has failed; says why."""


class MemoryRange(NamedTuple):
    """A stretch of memory, in bytes; `device` is 0 for the host's."""

    address: int
    size: int
    device: int


class Stretch(NamedTuple):
    """What is written: from here to there."""

    here: MemoryRange
    there: MemoryRange


def bindings(here: bool = False) -> ModuleType:
    """NIXL, or `NixlAbsent`; `here` says whether all other processes are on this machine."""
    ENVIRONMENT.setdefault("UCX_LOG_LEVEL", "error")  # its warnings go to standard output
    if here:
        ENVIRONMENT.setdefault(NETWORKS, LOOPBACK)  # else it listens on all networks
    reasons = []
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            reasons.append(f"{error}")
    raise NixlAbsent(f"NIXL cannot be imported: {'; '.join(reasons)}")


class Agent:
    """This process's agent, over UCX; its name nobody can guess. What fails raises `WriteFailed`.

    Args:
        on_devices: whether memory is that of GPUs.
        here: whether all other processes are on this machine.

    Raises:
        Absent: NIXL or its UCX is not here.
    """

    def __init__(self, on_devices: bool, here: bool) -> None:
        self.on_devices, self.here = on_devices, here
        self._nixl = nixl = bindings(here)
        self._kind = nixl.VRAM_SEG if on_devices else nixl.DRAM_SEG
        self.name = f"rrfp-{secrets.token_hex(16)}"
        config = nixl.nixlAgentConfig(True)
        config.pthrDelay = PROGRESS_MICROSECONDS
        try:
            self._agent = nixl.nixlAgent(self.name, config)
            self._backends = [self._agent.createBackend("UCX", {ERRORS: "none" if here else "peer"})]
        except Exception as error:  # of the bindings' own kinds
            raise NixlAbsent(f"NIXL has no UCX here: {error}") from None
        self._lock = threading.RLock()
        self._known: Counter[MemoryRange] = Counter()  # registered, and how often

    @property
    def metadata(self) -> bytes:
        """What another agent must know to reach this one."""
        with self._lock:
            return bytes(self._agent.getLocalMD())

    def meet(self, metadata: bytes) -> str:
        """Know another agent, or more of its memory, until `forget`; its name."""
        return str(self.call(self._agent.loadRemoteMD, metadata).decode())

    def forget(self, name: str) -> None:
        """Know nothing of another agent any more, nor of its memory."""
        self.call(self._agent.invalidateRemoteMD, name)

    def register(self, memory: Sequence[MemoryRange]) -> None:
        """Let memory be written from, or to."""
        with self._lock:
            new = [each for each in dict.fromkeys(memory) if not self._known[each]]
            if new:
                self.call(lambda: self._agent.registerMem(self._list(new), self._backends))
            self._known.update(memory)

    def describe(self, memory: Sequence[MemoryRange]) -> bytes:
        """What other agents must know of registered memory, to write there."""
        with self._lock:
            return bytes(self._agent.getLocalPartialMD(self._list(memory), False, self._backends))

    def release(self, memory: Sequence[MemoryRange]) -> None:
        """The opposite of `register`, for each of its calls one."""
        with self._lock:
            self._known.subtract(memory)
            gone = [each for each in dict.fromkeys(memory) if not self._known[each]]
            for each in gone:
                del self._known[each]
            if gone:
                self._agent.deregisterMem(self._list(gone), self._backends)

    def write(self, to: str, stretches: Sequence[Stretch]) -> Writing:
        """Begin to write from registered memory into that of another agent."""
        return Writing(self, self.call(self._request, to, stretches))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of the agent gives."""
        try:
            with self._lock:
                return function(*arguments)
        except Exception as error:  # of the bindings' own kinds
            raise WriteFailed(str(error)) from None

    def progress(self, request: int, begin: bool) -> bool:
        """Begin a write, or look at it; whether it has ended, and then it is let go."""
        status = self.call(self._agent.postXferReq if begin else self._agent.getXferStatus, request)
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise WriteFailed(str(status))
        if status == self._nixl.NIXL_IN_PROG:
            return False
        self.call(self._agent.releaseXferReq, request)
        return True

    def check_strangers(self) -> None:
        """Refuse notifications: no process of a run sends any, so whoever does is none.

        Raises:
            TrainingError: somebody has.
        """
        with self._lock:
            told = self._agent.getNotifs({}, self._backends)
        if told:
            raise TrainingError(
                f"NIXL's agent was notified by {sorted(told)[0]!r}, and no process of this run does that: "
                f"somebody else reaches it. Let only the run's machines reach each other, or take "
                f"transport='socket'"
            )

    def _request(self, to: str, stretches: Sequence[Stretch]) -> int:
        here, there = (
            self._nixl.nixlXferDList(self._kind, [tuple(each) for each in side])
            for side in zip(*stretches, strict=True)
        )
        write = self._nixl.NIXL_WRITE
        return int(self._agent.createXferReq(write, here, there, to, "", self._backends))

    def _list(self, memory: Sequence[MemoryRange]) -> Any:
        return self._nixl.nixlRegDList(self._kind, [(*each, "") for each in memory])


class Peers:
    """The agents of the other processes, by rank, each met when it is first needed."""

    def __init__(self, agent: Agent, metadata: Mapping[int, bytes]) -> None:
        self._agent, self._metadata = agent, metadata
        self._names: dict[int, str] = {}

    def name(self, rank: int) -> str:
        """The name of a rank's agent."""
        if rank not in self._names:
            self._names[rank] = self._agent.meet(self._metadata[rank])
        return self._names[rank]

    def know(self, rank: int, metadata: bytes) -> None:
        """Know more of a rank's memory; NIXL must have met its agent before."""
        name = self.name(rank)
        if self._agent.meet(metadata) != name:
            raise WriteFailed("what it tells is of another agent")

    def forget(self) -> None:
        """Meet everybody anew: what memory they had for a trial is gone."""
        for name in self._names.values():
            self._agent.forget(name)
        self._names.clear()


class Writing:
    """A write under way."""

    def __init__(self, agent: Agent, request: int) -> None:
        self._agent, self._request = agent, request
        self._ended = agent.progress(request, True)

    def has_ended(self) -> bool:
        """Whether all is at its destination."""
        self._ended = self._ended or self._agent.progress(self._request, False)
        return self._ended
