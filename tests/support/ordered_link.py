"""A transport over links that keep order, as NCCL does, to see that the driver asks for no more than that."""

from collections import deque

import jax

from rrfp_jax.runtime.run.waits import SHORTEST_PAUSE
from rrfp_jax.runtime.transport.protocol import UNOBSERVED, Arrival


class OrderError(AssertionError):
    """The ends of a link posted in different orders; the real thing swaps data or hangs."""


class Link:
    """One direction between two devices: transfers go one after another, in the order in which both post."""

    def __init__(self):
        self.announced = deque()
        self._sends, self._receives = deque(), deque()
        self._moving = None

    def post_send(self, key, arrays, at):
        self._sends.append((key, arrays, at))
        self.announced.append(key)

    def post_receive(self, key, device):
        self._receives.append((key, device))

    def advance(self):
        """The transfer that has ended since, if one has; the next one starts."""
        if self._moving is None and self._sends and self._receives:
            key, arrays, at = self._sends.popleft()
            wanted, device = self._receives.popleft()
            if key != wanted:
                raise OrderError(f"{wanted} is received where {key} is sent")
            self._moving = Arrival(key, jax.device_put(arrays, device), at)
        if self._moving is None or not all(array.is_ready() for array in self._moving.arrays):
            return None
        arrival, self._moving = self._moving, None
        return arrival

    @property
    def busy(self):
        return bool(self.announced or self._moving or self._sends)


class OrderedTransport:
    """Sends when the data exists, so that nothing unready is in the way of what is behind it."""

    def __init__(self, devices):
        self._devices, self._offered, self._waiting = devices, set(), {}
        self._links = {}
        self.order = []

    def reserve(self, messages):
        return {}

    def begin(self, round, observer=UNOBSERVED):
        self._observer = observer
        self._offered.clear()

    def offer(self, key, arrays):
        if key in self._offered:
            raise ValueError(f"{key} has been offered before")
        self._offered.add(key)
        self._waiting[key] = arrays

    def produced(self, key, at):
        if key in self._waiting:  # else the round has been broken off
            self._link(key).post_send(key, self._waiting.pop(key), at)

    def poll(self):
        arrived = []
        for link in self._links.values():
            if link.announced:
                key = link.announced.popleft()
                self._receive(link, key)
            if (arrival := link.advance()) is not None:
                self.order.append(arrival.key)
                self._observer.delivered(arrival.key)
                arrived.append(arrival)
        return arrived

    def seconds_until_poll(self):
        return SHORTEST_PAUSE if any(link.busy for link in self._links.values()) else None

    def finish(self, *, broken=False):
        self._observer = UNOBSERVED
        if broken:
            self._waiting.clear()
            self._links.clear()

    def close(self):
        pass

    def _receive(self, link, key):
        link.post_receive(key, *self._devices[key.stage])
        self._observer.coming(key)

    def _link(self, key):
        """By destination and direction: each stage hears from one neighbour in either."""
        return self._links.setdefault((key.stage, key.input.direction), Link())
