"""The bytes that a stage holds for microbatches, counted while a step runs."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.core.memory.footprint import Chunks, Footprint
from rrfp_jax.core.tasks import Direction, Input, Kind, Output, Task


class Meter:
    """Counts bytes by what is dispatched, what is on its way here, and what has been delivered elsewhere.

    Args:
        footprints: by bucket.
        buckets: of each microbatch.

    Attributes:
        now: bytes held for microbatches: arrived or arriving, kept between programs, sent and not delivered.
        peak: the most so far, with what each program needs while it runs.
    """

    def __init__(self, footprints: Sequence[Chunks], buckets: Sequence[int]) -> None:
        self._buckets = buckets
        self._inputs = [[_inputs(chunk) for chunk in chunks] for chunks in footprints]
        self._outputs = [[_outputs(chunk) for chunk in chunks] for chunks in footprints]
        self._changes = [[_changes(chunk) for chunk in chunks] for chunks in footprints]
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing is there."""
        self.now = self.peak = 0

    def coming(self, awaited: Input) -> None:
        """The memory of an input from another virtual stage is taken from now on."""
        direction, chunk, microbatch = awaited
        self.now += self._inputs[self._buckets[microbatch]][chunk][direction]
        self.peak = max(self.peak, self.now)

    def dispatched(self, task: Task) -> None:
        """A task's program is dispatched: its results are there, its input and what else it drops is not."""
        kind, chunk, microbatch = task
        change, transient = self._changes[self._buckets[microbatch]][chunk][kind]
        self.now += change
        self.peak = max(self.peak, self.now + transient)

    def delivered(self, sent: Output) -> None:
        """What was sent is at its destination."""
        direction, chunk, microbatch = sent
        self.now -= self._outputs[self._buckets[microbatch]][chunk][direction]


def _inputs(chunk: Footprint) -> dict[Direction, int]:
    return _by_direction(chunk.activation_in_bytes, chunk.gradient_in_bytes)


def _outputs(chunk: Footprint) -> dict[Direction, int]:
    return _by_direction(chunk.activation_out_bytes, chunk.gradient_out_bytes)


def _by_direction(activation: int, gradient: int) -> dict[Direction, int]:
    """Bytes of what is sent for a task of each direction."""
    return {Direction.FORWARD: activation, Direction.BACKWARD: gradient, Direction.WEIGHT: 0}


def _changes(chunk: Footprint) -> dict[Kind, tuple[int, int]]:
    """By kind: how a dispatch changes what there is, and what it needs besides for a while."""
    inputs, outputs = _inputs(chunk), _outputs(chunk)
    sent = {way: outputs[way] - inputs[way] for way in outputs}
    return {
        kind: (chunk.held_change(kind) + sent[kind.direction], chunk.transient_bytes(kind)) for kind in Kind
    }
