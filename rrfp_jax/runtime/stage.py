"""One stage's arrays, and its tasks in one step: what arrived, what a microbatch holds, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax

from rrfp_jax.core.tasks import BACKWARD, FORWARD, WEIGHT, Kind, Task
from rrfp_jax.runtime.compiling import Compiled
from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.programs import Leg, PiecePrograms
from rrfp_jax.runtime.update import UpdatePrograms, merged

Arrays: TypeAlias = Sequence[jax.Array]


class Stage:
    """What a stage keeps from step to step, on its device.

    Args:
        index: the stage's number.
        chunks: indices of the layers of each chunk.
        device: where its parameters live and its programs run.
        params: of each chunk, {layer index as text: nested dict}, on that device; from now on owned by the
            stage.
        updates: its bucket-independent programs; without an optimizer it is never updated.

    Attributes:
        leaves: the parameters of each chunk as a flat list.
        state: of the optimizer, as a flat list.
    """

    def __init__(
        self,
        index: int,
        chunks: Sequence[range],
        device: jax.Device,
        params: Sequence[Params],
        updates: UpdatePrograms,
    ) -> None:
        self.index = index
        self.chunks = chunks
        self.device = device
        self._updates = updates
        self.leaves = [jax.tree.leaves(own) for own in params]
        self._structures = [jax.tree.structure(own) for own in params]
        self.state: list[jax.Array] = updates.init(params) if updates.init is not None else []
        self._sums: list[list[jax.Array]] = []
        self.reset_gradients()

    @property
    def params(self) -> Params:
        """The parameters as a tree. An update replaces them and frees the old ones."""
        return self._tree(self.leaves)

    @property
    def gradients(self) -> Params:
        """The sums of the gradients added since the last update or reset, as a tree like `params`."""
        return self._tree(self._sums)

    @property
    def optimizer_state(self) -> Any:
        """The optimizer's state for this stage's parameters."""
        return jax.tree.unflatten(self._updates.state_structure, self.state)

    def add(self, chunk: int, gradients: Arrays) -> None:
        """Add a microbatch's gradients of a chunk to the sums."""
        self._sums[chunk] = self._updates.accumulate[chunk](self._sums[chunk], gradients)

    def squared_norm(self) -> jax.Array:
        """Float32 scalar: the sum of squares of all gradient sums."""
        return self._updates.norm(self._sums)  # type: ignore[no-any-return]

    def update(self, scale: jax.Array) -> None:
        """One optimizer step with the gradient sums times `scale` (float32 scalar); zeroes the sums."""
        assert self._updates.update is not None, "made without an optimizer"
        self.leaves, self.state, self._sums = self._updates.update(self.leaves, self.state, self._sums, scale)

    def reset_gradients(self) -> None:
        """Start from zero, after a step that was broken off or is not applied."""
        self._sums = self._updates.zeros()

    def _tree(self, leaves: Sequence[Arrays]) -> Params:
        pairs = zip(self._structures, leaves, strict=True)
        return merged([jax.tree.unflatten(structure, own) for structure, own in pairs])


class StageStep(Protocol):
    """A stage's part in one step, as the driver drives it."""

    phase: str
    buckets: Sequence[int]  # number of each microbatch's bucket

    def receive(self, task: Task, arrays: Arrays) -> None:
        """File the input of a task that has arrived."""

    def run(self, task: Task) -> tuple[Arrays, jax.Array | None]:
        """Dispatch a task: what to send to another piece, and an array that is ready when it has ended."""

    def accumulate(self, chunk: int, microbatch: int) -> None:
        """Add a microbatch's gradients of a chunk, whose backward has been dispatched."""


class _Bound(NamedTuple):
    """A leg with the parameters and prepared values that it takes in this step."""

    leg: Leg
    program: Compiled | None
    head: Sequence[jax.Array]
    counts: bool  # whether a vector of statistics is the first of its outputs that stay


class ModelStep:
    """The tasks of every microbatch on one stage: of training, or forwards only.

    Args:
        stage: the stage, whose gradient sums it adds to.
        phase: for messages and expected durations.
        programs: of each bucket, those of each chunk.
        buckets: the bucket of each microbatch.
        inputs: per microbatch, what its programs read: fields, then numbers; None where none reads it.

    Attributes:
        statistics: by chunk and microbatch, the vector of numbers that its forward gave.
    """

    def __init__(
        self,
        stage: Stage,
        phase: str,
        programs: Sequence[Sequence[PiecePrograms]],
        buckets: Sequence[int],
        inputs: Sequence[Sequence[jax.Array | None]],
    ) -> None:
        self.stage, self.phase, self.buckets = stage, phase, buckets
        self.statistics: dict[tuple[int, int], jax.Array] = {}
        self._legs: dict[tuple[int, int, Kind], _Bound] = {}
        for bucket, pieces in enumerate(programs):
            for chunk, piece in enumerate(pieces):
                self._bind(bucket, chunk, piece, stage.leaves[chunk])
        self._arrived: dict[Task, Arrays] = {}
        self._held: dict[tuple[int, int], list[Any]] = {
            (chunk, j): list(values) for j, values in enumerate(inputs) for chunk in range(len(stage.leaves))
        }
        self._gradients: dict[tuple[int, int], Arrays] = {}

    def receive(self, task: Task, arrays: Arrays) -> None:
        """See `StageStep.receive`."""
        self._arrived[task] = arrays

    def run(self, task: Task) -> tuple[Arrays, jax.Array | None]:
        """See `StageStep.run`."""
        kind, chunk, microbatch = task
        leg, program, head, counts = self._legs[self.buckets[microbatch], chunk, kind]
        at_hand = self._held.pop((chunk, microbatch))
        at_hand += self._arrived.pop(task, ())
        outputs = program(*head, *[at_hand[i] for i in leg.takes]) if program is not None else []
        if kind is BACKWARD or kind is WEIGHT:
            self._gradients[chunk, microbatch] = outputs[leg.sends :]
        else:
            at_hand += outputs
            self._held[chunk, microbatch] = [at_hand[i] for i in leg.keeps]
            if counts:
                self.statistics[chunk, microbatch] = outputs[leg.sends]
        return outputs[: leg.sends], outputs[0] if outputs else None

    def accumulate(self, chunk: int, microbatch: int) -> None:
        """See `StageStep.accumulate`."""
        self.stage.add(chunk, self._gradients.pop((chunk, microbatch)))

    def _bind(self, bucket: int, chunk: int, piece: PiecePrograms, leaves: Arrays) -> None:
        fixed = [*leaves]
        if piece.prepare is not None:  # what depends on parameters alone is computed once a step
            fixed += piece.prepare(*[leaves[i] for i in piece.prepare_reads])
        for kind, leg in piece.legs.items():
            head = [fixed[i] for i in leg.head]
            counts = kind is FORWARD and bool(piece.statistics)
            self._legs[bucket, chunk, kind] = _Bound(leg, leg.program, head, counts)
