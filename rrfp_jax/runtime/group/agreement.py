"""One process's part in its group's agreement: the core's machine, what carries its messages, and checks.

It stands between the driver and the stage scheduler, and looks like a scheduler. When it is told an event, it
gives the driver's instructions, and sends the messages among them. Messages are received at any time, and
told to the machine when the device has room, because only then can something follow from them.

Decisions are made ahead. Each process measures, by rank 0's clock, how long messages took to reach it, and
tells that when a step ends. A process's device has room earlier by the time that nine of ten of its messages
took. When a step ends, the hashes of all that each rank has dispatched are compared, too (dispatch_hash.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from rrfp_jax.core.events import Dispatch, Event, Room
from rrfp_jax.core.group.group import Alone, GroupProtocol, Member, member, partners
from rrfp_jax.core.group.messages import Answer, Decision, GroupMessage
from rrfp_jax.core.measure.trace import TaskRecord
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.group.carrier import Carrier, Plain, SocketCarrier
from rrfp_jax.runtime.group.dispatch_hash import OrderHash, check_orders
from rrfp_jax.runtime.group.store_carrier import StoreCarrier
from rrfp_jax.runtime.processes.world import World

CarrierName: TypeAlias = Literal["kv", "socket"]

FIRST_LEAD_SECONDS = 2e-3
"""How far ahead decisions are made until their way has been measured."""

LONGEST_LEAD_SECONDS = 0.05

MEASURED = 256
"""Latest messages whose way counts."""

KINDS: Sequence[type[GroupMessage]] = get_args(GroupMessage)
"""A message travels as its number here and its fields."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How the processes of a stage agree on the order of its tasks.

    Attributes:
        agreement: by what they send: "kv", the key-value store of `jax.distributed`, or "socket", the control
            sockets.
        protocol: "leader", the first process decides, or "unanimous", all vote.

    Raises:
        UsageError: an unknown agreement or protocol.
    """

    agreement: CarrierName = "kv"
    protocol: GroupProtocol = "leader"

    def __post_init__(self) -> None:
        if self.agreement not in get_args(CarrierName):
            raise UsageError(f"agreement={self.agreement!r}: choose 'kv' or 'socket'")
        if self.protocol not in get_args(GroupProtocol):
            raise UsageError(f"protocol={self.protocol!r}: choose 'leader' or 'unanimous'")


class Agreement:
    """See above. Made by all processes of a run together, before the first step; those alone need no machine.

    Args:
        world: the run.
        groups: by stage replica (see `Layout`), the ranks that share it; this process is in one of them.
        terms: how they agree.

    Attributes:
        carrier: of its messages, to be opened for every step.
    """

    def __init__(self, world: World, groups: Sequence[Sequence[int]], terms: Terms) -> None:
        self._world, self._groups, self._protocol = world, groups, terms.protocol
        self._group = next(ranks for ranks in groups if world.rank in ranks)
        self._member = self._group.index(world.rank)
        others = [self._group[i] for i in partners(self._member, len(self._group), terms.protocol)]
        self.carrier = _carrier(world, others, terms.agreement)
        self._decides = self._member == 0 or terms.protocol == "unanimous"
        self._lead = FIRST_LEAD_SECONDS
        self._round, self._began = 0, 0.0
        self._machine: Member
        self._early: list[Plain] = []  # of a step that has not begun here
        self._heard: deque[GroupMessage] = deque()
        self._ways: deque[float] = deque(maxlen=MEASURED)  # seconds that messages took
        self._order = OrderHash()

    def begin(self, round: int, scheduler: StageScheduler) -> None:
        """A step begins, in this round, with a new scheduler of this process's stage."""
        self._round, self._began = round, perf_counter()
        self._machine = member(scheduler, self._member, len(self._group), self._protocol)
        self._heard.clear()
        self._world.recorder.board.joins(self._group)
        early, self._early = self._early, []
        for message in early:
            self._file(message)

    @property
    def alone(self) -> bool:
        """Whether this process has its stages to itself: there is nothing to agree on."""
        return len(self._group) == 1

    @property
    def lead(self) -> float:
        """By how much earlier than without a group (s) this process's device must have room in this step."""
        return 0.0 if isinstance(self._machine, Alone) or not self._decides else self._lead

    def hear(self) -> bool:
        """Take in what has come, to be told to the machine at the next room; whether anything has.

        Raises:
            TrainingError: see `Carrier.poll`.
        """
        come = self.carrier.poll()
        for message in come:
            self._file(message)
        return bool(come)

    def handle(self, event: Event) -> Dispatch | None:
        """See `StageScheduler.handle`."""
        if isinstance(event, Room):
            while self._heard:
                if (dispatch := self._sent(self._machine.handle(self._heard.popleft()))) is not None:
                    return dispatch
        return self._sent(self._machine.handle(event))

    def awaited(self) -> str:
        """See `StageScheduler.awaited`."""
        ranks = ", ".join(map(str, self._group))
        return f"{self._machine.awaited()} (its group is ranks {ranks})"

    def account(self, records: Sequence[TaskRecord]) -> dict[str, Any]:
        """What the group's other processes must know of a step when it ends, as plain data."""
        ways = sorted(self._ways)
        return {
            "hash": self._order.add(record.task for record in records),
            "way": ways[len(ways) * 9 // 10] if ways else None,
            "heard": dict(self.carrier.heard()),
        }

    def settle(self, accounts: Sequence[Mapping[str, Any]], step: int) -> None:
        """Go by the accounts of all processes, by rank; all call this at the same point.

        Raises:
            Disagreement: processes of a stage have dispatched different tasks.
        """
        check_orders(self._world, self._groups, [own["hash"] for own in accounts], self._order, step)
        others = [accounts[rank] for rank in self._group if rank != self._world.rank]
        ways = [own["way"] for own in others if own["way"] is not None]
        way = max(ways, default=self._lead)  # by clocks that are not exact: it may come out negative
        self._lead = min(max(way, 0.0), LONGEST_LEAD_SECONDS)
        heard = [own["heard"][self._world.rank] for own in others if self._world.rank in own["heard"]]
        self.carrier.forget(min(heard, default=0))

    def close(self) -> None:
        """No step follows; returns at once, and does nothing the second time."""
        self.carrier.close()

    def _sent(self, answer: Answer) -> Dispatch | None:
        """Send an answer's message; the rest is for the driver."""
        dispatch, message = answer
        if message is not None:
            self._world.recorder.board.told()
            kind, now = KINDS.index(type(message)), perf_counter() + self._world.clock[0]
            self.carrier.post([self._round, now, kind, message])
        return dispatch

    def _file(self, plain: Plain) -> None:
        round, sent, kind, message = plain
        if round > self._round:
            self._early.append(plain)
        elif round == self._round:
            sent -= self._world.clock[0]
            if sent > self._began:  # else it may have waited for this process
                self._ways.append(perf_counter() - sent)
            said = msgspec.convert(message, KINDS[kind])
            self._world.recorder.board.heard(0 if isinstance(said, Decision) else said.rank)
            self._heard.append(said)


def _carrier(world: World, partners: Sequence[int], name: CarrierName) -> Carrier:
    if name == "socket":
        return SocketCarrier(world, partners)
    assert world.mailbox is not None and world.store is not None
    number, ring = world.next_round(), world.mailbox.ring
    carrier = StoreCarrier(world.store, f"group/{number}", world.rank, partners, ring, world.silence_seconds)
    world.leaving.at_last(carrier.leave)
    return carrier
