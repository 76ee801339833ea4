"""What a stage holds for microbatches at any moment of a step, counted as it happens."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.core.memory.footprint import Chunks, Footprint
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind, Task


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

    def coming(self, task: Task) -> None:
        """The memory of a task's input, which comes from another virtual stage, is taken from now on."""
        kind, chunk, microbatch = task
        self.now += self._inputs[self._buckets[microbatch]][chunk][kind]
        self.peak = max(self.peak, self.now)

    def dispatched(self, task: Task) -> None:
        """A task's program is dispatched: its results are there, its input and what else it drops is not."""
        kind, chunk, microbatch = task
        change, transient = self._changes[self._buckets[microbatch]][chunk][kind]
        self.now += change
        self.peak = max(self.peak, self.now + transient)

    def delivered(self, task: Task) -> None:
        """What a task has sent is at its destination."""
        kind, chunk, microbatch = task
        self.now -= self._outputs[self._buckets[microbatch]][chunk][kind]


def _inputs(chunk: Footprint) -> dict[Kind, int]:
    return _by_kind(chunk.activation_in_bytes, chunk.gradient_in_bytes)


def _outputs(chunk: Footprint) -> dict[Kind, int]:
    return _by_kind(chunk.activation_out_bytes, chunk.gradient_out_bytes)


def _by_kind(activation: int, gradient: int) -> dict[Kind, int]:
    """Bytes of the message of a task of each kind."""
    return {FORWARD: activation, BACKWARD: gradient, INPUT: gradient, WEIGHT: 0}


def _changes(chunk: Footprint) -> dict[Kind, tuple[int, int]]:
    """By kind: how a dispatch changes what is held, and what it needs besides for a while."""
    whole, half = chunk.held_after_forward_bytes, chunk.held_after_input_bytes
    held = {FORWARD: whole, BACKWARD: -whole, INPUT: half - whole, WEIGHT: -half}
    inputs, outputs = _inputs(chunk), _outputs(chunk)
    return {
        kind: (held[kind] + outputs[kind] - inputs[kind], chunk.transient_bytes.get(kind.letter, 0))
        for kind in held
    }
