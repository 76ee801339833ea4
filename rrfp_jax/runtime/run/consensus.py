"""One process's part in its group's agreement: the core's machine, what carries its messages, and checks.

It stands between the driver and the stage scheduler, and looks like a scheduler. Messages are received at any
time, and told to the machine when the device has room, because only then can something follow from them.

Decisions are made ahead. Each process measures, by rank 0's clock, how long messages took to reach it, and
tells that when a step ends. A process's device has room earlier by the time that nine of ten of its messages
took. When a step ends, the hashes of all that each rank has dispatched are compared, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from hashlib import blake2b
from math import inf
from queue import SimpleQueue
from struct import Struct
from time import perf_counter
from typing import Any, Literal, Protocol, TypeAlias, get_args

import msgspec

from rrfp_jax.core.events import Dispatch, Event, Room, Wait
from rrfp_jax.core.group import Alone, Decision, GroupMessage, GroupProtocol, Member, member, partners
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import Task
from rrfp_jax.errors import Disagreement, TrainingError
from rrfp_jax.runtime.run.mailbox import Message, encoded
from rrfp_jax.runtime.run.token import SealedStore
from rrfp_jax.runtime.run.world import World
from rrfp_jax.trace.records import TaskRecord

Plain: TypeAlias = Sequence[Any]
"""A message as plain data."""

Ring: TypeAlias = Callable[[], None]
"""Wakes the driver."""


class Carrier(AbstractContextManager["Carrier"], Protocol):
    """Carries messages to a process's partners and back; entered for a step, and idle outside."""

    def post(self, message: Plain) -> None:
        """Tell all partners; returns at once."""

    def poll(self) -> list[Plain]:
        """Messages since the last call; later ones wake the driver. Raises TrainingError if out of order."""

    def heard(self) -> Mapping[int, int]:
        """How many batches of messages have come of each partner's rank, if they are kept until forgotten."""
        return {}

    def forget(self, batches: int) -> None:
        """All partners have so many of this process's batches, which need not be kept any longer."""
        return None

    def close(self) -> None:
        """No step follows; returns at once, and does nothing the second time."""

    def __exit__(self, *_: object) -> None:
        return None


class Told(Message, frozen=True):
    """A group's message, by the control sockets."""

    said: list[Any]


class SocketCarrier(Carrier):
    """By the control sockets. Made by all processes of a run together, before the first step."""

    def __init__(self, world: World, partners: Sequence[int]) -> None:
        assert world.mailbox is not None
        self._mailbox, self._partners = world.mailbox, partners
        self._channel = world.next_round()
        self._come: list[Plain] = []
        self._mailbox.on(Told, lambda rank, told: self._come.append(told.said), self._channel)

    def post(self, message: Plain) -> None:
        for rank in self._partners:
            self._mailbox.post(rank, Told(list(message)), self._channel)

    def poll(self) -> list[Plain]:
        self._mailbox.pump()
        come, self._come = self._come, []
        return come

    def close(self) -> None:
        self._mailbox.off(self._channel)


POLL_SECONDS = 2.0
"""How long one call waits for a batch before it asks anew."""

JOIN_SECONDS = 1.0

LOOK_SECONDS = 1.0
"""A driver that waits polls at least as often."""

BLOCK = 64
"""Batches that are deleted together."""


class StoreCarrier(Carrier):
    """By the key-value store: a thread writes, one for each partner reads; all rest between steps."""

    def __init__(
        self, store: SealedStore, name: str, rank: int, partners: Sequence[int], ring: Ring, silence: float
    ) -> None:
        self._store, self._name, self._rank = store, f"rrfp/{name}", rank
        self._ring, self._silence = ring, silence
        self._outbox: SimpleQueue[Plain | str | None] = SimpleQueue()  # messages; folders to delete; the end
        self._come: deque[bytes] = deque()
        self._heard = dict.fromkeys(partners, 0)
        self._forgotten = 0  # blocks
        # When the call under way will be, by the partner that a thread serves; for writing by the own rank.
        self._overdue = dict.fromkeys([rank, *partners], inf)
        self._looked, self._excused = perf_counter(), 0.0  # when last; until when silence says nothing
        self._failure: RuntimeError | None = None
        self._open, self._closed = threading.Event(), False
        bodies = [self._write, *(partial(self._read, partner) for partner in partners)]
        make = partial(threading.Thread, target=_until_failure, name="rrfp-group", daemon=True)
        self._threads = [make(args=[body]) for body in bodies]

    def post(self, message: Plain) -> None:
        self._outbox.put(message)

    def poll(self) -> list[Plain]:
        come: list[Plain] = []
        while self._come:
            come += msgspec.msgpack.decode(self._come.popleft(), type=list[list[Any]])
        what = "the key-value store, through which its group agrees on what to run,"
        if self._failure is not None:
            raise TrainingError(f"{what} failed: {self._failure}")
        now = perf_counter()
        if now - self._looked > LOOK_SECONDS + self._silence / 2:
            self._excused = now + self._silence  # this process stood still (Ctrl-Z): so may the store have
        self._looked = now
        if min(self._overdue.values()) < now and self._excused < now:
            raise TrainingError(
                f"{what} has not answered for {self._silence:g} s: is the process that serves it, started by "
                f"the launcher or rank 0, frozen or cut off?"
            )
        return come

    def heard(self) -> Mapping[int, int]:
        return dict(self._heard)

    def forget(self, batches: int) -> None:
        while self._forgotten < batches // BLOCK:
            self._outbox.put(f"{self._name}/{self._rank}/{self._forgotten}")
            self._forgotten += 1

    def __enter__(self) -> StoreCarrier:
        self._open.set()
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def close(self) -> None:
        """End the threads, within a long poll, and delete what this process wrote."""
        if not self._closed:
            self._end(f"{self._name}/{self._rank}", None)

    def leave(self) -> None:
        """End the threads, whose calls have ended: one inside the client would abort Python's end."""
        self._end(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(JOIN_SECONDS)

    def _end(self, *last: str | None) -> None:
        self._closed = True
        for item in last:
            self._outbox.put(item)
        self._open.set()

    def _write(self) -> None:
        number, items = 0, list[Plain | str | None]()
        while None not in items:
            items = [self._outbox.get()]
            while not self._outbox.empty():
                items.append(self._outbox.get())
            if messages := [item for item in items if item is not None and not isinstance(item, str)]:
                key, batch = self._key(self._rank, number), encoded(messages)
                self._call(self._rank, 0.0, self._store.key_value_set_bytes, key, batch)
                number += 1
            for item in items:
                if isinstance(item, str):
                    self._call(self._rank, 0.0, self._store.key_value_delete, item)

    def _read(self, partner: int) -> None:
        limit, get = int(1000 * POLL_SECONDS), self._store.blocking_key_value_get_bytes
        while self._open.wait() and not self._closed:
            key = self._key(partner, self._heard[partner])
            try:
                self._come.append(self._call(partner, POLL_SECONDS, get, key, limit))
            except TimeoutError:
                # By the client's own clock: ask for something that only the store can answer.
                self._call(partner, 0.0, self._store.key_value_dir_get_bytes, f"{key}/none")
            else:
                self._heard[partner] += 1
                self._ring()

    def _call(self, who: int, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the store, which may take so many seconds and the time after which it counts as silent.

        TimeoutError says that it is out of time, for which it must have been given some.
        """
        self._overdue[who] = perf_counter() + seconds + self._silence
        try:
            return function(*arguments)
        except RuntimeError as error:
            if seconds and "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError from None
            self._failure = error
            self._ring()
            raise
        finally:
            self._overdue[who] = inf

    def _key(self, rank: int, number: int) -> str:
        return f"{self._name}/{rank}/{number // BLOCK}/{number}"


def _until_failure(body: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # it has been noted
        body()


TASK = Struct("<Bii")  # kind, chunk, microbatch


class OrderHash:
    """Hashes all that this process has dispatched; the hash is equal in any version of Python."""

    def __init__(self) -> None:
        self._hash, self.count = blake2b(digest_size=8), 0
        self.latest: Sequence[Task] = ()

    def add(self, tasks: Iterable[Task]) -> str:
        """Take in a step's tasks; the hash with them."""
        self.count += len(self.latest)
        self.latest = list(tasks)
        self._hash.update(b"".join(TASK.pack(*task) for task in self.latest))
        return self._hash.hexdigest()


def check_orders(
    world: World, groups: Sequence[Sequence[int]], hashes: Sequence[str], own: OrderHash, step: int
) -> None:
    """Raise Disagreement, with both tasks, if the hashes of a group differ; then all tell what they ran."""
    odd = [(group[0], rank) for group in groups for rank in group if hashes[rank] != hashes[group[0]]]
    if not odd:
        return
    orders = world.gather("the orders of dispatch", [str(task) for task in own.latest])
    for one, other in odd:
        numbered = [dict(enumerate(orders[rank], own.count + 1)) for rank in (one, other)]
        if (number := first_difference(*numbered)) is not None:
            said = difference(world.describe(one), world.describe(other), number, step, *numbered)
            raise Disagreement(said, other)
    raise Disagreement(f"{world.describe(odd[0][1])} has dispatched other tasks than its group", odd[0][1])


def first_difference(one: Mapping[int, object], other: Mapping[int, object]) -> int | None:
    """The first position that both have and at which they differ."""
    return min((at for at in one.keys() & other.keys() if one[at] != other[at]), default=None)


def difference(
    one: str, other: str, number: int, step: int, tasks: Mapping[int, object], others: Mapping[int, object]
) -> str:
    """What two processes of a stage dispatched at a position, in words."""
    return (
        f"{one} and {other} dispatched different tasks as number {number}, in step {step}: the first "
        f"{tasks[number]}, the second {others[number]}; the programs of a stage must run in one order on all "
        f"its processes"
    )


CarrierName: TypeAlias = Literal["kv", "socket"]

FIRST_LEAD_SECONDS, LONGEST_LEAD_SECONDS = 2e-3, 0.05
"""How far ahead decisions are made until their way has been measured, and at most."""

MEASURED = 256
"""Latest messages whose way counts."""

KINDS: Sequence[type[GroupMessage]] = get_args(GroupMessage)
"""A message travels as its number here and its fields."""


class Agreement:
    """Made by all processes of a run together, before the first step. `carrier` is entered for every step.

    Args:
        world: the run's processes.
        groups: the ranks of each stage.
        carrier: what carries the messages.
        protocol: "leader", the first process decides, or "unanimous", all vote.
    """

    def __init__(
        self, world: World, groups: Sequence[Sequence[int]], carrier: CarrierName, protocol: GroupProtocol
    ) -> None:
        self._world, self._groups, self._protocol = world, groups, protocol
        self._group = next(ranks for ranks in groups if world.rank in ranks)
        self._member = self._group.index(world.rank)
        others = [self._group[i] for i in partners(self._member, len(self._group), protocol)]
        if carrier == "socket":
            self.carrier: Carrier = SocketCarrier(world, others)
        else:
            assert world.mailbox is not None and world.store is not None
            name, silence = f"group/{world.next_round()}", world.membership.silence
            by_store = StoreCarrier(world.store, name, world.rank, others, world.mailbox.ring, silence)
            self.carrier = by_store
            world.at_last.append(by_store.leave)
        self.alone = len(self._group) == 1  # then there is nothing to agree on
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
        self._world.recorder.joins(self._group)
        early, self._early = self._early, []
        for message in early:
            self._file(message)

    @property
    def lead(self) -> float:
        """By how much earlier than without a group (s) this process's device must have room in this step."""
        decides = self._member == 0 or self._protocol == "unanimous"
        return self._lead if decides and not isinstance(self._machine, Alone) else 0.0

    def hear(self) -> bool:
        """Take in what has come, to be told to the machine at the next room; whether anything has."""
        come = self.carrier.poll()
        for message in come:
            self._file(message)
        return bool(come)

    def handle(self, event: Event) -> Dispatch | None:
        """Tell the machine an event, before a room all that was heard, and send what it has to say."""
        while True:
            hears = isinstance(event, Room) and bool(self._heard)
            dispatch, message = self._machine.handle(self._heard.popleft() if hears else event)
            if message is not None:
                self._world.recorder.told()
                kind, now = KINDS.index(type(message)), perf_counter() + self._world.clock[0]
                self.carrier.post([self._round, now, kind, message])
            if dispatch is not None or not hears:
                return dispatch

    def awaited(self, named: bool = True) -> Wait:
        return self._machine.awaited(named)._replace(group=tuple(self._group))

    def account(self, records: Sequence[TaskRecord]) -> dict[str, Any]:
        """What the group's other processes must know of a step when it ends, as plain data."""
        ways = sorted(self._ways)
        return {
            "hash": self._order.add(record.task for record in records),
            "way": ways[len(ways) * 9 // 10] if ways else None,
            "heard": self.carrier.heard(),
        }

    def settle(self, accounts: Sequence[Mapping[str, Any]], step: int) -> None:
        """Go by the accounts of all processes, by rank; all call this together. Raises Disagreement."""
        check_orders(self._world, self._groups, [own["hash"] for own in accounts], self._order, step)
        others = [accounts[rank] for rank in self._group if rank != self._world.rank]
        ways = [own["way"] for own in others if own["way"] is not None]
        way = max(ways, default=self._lead)  # by clocks that are not exact: it may come out negative
        self._lead = min(max(way, 0.0), LONGEST_LEAD_SECONDS)
        heard = [own["heard"][self._world.rank] for own in others if self._world.rank in own["heard"]]
        self.carrier.forget(min(heard, default=0))

    def _file(self, plain: Plain) -> None:
        round, sent, kind, message = plain
        if round > self._round:
            self._early.append(plain)
        elif round == self._round:
            sent -= self._world.clock[0]
            if sent > self._began:  # else it may have waited for this process
                self._ways.append(perf_counter() - sent)
            said = msgspec.convert(message, KINDS[kind])
            self._world.recorder.heard(0 if isinstance(said, Decision) else said.rank)
            self._heard.append(said)
