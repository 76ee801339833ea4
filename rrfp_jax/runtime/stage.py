"""One stage's arrays, and its tasks in one step: what arrived, what a microbatch holds, gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax

from rrfp_jax.core.tasks import FORWARD, Task
from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.programs import EvaluationProgram, StagePrograms, UpdatePrograms

Arrays: TypeAlias = Sequence[jax.Array]


class Stage:
    """What a stage keeps from step to step, on its device.

    Args:
        index: the stage's number.
        layers: indices of its layers.
        device: where its parameters live and its programs run.
        params: {layer index as text: nested dict}, on that device; from now on owned by the stage.
        updates: its bucket-independent programs; without an optimizer it is never updated.
    """

    def __init__(
        self,
        index: int,
        layers: range,
        device: jax.Device,
        params: Params,
        updates: UpdatePrograms,
    ) -> None:
        self.index = index
        self.layers = layers
        self.device = device
        self._updates = updates
        self.leaves, self._structure = jax.tree.flatten(params)
        self.state: list[jax.Array] = updates.init(params) if updates.init is not None else []
        self._sums: list[jax.Array] = []
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

    def add(self, gradients: Arrays) -> None:
        """Add a microbatch's gradients to the sums."""
        self._sums = self._updates.accumulate(self._sums, gradients)

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

    def _tree(self, leaves: Arrays) -> Params:
        return jax.tree.unflatten(self._structure, leaves)  # type: ignore[no-any-return]


class StageStep(Protocol):
    """A stage's part in one step, as the driver drives it."""

    phase: str
    buckets: Sequence[int]  # number of each microbatch's bucket

    def receive(self, task: Task, arrays: Arrays) -> None:
        """File the input of a task that has arrived."""

    def run(self, task: Task) -> tuple[Arrays, jax.Array | None]:
        """Dispatch a task: what to send to the neighbour, and an array that is ready when it has ended."""

    def accumulate(self, microbatch: int) -> None:
        """Add a microbatch's gradients, whose backward has been dispatched."""


class TrainingStep:
    """Forward and backward of every microbatch on one stage.

    Args:
        stage: the stage, whose gradient sums it adds to.
        programs: by bucket number.
        buckets: the bucket of each microbatch.
        inputs: per microbatch, what its programs read: fields, then numbers; None where none reads it.
            Emptied as microbatches take theirs.
    """

    def __init__(
        self,
        stage: Stage,
        programs: Mapping[int, StagePrograms],
        buckets: Sequence[int],
        inputs: list[list[jax.Array | None]],
    ) -> None:
        self.stage = stage
        self.statistics: dict[int, jax.Array] = {}
        self.phase, self.buckets, self._inputs = "train", buckets, inputs
        self._programs = programs
        fixed = {n: [*stage.leaves, *_prepare(p, stage.leaves)] for n, p in programs.items()}
        self._forward_heads = {n: [fixed[n][i] for i in p.forward_reads.head] for n, p in programs.items()}
        self._backward_heads = {n: [fixed[n][i] for i in p.backward_reads.head] for n, p in programs.items()}
        self._arrived: dict[Task, Arrays] = {}
        self._kept: dict[int, list[Any]] = {}
        self._gradients: dict[int, Arrays] = {}

    def receive(self, task: Task, arrays: Arrays) -> None:
        """See `StageStep.receive`."""
        self._arrived[task] = arrays

    def run(self, task: Task) -> tuple[Arrays, jax.Array | None]:
        """See `StageStep.run`."""
        arrived = self._arrived.pop(task, ())
        return (
            self._forward(task.microbatch, arrived) if task.kind is FORWARD else self._backward(task, arrived)
        )

    def accumulate(self, microbatch: int) -> None:
        """See `StageStep.accumulate`."""
        self.stage.add(self._gradients.pop(microbatch))

    def _forward(self, microbatch: int, carry: Arrays) -> tuple[Arrays, jax.Array | None]:
        bucket = self.buckets[microbatch]
        programs = self._programs[bucket]
        given = [*carry, *self._inputs[microbatch]]
        self._inputs[microbatch] = []
        args = [given[i] for i in programs.forward_reads.tail]
        outputs = programs.forward(*self._forward_heads[bucket], *args) if programs.forward else []
        given += outputs
        self._kept[microbatch] = [given[i] for i in programs.backward_keeps]
        if programs.traced.has_statistics:
            self.statistics[microbatch] = outputs[programs.traced.out]
        return outputs[: programs.traced.out], outputs[0] if outputs else None

    def _backward(self, task: Task, cotangents: Arrays) -> tuple[Arrays, jax.Array | None]:
        bucket = self.buckets[task.microbatch]
        programs, kept = self._programs[bucket], self._kept.pop(task.microbatch)
        kept += [cotangents[i] for i in programs.backward_cotangents]
        outputs = programs.backward(*self._backward_heads[bucket], *kept) if programs.backward else []
        flowing = len(programs.traced.moving_in)
        self._gradients[task.microbatch] = outputs[flowing:]
        return outputs[:flowing], outputs[0] if outputs else None


class EvaluationStep:
    """The forward of every microbatch on one stage; arguments as for `TrainingStep`."""

    def __init__(
        self,
        stage: Stage,
        programs: Mapping[int, EvaluationProgram],
        buckets: Sequence[int],
        inputs: list[list[jax.Array | None]],
    ) -> None:
        self.stage = stage
        self.statistics: dict[int, jax.Array] = {}
        self.phase, self.buckets, self._inputs = "evaluate", buckets, inputs
        self._programs = programs
        self._heads = {n: [stage.leaves[i] for i in p.reads.head] for n, p in programs.items()}
        self._arrived: dict[Task, Arrays] = {}

    def receive(self, task: Task, arrays: Arrays) -> None:
        """See `StageStep.receive`."""
        self._arrived[task] = arrays

    def run(self, task: Task) -> tuple[Arrays, jax.Array | None]:
        """See `StageStep.run`."""
        bucket = self.buckets[task.microbatch]
        program = self._programs[bucket]
        given = [*self._arrived.pop(task, ()), *self._inputs[task.microbatch]]
        self._inputs[task.microbatch] = []
        args = [given[i] for i in program.reads.tail]
        outputs = program.forward(*self._heads[bucket], *args) if program.forward else []
        if len(outputs) > program.out:
            self.statistics[task.microbatch] = outputs[program.out]
        return outputs[: program.out], outputs[0] if outputs else None

    def accumulate(self, microbatch: int) -> None:
        """Never called: a forward-only step has no gradients."""
        raise AssertionError(f"no gradient of microbatch {microbatch} in a forward-only step")


def _prepare(programs: StagePrograms, leaves: Arrays) -> Arrays:
    """The values that depend on parameters alone, computed once a step."""
    if programs.prepare is None or programs.traced.prepare is None:
        return ()
    return programs.prepare(*[leaves[i] for i in programs.traced.prepare.reads])  # type: ignore[no-any-return]
