"""What a microbatch holds between the programs of a virtual stage, and what each of them takes of it.

A microbatch passes through the programs of a virtual stage one after the other: forward and backward, or
forward, input and weight gradient. Between them it holds a list of arrays. Each program appends what has
arrived for it and what it computes, and leaves what later programs read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rrfp_jax.core.memory.footprint import Footprint
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind
from rrfp_jax.runtime.autodiff.differentiate import Differentiated
from rrfp_jax.runtime.autodiff.traced import SCALE, Program
from rrfp_jax.runtime.programs.compiling import Compiled
from rrfp_jax.runtime.programs.stage_mesh import Ends
from rrfp_jax.runtime.sizes import nbytes, temporary_bytes


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One program on a microbatch's way through a virtual stage.

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


@dataclass(frozen=True)
class Passage:
    """Which values a microbatch holds between the programs of a virtual stage.

    Values are numbered in the order of the programs' full argument lists (see `Differentiated`), parameters
    and prepared values not counted: carry, inputs, the forward's outputs, cotangents, the loss scale, the
    outputs of I.

    Attributes:
        kinds: of the backward: B, or I and W, or all three.
        values: specs of all.
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
    ) -> Passage:
        """Of programs that nobody will run: of such values nobody knows where they lie."""
        outputs = traced.forward.outputs
        cotangents = [outputs[i] for i in traced.moving_out]
        halfway = traced.input.outputs if INPUT in kinds else []
        values = [*carry, *fields, *outputs, *cotangents, SCALE, *halfway]
        return cls(traced, kinds, values, len(carry), len(fields))

    @property
    def carry(self) -> Sequence[Any]:
        """Specs of what arrives at the forward."""
        return self.values[: self.arriving]

    @property
    def _outputs(self) -> Sequence[Any]:
        first = self.arriving + self.fields
        return self.values[first : first + len(self.traced.forward.closed.jaxpr.outvars)]

    @property
    def cotangents(self) -> Sequence[Any]:
        """Specs of the gradients that arrive."""
        return [self._outputs[i] for i in self.traced.moving_out]

    @property
    def sent(self) -> list[Any]:
        """Specs of what the forward sends on and does not hold as well."""
        first = self.arriving + self.fields
        later = {i for kind in self.kinds for i in self._tail(kind)}
        outputs = enumerate(self._outputs[: self.traced.out], first)
        return [spec for i, spec in outputs if i not in later]

    @property
    def flowing(self) -> list[Any]:
        """Specs of the gradients that are sent."""
        return [self.carry[i] for i in self.traced.moving_in]

    @cached_property
    def inputs(self) -> frozenset[int]:
        """Indices of the fields and numbers that any program reads."""
        first = self.arriving
        read = {i - first for kind in (FORWARD, *self.kinds) for i in self._tail(kind)}
        return frozenset(read) & frozenset(range(self.fields))

    def legs(self, compiled: Mapping[Kind, Compiled | None]) -> dict[Kind, Leg]:
        """The compiled programs with what each takes and leaves."""

        def leg(
            kind: Kind, at_hand: Sequence[int], computed: Sequence[int], later: Collection[int], sends: int
        ) -> tuple[Leg, list[int]]:
            """A program, given what is at hand when it runs; and the values that are held after it."""
            where = first_places([*at_hand, *computed])
            held = sorted(value for value in where if value in later)
            arrives = {FORWARD: self.carry, WEIGHT: ()}.get(kind, self.cotangents)
            ends = self.ends.before, self.ends.after
            once = ends if kind is FORWARD else ends[::-1]
            made = Leg(
                program=compiled[kind],
                arrives=arrives,
                head=[i for i in program_of(self.traced, kind).reads if i < self.traced.fixed],
                takes=[where[i] for i in self._tail(kind)],
                sends=sends,
                arrives_once=once[0],
                sends_once=once[1],
                keeps=[where[i] for i in held],
                held_bytes=self._bytes(held),
                dropped_bytes=self._bytes(set(at_hand) - set(held)),
            )
            return made, held

        begin = self.arriving + self.fields
        computed = range(begin, begin + len(self.traced.forward.closed.jaxpr.outvars))
        arriving = range(computed.stop, computed.stop + len(self.traced.moving_out) + 1)  # and the scale
        later = {i for kind in self.kinds for i in self._tail(kind)}
        start = at_forward(self.arriving, self.fields)
        legs = {}
        legs[FORWARD], held = leg(FORWARD, start, computed, later, self.traced.out)
        flowing = len(self.traced.moving_in)
        at_backward = [*held, *arriving]
        if BACKWARD in self.kinds:
            legs[BACKWARD], _ = leg(BACKWARD, at_backward, (), set(), flowing)
        if INPUT in self.kinds:
            halfway = range(arriving.stop, len(self.values))
            later = set(self._tail(WEIGHT))
            legs[INPUT], held = leg(INPUT, at_backward, halfway, later, flowing)
            legs[WEIGHT], _ = leg(WEIGHT, held, (), set(), 0)
        return legs

    def _bytes(self, values: Collection[int]) -> int:
        """Of values, without data and the loss scale, which are not of a microbatch in flight."""
        first = self.arriving
        scale = first + self.fields + len(self._outputs) + len(self.cotangents)
        shared = {*range(first, first + self.fields), scale}
        return nbytes([self.values[i] for i in values if i not in shared])

    def _tail(self, kind: Kind) -> list[int]:
        """The values that a program reads."""
        return [i - self.traced.fixed for i in program_of(self.traced, kind).reads if i >= self.traced.fixed]


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
    legs: Mapping[Kind, Leg],
    carry: Sequence[Any],
    sent: Sequence[Any],
    cotangents: Sequence[Any],
    flowing: Sequence[Any],
) -> Footprint:
    """What a microbatch takes, from its programs.

    Args:
        legs: by kind.
        carry: specs of what arrives.
        sent: of what is only sent on.
        cotangents, flowing: of the gradients that arrive and are sent.
    """
    return Footprint(
        activation_in_bytes=nbytes(carry),
        activation_out_bytes=nbytes(sent),
        gradient_in_bytes=nbytes(cotangents),
        gradient_out_bytes=nbytes(flowing),
        held_after_forward_bytes=legs[FORWARD].held_bytes,
        held_after_input_bytes=legs[INPUT].held_bytes if INPUT in legs else 0,
        temporary_bytes={kind.letter: leg.temporary_bytes for kind, leg in legs.items()},
        transient_bytes={kind.letter: leg.temporary_bytes + leg.dropped_bytes for kind, leg in legs.items()},
    )


def first_places(values: Sequence[int]) -> dict[int, int]:
    """Where in a list of values each one comes first."""
    places: dict[int, int] = {}
    for place, value in enumerate(values):
        places.setdefault(value, place)
    return places
