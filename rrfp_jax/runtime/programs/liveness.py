"""What a microbatch holds between the programs of a virtual stage, and what each of them takes of it.

A microbatch passes through the programs of a virtual stage one after the other: forward and backward, or
forward, input and weight gradient. Between them it holds a list of arrays. Each program appends what has
arrived for it and what it computes, and leaves what later programs read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from rrfp_jax.core.memory.footprint import Footprint
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind
from rrfp_jax.runtime.autodiff.differentiate import Differentiated
from rrfp_jax.runtime.autodiff.traced import SCALE, Program
from rrfp_jax.runtime.programs.compiling import Compiled
from rrfp_jax.runtime.programs.stage_mesh import Ends
from rrfp_jax.runtime.sizes import nbytes, temporary_bytes


@dataclass(frozen=True, kw_only=True)
class TaskProgram:
    """The program of one kind of task, with what it takes of a microbatch and what it leaves.

    Attributes:
        program: None if there is nothing to compute.
        head: which parameters and prepared values it takes first, the same for all microbatches.
        arrives: specs of what it waits for, with their shardings.
        takes: what it takes then: indices into what the microbatch holds, followed by what has arrived.
        sends: how many of its outputs go to another virtual stage; they come first.
        arrives_once, sends_once: whether one copy is sent for all devices of a process; see `Ends`.
        keeps: what is held after it: indices into what was held, arrived and computed.
        held_bytes: of that, without the microbatch's data, which is there from the step's beginning.
        dropped_bytes: of what was held or arrived, without data, and is not held any more.
    """

    program: Compiled | None
    head: Sequence[int]
    arrives: Sequence[Any]
    takes: Sequence[int]
    sends: int
    arrives_once: bool
    sends_once: bool
    keeps: Sequence[int]
    held_bytes: int
    dropped_bytes: int

    @cached_property
    def temporary_bytes(self) -> int:
        """What the program needs while it runs, besides arguments and results."""
        return temporary_bytes(self.program)


class Numbers(NamedTuple):
    """The numbers of a microbatch's values, in the order of the programs' full argument lists.

    See `Differentiated`; parameters and prepared values, which all microbatches share, have none.

    Attributes:
        carry: what arrives for the forward.
        inputs: fields of the microbatch, and what its random keys are made of.
        outputs: of the forward: what it sends, statistics, what later programs read.
        cotangents: the gradients that arrive.
        scale: the loss scale, one value.
        halfway: outputs of I: the gradients that it sends, and what W reads.
    """

    carry: range
    inputs: range
    outputs: range
    cotangents: range
    scale: range
    halfway: range

    @classmethod
    def of(cls, *counts: int) -> Numbers:
        """From how many there are of each."""
        return cls(*(range(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)))


@dataclass(frozen=True)
class Liveness:
    """Which values a microbatch holds between the programs of a virtual stage.

    Attributes:
        traced: the programs.
        kinds: of the backward: B, or I and W, or all three.
        values: specs of all values; see `Numbers`.
        arriving, fields: how many of them are carry, and inputs.
        ends: how the virtual stage meets its neighbours.
    """

    traced: Differentiated
    kinds: Collection[Kind]
    values: Sequence[Any]
    arriving: int
    fields: int
    ends: Ends = field(default_factory=Ends)

    @classmethod
    def unplaced(
        cls, traced: Differentiated, carry: Sequence[Any], fields: Sequence[Any], kinds: Collection[Kind]
    ) -> Liveness:
        """Of programs that nobody will run: of such values nobody knows where they lie."""
        outputs = traced.forward.outputs
        cotangents = [outputs[i] for i in traced.moving_out]
        halfway = traced.input.outputs if INPUT in kinds else []
        values = [*carry, *fields, *outputs, *cotangents, SCALE, *halfway]
        return cls(traced, kinds, values, len(carry), len(fields))

    @cached_property
    def numbers(self) -> Numbers:
        """Which value is what."""
        outputs, cotangents = len(self.traced.forward.closed.jaxpr.outvars), len(self.traced.moving_out)
        before = self.arriving, self.fields, outputs, cotangents, 1
        return Numbers.of(*before, len(self.values) - sum(before))

    @property
    def carry(self) -> list[Any]:
        """Specs of what arrives for the forward."""
        return self._specs(self.numbers.carry)

    @property
    def sent(self) -> list[Any]:
        """Specs of what the forward sends on and does not hold as well."""
        read = self._read_by(*self.kinds)
        return self._specs(i for i in self.numbers.outputs[: self.traced.out] if i not in read)

    @property
    def cotangents(self) -> list[Any]:
        """Specs of the gradients that arrive."""
        return self._specs(self.numbers.outputs[i] for i in self.traced.moving_out)

    @property
    def gradients_sent(self) -> list[Any]:
        """Specs of the gradients that are sent to the virtual stage before."""
        return self._specs(self.numbers.carry[i] for i in self.traced.moving_in)

    @cached_property
    def inputs(self) -> frozenset[int]:
        """Indices of the fields and numbers that any program reads."""
        inputs = self.numbers.inputs
        return frozenset(i - inputs.start for i in self._read_by(FORWARD, *self.kinds) if i in inputs)

    def task_programs(self, compiled: Mapping[Kind, Compiled | None]) -> dict[Kind, TaskProgram]:
        """The compiled programs with what each takes and leaves."""
        at, made = self.numbers, {}
        begin = at_forward(len(at.carry), len(at.inputs))
        program = compiled[FORWARD]
        made[FORWARD], held = self._task(FORWARD, program, begin, at.outputs, self._read_by(*self.kinds))
        at_backward = [*held, *at.cotangents, *at.scale]
        if BACKWARD in self.kinds:
            made[BACKWARD], _ = self._task(BACKWARD, compiled[BACKWARD], at_backward)
        if INPUT in self.kinds:
            later = self._read_by(WEIGHT)
            made[INPUT], held = self._task(INPUT, compiled[INPUT], at_backward, at.halfway, later)
            made[WEIGHT], _ = self._task(WEIGHT, compiled[WEIGHT], held)
        return made

    def _task(
        self,
        kind: Kind,
        program: Compiled | None,
        at_hand: Sequence[int],
        computed: Sequence[int] = (),
        later: Collection[int] = (),
    ) -> tuple[TaskProgram, list[int]]:
        """A program, and the values that are held after it.

        Args:
            kind: of its task.
            program: compiled.
            at_hand: values that are there when it runs.
            computed: values that it gives.
            later: values that programs after it read.
        """
        where = first_places([*at_hand, *computed])
        held = sorted(value for value in where if value in later)
        gradient = len(self.traced.moving_in)
        before, after = self.ends.before, self.ends.after
        made = TaskProgram(
            program=program,
            head=[i for i in program_of(self.traced, kind).reads if i < self.traced.fixed],
            arrives={FORWARD: self.carry, WEIGHT: []}.get(kind, self.cotangents),
            takes=[where[i] for i in self._reads(kind)],
            sends={FORWARD: self.traced.out, WEIGHT: 0}.get(kind, gradient),
            arrives_once=before if kind is FORWARD else after,
            sends_once=after if kind is FORWARD else before,
            keeps=[where[i] for i in held],
            held_bytes=self._bytes(held),
            dropped_bytes=self._bytes(set(at_hand) - set(held)),
        )
        return made, held

    def _bytes(self, values: Collection[int]) -> int:
        """Of values, without data and the loss scale, which are not of a microbatch in flight."""
        shared = {*self.numbers.inputs, *self.numbers.scale}
        return nbytes(self._specs(i for i in values if i not in shared))

    def _specs(self, values: Iterable[int]) -> list[Any]:
        return [self.values[i] for i in values]

    def _reads(self, kind: Kind) -> list[int]:
        """The values that a program reads, in the order of its arguments."""
        fixed = self.traced.fixed
        return [i - fixed for i in program_of(self.traced, kind).reads if i >= fixed]

    def _read_by(self, *kinds: Kind) -> set[int]:
        return {value for kind in kinds for value in self._reads(kind)}


def program_of(traced: Differentiated, kind: Kind) -> Program:
    """The traced program of a kind of task."""
    if kind is FORWARD:
        return traced.forward
    if kind is BACKWARD:
        return traced.backward
    return traced.input if kind is INPUT else traced.weight


def at_forward(carry: int, fields: int) -> list[int]:
    """The values at hand when a forward runs: its fields from the start, its carry has arrived."""
    return [*range(carry, carry + fields), *range(carry)]


def footprint_of(
    tasks: Mapping[Kind, TaskProgram],
    carry: Sequence[Any],
    sent: Sequence[Any],
    cotangents: Sequence[Any] = (),
    gradients_sent: Sequence[Any] = (),
) -> Footprint:
    """What a microbatch takes, from its programs.

    Args:
        tasks: its programs, by kind.
        carry: specs of what arrives for the forward.
        sent: of what the forward only sends on.
        cotangents, gradients_sent: of the gradients that arrive and are sent.
    """
    return Footprint(
        activation_in_bytes=nbytes(carry),
        activation_out_bytes=nbytes(sent),
        gradient_in_bytes=nbytes(cotangents),
        gradient_out_bytes=nbytes(gradients_sent),
        held_after_forward_bytes=tasks[FORWARD].held_bytes,
        held_after_input_bytes=tasks[INPUT].held_bytes if INPUT in tasks else 0,
        temporary_bytes={kind.letter: task.temporary_bytes for kind, task in tasks.items()},
        dropped_bytes={kind.letter: task.dropped_bytes for kind, task in tasks.items()},
    )


def first_places(values: Sequence[int]) -> dict[int, int]:
    """Where in a list of values each one comes first."""
    places: dict[int, int] = {}
    for place, value in enumerate(values):
        places.setdefault(value, place)
    return places
