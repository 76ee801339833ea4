"""How an output gets from the device that has computed it to the stage that needs it.

    parallel      each transfer begins when its task has ended, beside all others
    serial        each directed link carries one transfer after another, in the order in which tasks end
    synchronous   send and receive by rendezvous, as in classic 1F1B implementations

In the synchronous model a transfer begins when its task has ended *and* the receiver's device is not
computing. Until it is over, neither device computes. So a stage that has an output to pass on waits until its
neighbour has finished its task. A neighbour that has finished takes what is offered before it computes on. A
device that does not compute takes any number of transfers at once, whatever its schedule waits for. That is
kinder than blocking calls posted in a fixed order: nobody deadlocks, and two stages can exchange tensors.
Compare one schedule under "synchronous" and "parallel" to see the share of communication in a gain; compare
two schedules under "parallel" to see that of order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from rrfp_jax.core.events import Arrived
from rrfp_jax.core.measure.costs import Costs
from rrfp_jax.core.tasks import Task
from rrfp_jax.sim.agenda import Agenda
from rrfp_jax.sim.device import Device

Links: TypeAlias = Literal["parallel", "serial", "synchronous"]

Receive: TypeAlias = Callable[[float, Device, Arrived], None]
"""What happens when an output has arrived at a device at a time."""

Freed: TypeAlias = Callable[[float, Device], None]
"""What happens when a transfer no longer keeps a device from computing."""


class Network(Protocol):
    """Carries outputs; all times in seconds."""

    def send(self, now: float, sender: Device, task: Task, receiver: Device, arrival: Arrived) -> None:
        """`task` has ended on a device, and another one needs its output."""


class Parallel:
    """Every transfer for itself."""

    def __init__(self, costs: Costs, agenda: Agenda[Device], receive: Receive, freed: Freed) -> None:
        self._transfer, self._add, self._receive = costs.transfer, agenda.add, receive

    def send(self, now: float, sender: Device, task: Task, receiver: Device, arrival: Arrived) -> None:
        """See `Network.send`."""
        arrives = now + self._transfer(sender.stage, task)
        if arrives == now:
            self._receive(now, receiver, arrival)
        else:
            self._add(arrives, self._receive, receiver, arrival)


class Serial:
    """One transfer after another on each directed link."""

    def __init__(self, costs: Costs, agenda: Agenda[Device], receive: Receive, freed: Freed) -> None:
        self._costs, self._agenda, self._receive = costs, agenda, receive
        self._free: dict[tuple[int, int], float] = defaultdict(float)  # when each link is

    def send(self, now: float, sender: Device, task: Task, receiver: Device, arrival: Arrived) -> None:
        """See `Network.send`."""
        link = sender.stage, receiver.stage
        begins = max(now, self._free[link])
        self._free[link] = begins + self._costs.occupancy(sender.stage, task)
        arrives = begins + self._costs.transfer(sender.stage, task)
        self._agenda.add(arrives, self._receive, receiver, arrival)


class Synchronous:
    """Rendezvous of two devices that do not compute."""

    def __init__(self, costs: Costs, agenda: Agenda[Device], receive: Receive, freed: Freed) -> None:
        self._costs, self._agenda, self._receive, self._freed = costs, agenda, receive, freed

    def send(self, now: float, sender: Device, task: Task, receiver: Device, arrival: Arrived) -> None:
        """See `Network.send`."""

        def begin(now: float) -> None:
            receiver.held += 1
            self._agenda.add(now + self._costs.transfer(sender.stage, task), end, receiver, arrival)

        def end(now: float, receiver: Device, arrival: Arrived) -> None:
            for device in (sender, receiver):
                device.held -= 1
                self._freed(now, device)
            self._receive(now, receiver, arrival)

        sender.held += 1
        if receiver.tasks:
            receiver.waiting.append(begin)
        else:
            begin(now)


NETWORKS: dict[str, Callable[[Costs, Agenda[Device], Receive, Freed], Network]] = {
    "parallel": Parallel,
    "serial": Serial,
    "synchronous": Synchronous,
}
