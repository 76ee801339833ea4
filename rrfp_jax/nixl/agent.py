"""NIXL's agent: it writes from this process's memory into another's, one-sidedly.

An agent is not thread-safe, so one thread at a time touches it. Its own progress thread sleeps on what UCX
gives it to wait for; with NIXL's own setting it would take a whole core. Nothing here imports JAX.
"""

from __future__ import annotations

import importlib
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter, sleep
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.run.waits import pause

NETWORKS, LOOPBACK = "UCX_NET_DEVICES", "lo"

ERRORS = "ucx_error_handling_mode"
"""With "peer" UCX reports dead peers, and on one machine it then ends every write by a message by TCP, since
its way through shared memory cannot report any. There a write to a dead process fails, or does not end; that
the process is dead is heard by the mailbox."""

MOST_IDLE = 64
"""Stretches that stay registered, of those from which nothing is being written."""


HasEnded: TypeAlias = Callable[[], bool]
"""Whether all of a write is at its destination; not to be asked again once it is."""


class NixlAbsent(Exception):
    """NIXL cannot be used here; says why."""


class WriteFailed(Exception):
    """A call of NIXL has failed; says why."""


class MemoryRange(NamedTuple):
    """A stretch of memory, in bytes; `device` is 0 for the host's."""

    address: int
    size: int
    device: int

    def overlaps(self, other: MemoryRange) -> bool:
        """Whether both have a byte in common."""
        first, second = sorted((self, other))
        return self.device == other.device and first.address + first.size > second.address


def bindings(here: bool) -> ModuleType:
    """NIXL, or `NixlAbsent`; `here` says whether all other processes are on this machine."""
    ENVIRONMENT.setdefault("UCX_LOG_LEVEL", "error")  # its warnings go to standard output
    if here:
        ENVIRONMENT.setdefault(NETWORKS, LOOPBACK)  # else it listens on all networks
    reasons = []
    # For CUDA 12 and 13; either will do for host memory. Their wheels also want torch, which nothing uses.
    for name in ("nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            reasons.append(f"{error}")
    raise NixlAbsent(f"NIXL cannot be imported: {'; '.join(reasons)}")


class Agent:
    """This process's agent, over UCX; its name nobody can guess. What fails raises `WriteFailed`.

    `on_devices` says whether memory is that of GPUs, `here` whether all other processes are on this machine.
    `NixlAbsent` is raised where NIXL or its UCX is missing.
    """

    def __init__(self, on_devices: bool, here: bool) -> None:
        self.on_devices, self.here = on_devices, here
        self._nixl = nixl = bindings(here)
        self._kind = nixl.VRAM_SEG if on_devices else nixl.DRAM_SEG
        self.name = f"rrfp-{secrets.token_hex(16)}"
        config = nixl.nixlAgentConfig(True)
        # The progress thread looks around so often (microseconds), and whenever something comes.
        config.pthrDelay = 100_000
        try:
            self._agent = nixl.nixlAgent(self.name, config)
            self._backends = [self._agent.createBackend("UCX", {ERRORS: "none" if here else "peer"})]
        except Exception as error:  # of the bindings' own kinds
            raise NixlAbsent(f"NIXL has no UCX here: {error}") from None
        self._lock = threading.Lock()
        self._known: Counter[MemoryRange] = Counter()  # registered, and how often
        self.peers: dict[int, bytes] = {}  # metadata by rank; each is met when it is first needed
        self._names: dict[int, str] = {}  # of the peers that have been met

    @property
    def metadata(self) -> bytes:
        """What another agent must know to reach this one."""
        return bytes(self._call(self._agent.getLocalMD))

    def name_of(self, rank: int) -> str:
        if rank not in self._names:
            self._names[rank] = self._call(self._agent.loadRemoteMD, self.peers[rank]).decode()
        return self._names[rank]

    def know(self, rank: int, metadata: bytes) -> None:
        """Know more of a rank's memory; NIXL must have met its agent before."""
        if self.name_of(rank) != self._call(self._agent.loadRemoteMD, metadata).decode():
            raise WriteFailed("what it tells is of another agent")

    def forget_peers(self) -> None:
        """Meet everybody anew: what memory they had for a trial is gone."""
        for name in self._names.values():
            self._call(self._agent.invalidateRemoteMD, name)
        self._names.clear()

    def register(self, memory: Sequence[MemoryRange]) -> None:
        """Let memory be written from, or to."""
        if new := [each for each in dict.fromkeys(memory) if not self._known[each]]:
            self._call(lambda: self._agent.registerMem(self._list(new), self._backends))
        self._known.update(memory)

    def describe(self, memory: Sequence[MemoryRange]) -> bytes:
        """What other agents must know of registered memory, to write there."""
        tell = self._agent.getLocalPartialMD
        return bytes(self._call(lambda: tell(self._list(memory), False, self._backends)))

    def release(self, memory: Sequence[MemoryRange]) -> None:
        """The opposite of `register`, for each of its calls one."""
        self._known.subtract(memory)
        gone = [each for each in dict.fromkeys(memory) if not self._known[each]]
        for each in gone:
            del self._known[each]
        if gone:
            self._call(lambda: self._agent.deregisterMem(self._list(gone), self._backends))

    def write(self, rank: int, here: Sequence[MemoryRange], there: Sequence[MemoryRange]) -> HasEnded:
        """Begin to write from registered memory into that of another rank's agent."""
        request = self._call(self._request, self.name_of(rank), here, there)
        ended = self._progress(self._agent.postXferReq, request)
        return lambda: ended or self._progress(self._agent.getXferStatus, request)

    def write_within(
        self, seconds: float, rank: int, here: Sequence[MemoryRange], there: Sequence[MemoryRange]
    ) -> float:
        """Write, and wait until all is there; how long that took."""
        began, has_ended = perf_counter(), self.write(rank, here, there)
        while not has_ended():
            if (waited := perf_counter() - began) > seconds:
                size = sum(each.size for each in here)
                raise WriteFailed(f"{size} bytes were not written in {seconds:.0f} s")
            sleep(pause(waited))
        return perf_counter() - began

    def check_strangers(self) -> None:
        """Refuse notifications: no process of a run sends any."""
        if told := self._call(self._agent.getNotifs, {}, self._backends):
            raise TrainingError(
                f"NIXL's agent was notified by {sorted(told)[0]!r}, and no process of this run does that: "
                f"somebody else reaches it. Let only the run's machines reach each other, or take "
                f"transport='socket'"
            )

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with self._lock:
                return function(*arguments)
        except Exception as error:  # of the bindings' own kinds
            raise WriteFailed(str(error)) from None

    def _progress(self, look: Callable[[int], Any], request: int) -> bool:
        """Whether a write that is begun, or looked at, has ended; then it is let go."""
        status = self._call(look, request)
        if status == self._nixl.NIXL_IN_PROG:
            return False
        if status != self._nixl.NIXL_SUCCESS:
            raise WriteFailed(str(status))
        self._call(self._agent.releaseXferReq, request)
        return True

    def _request(self, to: str, here: Sequence[MemoryRange], there: Sequence[MemoryRange]) -> int:
        ends = (self._nixl.nixlXferDList(self._kind, [tuple(each) for each in end]) for end in (here, there))
        return int(self._agent.createXferReq(self._nixl.NIXL_WRITE, *ends, to, "", self._backends))

    def _list(self, memory: Sequence[MemoryRange]) -> Any:
        return self._nixl.nixlRegDList(self._kind, [(*each, "") for each in memory])


class Sources:
    """Memory that messages are written from; it stays registered for a while, for the next messages."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        own_pool = ENVIRONMENT.get("XLA_PYTHON_CLIENT_ALLOCATOR", "") in ("", "default", "bfc")
        nothing_is_pinned = agent.here and ENVIRONMENT.get(NETWORKS) == LOOPBACK
        self._keeps = own_pool if agent.on_devices else nothing_is_pinned
        self._idle: dict[MemoryRange, None] = {}  # registered, the oldest first

    def take(self, memory: Sequence[MemoryRange]) -> None:
        """Register what is going to be written from; `WriteFailed` if that cannot be."""
        memory = list(dict.fromkeys(memory))
        if new := [each for each in memory if each not in self._idle]:
            gone = [old for old in self._idle if any(map(old.overlaps, new))]  # what lies there is another
            self._let_go(gone)
            self._agent.register(new)
        for each in memory:
            self._idle.pop(each, None)

    def leave(self, memory: Sequence[MemoryRange]) -> None:
        """Note that a write from there has ended, once for each `take`."""
        memory = list(dict.fromkeys(memory))
        if again := [each for each in memory if not self._keeps or each in self._idle]:
            self._agent.release(again)
        if self._keeps:
            self._idle.update(dict.fromkeys(memory))
            self._let_go(list(self._idle)[: max(len(self._idle) - MOST_IDLE, 0)])

    def _let_go(self, idle: Sequence[MemoryRange]) -> None:
        if idle:
            self._agent.release(idle)
        for each in idle:
            del self._idle[each]
