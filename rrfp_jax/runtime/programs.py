"""The compiled programs of one piece for one shape bucket, and what each takes of what a microbatch holds.

A microbatch passes through the programs of a piece one after the other: forward and backward, or forward,
input and weight gradient. Between them it holds a list of arrays. Each program appends what has arrived for
it and what it computes, and leaves what later programs read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from rrfp_jax.core.footprint import Footprint
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind
from rrfp_jax.runtime.autodiff.differentiate import Differentiated, differentiate
from rrfp_jax.runtime.autodiff.traced import SCALE, Program, reduce
from rrfp_jax.runtime.compiling import Compiled, Compiler, nbytes, temporary_bytes
from rrfp_jax.runtime.piece import PieceShape


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One program on a microbatch's way through a piece.

    Attributes:
        program: None if there is nothing to compute.
        head: which parameters and prepared values it takes first, the same for all microbatches.
        takes: what it takes then: indices into what the microbatch holds, followed by what has arrived.
        sends: how many of its outputs go to another piece; they come first.
        keeps: what is held after it: indices into what was held, arrived and computed.
        held_bytes: of that, without the microbatch's data, which is there from the step's beginning.
        dropped_bytes: of what was held or arrived, without data, and is not held any more.
    """

    program: Compiled | None
    head: Sequence[int]
    takes: Sequence[int]
    sends: int
    keeps: Sequence[int]
    held_bytes: int
    dropped_bytes: int

    @cached_property
    def temporary_bytes(self) -> int:
        """What the program needs while it runs, besides arguments and results."""
        return temporary_bytes(self.program)


@dataclass(frozen=True, kw_only=True)
class PiecePrograms:
    """What a piece runs for one bucket.

    Attributes:
        traced: what was compiled, None for forwards only.
        prepare: computes from parameters (`prepare_reads`) alone, once a step, what several programs read.
        compiled: all programs that there are, by kind of task.
        legs: those that the schedule runs; of a forward-only piece, the forward.
        statistics: names of the numbers in the vector that a forward gives besides; empty if there is none.
        inputs: indices of the inputs (fields, then numbers) that any program reads.
        prepared_bytes: what `prepare` gives.
        footprint: what a microbatch takes of the stage's memory.
    """

    traced: Differentiated | None
    prepare: Compiled | None
    prepare_reads: Sequence[int]
    compiled: Mapping[Kind, Compiled | None]
    legs: Mapping[Kind, Leg]
    statistics: Sequence[str]
    inputs: frozenset[int]
    prepared_bytes: int
    footprint: Footprint

    @classmethod
    def training(
        cls,
        shape: PieceShape,
        compiler: Compiler,
        kinds: Collection[Kind],
        before: PiecePrograms | None = None,
    ) -> PiecePrograms:
        """Trace and compile the forward and these kinds of backward, unless they are there from before."""
        params, carry, inputs = shape.specs()
        if before is not None and before.traced is not None:
            traced, prepare = before.traced, before.prepare
            compiled = dict(before.compiled)
        else:
            chosen = shape.trainable, shape.input_gradient
            traced = differentiate(shape.flat, params, carry, inputs, *chosen)
            prepare, compiled = traced.prepare and _compile(traced.prepare, compiler), {}
        passage = Passage(traced, carry, inputs, kinds)
        for kind in (FORWARD, *kinds):
            if kind not in compiled:
                compiled[kind] = _compile(passage.program(kind), compiler)
        legs = passage.legs(compiled)
        return cls(
            traced=traced,
            prepare=prepare,
            prepare_reads=() if traced.prepare is None else traced.prepare.reads,
            compiled=compiled,
            legs=legs,
            statistics=shape.statistics,
            inputs=passage.inputs,
            prepared_bytes=0 if traced.prepare is None else _bytes(traced.prepare.outputs),
            footprint=footprint_of(legs, carry, passage.sent, passage.cotangents, passage.flowing),
        )

    @classmethod
    def evaluation(cls, shape: PieceShape, compiler: Compiler) -> PiecePrograms:
        """Trace and compile a forward without residuals."""
        params, carry, inputs = shape.specs()
        n, m, sends = len(params), len(params) + len(carry), 0

        def forward(*args: Any) -> list[Any]:
            nonlocal sends
            leaves, _, statistics = shape.flat(args[:n], args[n:m], args[m:], training=False)
            sends = len(leaves)
            return [*leaves, *([] if statistics is None else [statistics])]

        program = reduce(jax.make_jaxpr(forward)(*params, *carry, *inputs))
        tail = [i - n for i in program.reads if i >= n]
        where = _first_places(_at_forward(len(carry), len(inputs)))
        leg = Leg(
            program=_compile(program, compiler),
            head=[i for i in program.reads if i < n],
            takes=[where[i] for i in tail],
            sends=sends,
            keeps=(),
            held_bytes=0,
            dropped_bytes=_bytes(carry),
        )
        used = frozenset(i - len(carry) for i in tail if i >= len(carry))
        return cls(
            traced=None,
            prepare=None,
            prepare_reads=(),
            compiled={FORWARD: leg.program},
            legs={FORWARD: leg},
            statistics=shape.statistics,
            inputs=used,
            prepared_bytes=0,
            footprint=footprint_of({FORWARD: leg}, carry, program.outputs[:sends], (), ()),
        )


@dataclass(frozen=True)
class Passage:
    """Which values a microbatch holds between the programs of a piece.

    Values are numbered in the order of the programs' full argument lists (see `Differentiated`), parameters
    and prepared values not counted: carry, inputs, the forward's outputs, cotangents, the loss scale, the
    outputs of I.
    """

    traced: Differentiated
    carry: Sequence[Any]
    fields: Sequence[Any]
    kinds: Collection[Kind]  # of the backward: B, or I and W, or all three

    @cached_property
    def specs(self) -> list[Any]:
        """Of all values."""
        halfway = self.traced.input.outputs if INPUT in self.kinds else []
        return [*self.carry, *self.fields, *self._outputs, *self.cotangents, SCALE, *halfway]

    @property
    def _outputs(self) -> list[Any]:
        return self.traced.forward.outputs

    @property
    def cotangents(self) -> list[Any]:
        """Specs of the gradients that arrive."""
        return [self._outputs[i] for i in self.traced.moving_out]

    @property
    def sent(self) -> list[Any]:
        """Specs of what the forward sends on and does not hold as well."""
        first = len(self.carry) + len(self.fields)
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
        first = len(self.carry)
        read = {i - first for kind in (FORWARD, *self.kinds) for i in self._tail(kind)}
        return frozenset(read) & frozenset(range(len(self.fields)))

    def legs(self, compiled: Mapping[Kind, Compiled | None]) -> dict[Kind, Leg]:
        """The compiled programs with what each takes and leaves."""

        def leg(
            kind: Kind, at_hand: Sequence[int], computed: Sequence[int], later: Collection[int], sends: int
        ) -> tuple[Leg, list[int]]:
            """A program, given what is at hand when it runs; and the values that are held after it."""
            where = _first_places([*at_hand, *computed])
            held = sorted(value for value in where if value in later)
            made = Leg(
                program=compiled[kind],
                head=[i for i in self.program(kind).reads if i < self.traced.fixed],
                takes=[where[i] for i in self._tail(kind)],
                sends=sends,
                keeps=[where[i] for i in held],
                held_bytes=self._bytes(held),
                dropped_bytes=self._bytes(set(at_hand) - set(held)),
            )
            return made, held

        begin = len(self.carry) + len(self.fields)
        computed = range(begin, begin + len(self.traced.forward.closed.jaxpr.outvars))
        arriving = range(computed.stop, computed.stop + len(self.traced.moving_out) + 1)  # and the scale
        later = {i for kind in self.kinds for i in self._tail(kind)}
        start = _at_forward(len(self.carry), len(self.fields))
        legs = {}
        legs[FORWARD], held = leg(FORWARD, start, computed, later, self.traced.out)
        flowing = len(self.traced.moving_in)
        at_backward = [*held, *arriving]
        if BACKWARD in self.kinds:
            legs[BACKWARD], _ = leg(BACKWARD, at_backward, (), set(), flowing)
        if INPUT in self.kinds:
            halfway = range(arriving.stop, len(self.specs))
            later = set(self._tail(WEIGHT))
            legs[INPUT], held = leg(INPUT, at_backward, halfway, later, flowing)
            legs[WEIGHT], _ = leg(WEIGHT, held, (), set(), 0)
        return legs

    def _bytes(self, values: Collection[int]) -> int:
        """Of values, without data and the loss scale, which are not of a microbatch in flight."""
        first = len(self.carry)
        scale = first + len(self.fields) + len(self._outputs) + len(self.cotangents)
        shared = {*range(first, first + len(self.fields)), scale}
        return _bytes([self.specs[i] for i in values if i not in shared])

    def program(self, kind: Kind) -> Program:
        """The traced program of a kind of task."""
        if kind is FORWARD:
            return self.traced.forward
        if kind is BACKWARD:
            return self.traced.backward
        return self.traced.input if kind is INPUT else self.traced.weight

    def _tail(self, kind: Kind) -> list[int]:
        """The values that a program reads."""
        return [i - self.traced.fixed for i in self.program(kind).reads if i >= self.traced.fixed]


def _at_forward(carry: int, fields: int) -> list[int]:
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
        activation_in_bytes=_bytes(carry),
        activation_out_bytes=_bytes(sent),
        gradient_in_bytes=_bytes(cotangents),
        gradient_out_bytes=_bytes(flowing),
        held_after_forward_bytes=legs[FORWARD].held_bytes,
        held_after_input_bytes=legs[INPUT].held_bytes if INPUT in legs else 0,
        temporary_bytes={kind.letter: leg.temporary_bytes for kind, leg in legs.items()},
        transient_bytes={kind.letter: leg.temporary_bytes + leg.dropped_bytes for kind, leg in legs.items()},
    )


def _bytes(specs: Sequence[Any]) -> int:
    return sum(map(nbytes, specs))


def _first_places(values: Sequence[int]) -> dict[int, int]:
    places: dict[int, int] = {}
    for place, value in enumerate(values):
        places.setdefault(value, place)
    return places


def _compile(program: Program, compiler: Compiler) -> Compiled | None:
    """The compiled program; None if it gives nothing."""
    if not program.closed.jaxpr.outvars:
        return None
    return compiler(program.__call__, *program.specs)
