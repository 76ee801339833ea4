"""When an input on its way may count as here: what a host expects of its devices.

Between the end of a program and the start of the next, a host takes a round trip: half to notice, half to
launch. A device that waits for that stands still. So a task may be dispatched before its input is here, if
that is expected before the device could run anything else:

    now + MARGIN * (arrival - now)  <=  max(end of its queue, now) + a round trip

The later an input is expected, the less there is to gain. What is foreseen wrongly holds up the device, as
programs run in order; hence the margin. A round trip is allowed for, as that is what waiting for the input
costs. If a device's programs end later than the margin allows for, by more than a round trip on average, what
they compute never counts as sure to come. If nothing else can run, nothing is held up: then whatever is
expected within `SECOND` round trips is foreseen. A fixed order has no choice to lose: there, whatever is on
its way is foreseen.

A device has room by time: for a second program when the first may end within `SECOND` round trips, for more
when all are expected to within `FURTHER`. Under a fixed order it has room for `ORDERED_SECONDS` of work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf
from typing import Literal, Protocol, TypeAlias

from rrfp_jax.core.events import ROOM, Room
from rrfp_jax.core.tasks import Input

Dispatching: TypeAlias = Literal["ready", "foreseen"]
"""Whether only tasks are dispatched whose inputs are here, or also those whose inputs are foreseen."""

ROUND_TRIP_SECONDS = 200e-6
"""From the end of a program to the start of the next, if the host has waited for it."""

MARGIN = 1.25
"""By how much longer than expected an input may take to come."""

OVERDUE = 0.1
"""A program that has taken longer than usual is expected to take so much more of what it has taken."""

SPREAD = 0.1
"""Durations vary; "may end" allows for twice their mean deviation, up to this share of their mean."""

SECOND, FURTHER = 5, 2
"""See above."""

ORDERED_SECONDS = 0.05
"""So much may be dispatched where there is no choice to lose: the host need not wake for every program."""

DEEPEST = 8
"""Programs on a device at most."""


class Line(Protocol):
    """A device, as the host knows it; times in seconds, as below."""

    free: float  # when it had ended what was there before `flights`
    late: float  # by how much its programs that send take longer than `MARGIN` allows for, in the mean

    @property
    def flights(self) -> Iterable[Flight]:
        """The programs on it that have not ended, in order."""


class Flight(Protocol):
    """A program that has been dispatched, as the host knows it."""

    dispatched: float
    end: float  # 0 until it is noticed
    copy: float  # from the end of what computes its input to the arrival
    usual: float | None  # how long it usually takes; None if nobody knows
    varies: float  # by how much, in the mean

    @property
    def after(self) -> Flight | None:
        """What computes its input, if that was not here."""

    @property
    def line(self) -> Line:
        """Its device."""


def expected_end(line: Line, now: float, upto: Flight | None = None) -> float:
    """When all programs on a device, or those up to one of them, will have ended; inf if unknown."""
    end = line.free
    for flight in line.flights:
        start = max(end, flight.dispatched)
        if flight.after is not None:
            start = max(start, arrival_of(flight.after, flight.copy, now))
        if flight.usual is None:
            return inf
        end = start + flight.usual
        if end < now:
            end = now + OVERDUE * (now - start)
        if flight is upto:
            break
    return end


def arrival_of(flight: Flight, copy: float, now: float) -> float:
    """When the output of a program is expected on another device; inf if nobody knows."""
    return (flight.end or expected_end(flight.line, now, flight)) + copy


def spread_of(flights: Iterable[Flight]) -> float:
    """By how much programs of known durations may take less time together than is expected."""
    return sum(min(2 * flight.varies, SPREAD * flight.usual) for flight in flights if flight.usual)


def room_from(flights: Collection[Flight], end: float, round_trip: float = ROUND_TRIP_SECONDS) -> float:
    """From when on a device with such programs, expected to end then, takes one more; -inf for at once."""
    if not flights:
        return -inf
    if len(flights) == 1:
        return end - spread_of(flights) - SECOND * round_trip
    return end - FURTHER * round_trip if len(flights) < DEEPEST else inf


def ordered_from(flights: Collection[Flight]) -> float:
    """The same for a device whose stages follow a fixed order; inf: not before one of its programs ends."""
    work = sum(inf if flight.usual is None else flight.usual for flight in flights)
    return -inf if len(flights) < DEEPEST and work < ORDERED_SECONDS else inf


def foreseen_from(arrival: float, end: float, round_trip: float = ROUND_TRIP_SECONDS) -> float:
    """From when on an input may count as here, by its expected arrival and that of the end of the queue."""
    if arrival == inf:
        return inf
    return min(arrival - round_trip / MARGIN, (MARGIN * arrival - end - round_trip) / (MARGIN - 1))


def rooms(
    coming: Iterable[tuple[Input, Flight, float]],
    end: float,
    now: float,
    round_trip: float = ROUND_TRIP_SECONDS,
    others: bool = False,
) -> tuple[list[Room], float]:
    """What a stage is asked in turn, until it chooses; from when on it will be asked more.

    Args:
        coming: inputs on their way, what computes them, and how long their copies take.
        end: when the device is expected to have ended its queue.
        others: whether another stage on the device would run something that is here.
    """
    sure, possible, soonest = list[Input](), list[Input](), inf
    for one, flight, copy in coming:
        arrival = arrival_of(flight, copy, now)
        is_late = not flight.end and flight.line.late > round_trip
        at = inf if is_late else foreseen_from(arrival, end, round_trip)
        if at <= now:
            sure.append(one)
        elif (near := inf if others else arrival - SECOND * round_trip) <= now:
            possible.append(one)
        else:
            soonest = min(soonest, at, near)
    first = Room(foreseen=sure) if sure else ROOM
    return [first, Room(foreseen=sure + possible)] if possible else [first], soonest
