"""The programs of one virtual stage for one shape bucket, and what a microbatch holds between them.

A virtual stage is a row of segments (`segments.py`). A task calls the programs of its segments back to back:
forwards in the model's order, backwards in the opposite one. Between tasks the microbatch holds a list of
arrays. Each task appends what has arrived for it and what it computes, and leaves what later tasks read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import jax

from rrfp_jax.core.footprint import Footprint, held_fields
from rrfp_jax.core.tasks import FORWARD, KINDS, Kind, parts_of
from rrfp_jax.runtime.autodiff.traced import Specs, reduce
from rrfp_jax.runtime.mesh.stage_mesh import WidthChanges
from rrfp_jax.runtime.model.metrics import Name, joined_vectors
from rrfp_jax.runtime.programs.compiler import each_once
from rrfp_jax.runtime.programs.gradients import where
from rrfp_jax.runtime.programs.segments import Lowering, Segment
from rrfp_jax.runtime.sizes import nbytes, temporary_bytes

ALONE = WidthChanges()

Values: TypeAlias = Sequence[int]
"""The numbers of values of a virtual stage; see `_Numbers`."""


class Tokens(list[jax.Array]):
    """Ready when all of them are."""

    def is_ready(self) -> bool:
        return all(token.is_ready() for token in reversed(self))  # type: ignore[attr-defined]

    def block_until_ready(self) -> None:
        for token in self:
            token.block_until_ready()


class AwaitedInputs(Tokens):
    """What a task without a program waits for: its device has nothing to do."""


class Call(NamedTuple):
    """A call of a program, by the places of values in one list, at whose end it puts its results."""

    program: Any
    takes: Sequence[int]
    done: Sequence[int]  # values that nobody needs after it


@dataclass(frozen=True)
class Row:
    """Programs that are called back to back, as one."""

    calls: Sequence[Call]
    gives: Sequence[int]
    tokens: Sequence[int]  # of the values that are ready when the programs have ended
    temporary_bytes: int  # that it needs while it runs, besides arguments and results

    def __call__(self, *given: Any) -> tuple[list[Any], Any]:
        """The results, and what is ready when all programs have ended."""
        values = [*given]
        for program, takes, done in self.calls:
            values += program(*map(values.__getitem__, takes))
            for i in done:
                values[i] = None
        tokens = [values[i] for i in self.tokens]
        return [*map(values.__getitem__, self.gives)], tokens[0] if len(tokens) == 1 else Tokens(tokens)

    @cached_property
    def programs(self) -> list[Any]:
        """All that there are, each once."""
        return each_once(call.program for call in self.calls)


@dataclass(frozen=True, kw_only=True)
class TaskProgram:
    """The programs of one kind of task; bytes are without data, which is there from the step's beginning."""

    program: Row | None  # None if there is nothing to compute
    head: Sequence[int]  # parameters, indices of layers and prepared values, which it takes first
    arrives: Sequence[Any]  # specs of what it waits for, with their shardings
    takes: Sequence[int]  # then: indices into what the microbatch holds, followed by what has arrived
    sends: int  # how many of its outputs go to another virtual stage; they come first
    statistics: Sequence[Name] | None  # the metrics in the vector that it gives then, if any
    once: WidthChanges  # of those from which its input comes and to which it sends
    keeps: Sequence[int]  # what is held after it: indices into what was held, arrived and computed
    held_bytes: int  # of that
    dropped_bytes: int  # of what was held or arrived, and is not held any more


@dataclass(frozen=True, kw_only=True)
class StagePrograms:
    """What a virtual stage runs for one bucket."""

    segments: Sequence[Segment]
    prepare: Row | None  # computes from parameters alone, once a step, what several programs read
    tasks: Mapping[Kind, TaskProgram]  # those that the schedule runs; forward-only, the forward
    inputs: frozenset[int]  # indices of the inputs (fields, then numbers) that any program reads
    prepared_bytes: int
    footprint: Footprint  # what a microbatch takes of the stage's memory

    @classmethod
    def of(
        cls,
        layers: Sequence[range],
        segments: Sequence[Segment],
        kinds: Collection[Kind],
        by: Lowering,
        *,
        ends: WidthChanges = ALONE,
        halves: bool = False,
    ) -> StagePrograms:
        """Put segments of such layers in a row, for the forward and these kinds of backward, if any.

        With `halves` a whole backward is I and W back to back, segment by segment.
        """
        row = _Numbers(layers, segments, ends)
        row.forwards(by)
        row.backwards(parts_of(kinds) if halves else kinds)
        tasks = row.tasks(kinds, halves)
        return cls(
            segments=segments,
            prepare=row.prepare,
            tasks=tasks,
            inputs=frozenset(i - row.inputs[0] for i in row.read_by(FORWARD, *kinds) if i in row.inputs),
            prepared_bytes=sum(nbytes(segment.specs.prepared) for segment in segments),
            footprint=row.footprint(tasks),
        )


class _Edge(NamedTuple):
    """What tasks take from one neighbour and give to the other, by values' numbers; see `TaskProgram`."""

    arrives: Values = ()
    scale: Values = ()  # the loss scale, which comes with gradients
    sends: Values = ()
    once: WidthChanges = ALONE


class _Vector(NamedTuple):
    """A vector of statistics: the value's number, and the metrics in it."""

    number: int
    metrics: Sequence[Name]


class _Planned(NamedTuple):
    """A program of a row, by values' numbers."""

    program: Any  # None if it computes nothing
    takes: Values
    gives: Values
    sums: Values = ()  # of the stage's, which it takes first, and gives last, before a token


class _Numbers:
    """Values the values of a virtual stage, by which the programs of its segments follow each other.

    First come those that all microbatches share: parameters, indices of layers, prepared values. Then come
    those of a microbatch, in the order in which they arise. What segments only pass on has one number.
    """

    def __init__(self, layers: Sequence[range], segments: Sequence[Segment], ends: WidthChanges) -> None:
        self._segments, self._ends, self.values = segments, ends, list[Any]()  # specs, with where they lie
        of_layers = chain.from_iterable(segment.specs.layers for segment in segments)
        leaves = dict(zip(chain.from_iterable(layers), of_layers, strict=True))
        params, sums, self.sums = dict[int, list[int]](), dict[int, range](), 0
        for i in sorted(leaves, key=str):  # those of a stage lie as in {layer index as text: tree}
            specs, count = leaves[i]
            params[i], sums[i] = self._new(specs), range(self.sums, self.sums + count)
            self.sums += count
        # By segment: of what its programs take, and of its sums among the stage's.
        self._arguments = [[n for i in own for n in params[i]] for own in layers]
        self._places = [[n for i in own for n in sums[i]] for own in layers]
        indices = self._new([segments[0].specs.params[-1] for _ in range(layers[0].start, layers[-1].stop)])
        shared, prepare = range(len(self.values)), list[_Planned]()
        for own, args, segment in zip(layers, self._arguments, segments, strict=True):
            args.append(indices[own.start - layers[0].start])
            made = self._new(segment.specs.prepared)
            if made:
                reads = segment.traced.prepare.reads
                prepare.append(_Planned(segment.prepare, [args[i] for i in reads], made))
            args.extend(made)
        self._fixed = len(self.values)
        self.prepare = _row(prepare, shared, range(len(shared), self._fixed), 0, self.values)
        self._carry, self.inputs = self._new(segments[0].specs.carry), self._new(segments[0].specs.inputs)
        self._steps: dict[Kind, list[_Planned]] = {}  # by kind, of each segment in the order of calls
        self._vectors: dict[int, _Vector] = {}  # by flow of the tasks that give one

    def forwards(self, by: Lowering) -> None:
        """Number what the forward takes and gives; statistics of several segments are added up."""
        arriving, vectors, steps = self._carry, list[_Vector](), list[_Planned]()
        for args, segment in zip(self._arguments, self._segments, strict=True):
            args.extend([*arriving, *self.inputs])
            specs, passed = segment.specs.outputs, segment.passed
            own = self._new([spec for i, spec in enumerate(specs) if i not in passed])
            takes, new = [args[i] for i in segment.forward.reads], iter(own)
            steps.append(_Planned(segment.lowered[FORWARD], takes, own))
            made = [args[passed[i]] if i in passed else next(new) for i in range(len(specs))]
            args.extend(made)
            out = segment.traced.out
            arriving = made[:out]
            vectors += [_Vector(made[out], segment.metrics)] if segment.traced.gives_statistics(1) else []
        if len(vectors) > 1:
            given = [vector.number for vector in vectors]
            metrics, add_up = joined_vectors([vector.metrics for vector in vectors])
            program = reduce(jax.make_jaxpr(lambda *own: [add_up(*own)])(*self._specs(given)))
            lowered = by.lower(program, self._specs(given), where(self._segments[0].specs.scale), ())
            (vector,) = self._new(by.outputs(program, lowered))
            steps.append(_Planned(lowered, given, [vector]))
            vectors = [_Vector(vector, metrics)]
        self._steps[FORWARD], self._sent = steps, arriving
        if vectors:
            self._vectors[1] = vectors[0]

    def backwards(self, kinds: Collection[Kind]) -> None:
        """Number what these kinds of backward take and give."""
        last = self._segments[-1]
        cotangents = arriving = self._new(last.specs.cotangents)
        scale = self._new(last.specs.scale)
        self._steps |= {kind: [] for kind in kinds}
        for k in reversed(range(len(self._segments))):
            segment, args = self._segments[k], self._arguments[k]
            made = self._new(segment.specs.made)
            args += [*arriving, *scale, *made]
            gradients, counts = len(segment.traced.moving_in), segment.traced.gives_statistics(-1)
            if counts:
                self._vectors[-1] = _Vector(made[gradients], segment.metrics)
            for kind in sorted(kinds):
                most = len(made) if KINDS[kind].holds is not None else gradients + counts
                gives = made[:most] if KINDS[kind].flow else ()
                sums = self._places[k] if KINDS[kind].charge < 0 else ()
                takes = [args[i] for i in segment.program(kind).reads]
                self._steps[kind].append(_Planned(segment.lowered[kind], takes, gives, sums))
            arriving = made[:gradients]
        ends = self._ends
        self._edges = {
            0: _Edge(),
            1: _Edge(self._carry, (), self._sent, ends),
            -1: _Edge(cotangents, scale, arriving, WidthChanges(ends.after, ends.before)),
        }

    def tasks(self, kinds: Collection[Kind], halves: bool) -> dict[Kind, TaskProgram]:
        """The forward and these kinds of backward, with what each takes and leaves."""
        for kind in kinds if halves else ():
            parts = [self._steps[part] for part in KINDS[kind].parts]
            self._steps[kind] = [step for segment in zip(*parts, strict=True) for step in segment]
        found = {}
        held: dict[Kind | None, Sequence[int]] = {None: self.inputs}
        for kind in (FORWARD, *sorted(kinds)):
            row, edge, steps = KINDS[kind], self._edges[KINDS[kind].flow], self._calls(kind)
            at_hand = [*held[row.after], *edge.arrives, *edge.scale]
            later = self.read_by(*(other for other in kinds if other > kind)) if row.holds else ()
            vector = self._vectors.get(row.flow)
            first = [*edge.sends, *([] if vector is None else [vector.number])]
            gives = [*first, *(n for step in steps for n in step.gives if n in later and n not in first)]
            places = [*enumerate([*at_hand, *(gives if row.holds else ())])]
            place = {value: i for i, value in reversed(places)}  # what is passed on is there already
            held[kind] = sorted(place.keys() & later)
            reads = self._reads(kind)
            takes = [n for n in reads if n >= self._fixed]
            head = [n for n in reads if n < self._fixed]
            sums = self.sums if row.charge < 0 else 0
            found[kind] = TaskProgram(
                program=_row(steps, [*head, *takes], gives, sums, self.values, first[len(edge.sends) :]),
                head=head,
                arrives=self._specs(edge.arrives),
                takes=[place[value] for value in takes],
                sends=len(edge.sends),
                statistics=None if vector is None else vector.metrics,
                once=edge.once,
                keeps=[place[value] for value in held[kind]],
                held_bytes=self._bytes(held[kind]),
                dropped_bytes=self._bytes(set(at_hand) - set(held[kind])),
            )
        return found

    def footprint(self, tasks: Mapping[Kind, TaskProgram]) -> Footprint:
        """What a microbatch takes, from its programs."""
        held = self.read_by(*(kind for kind in tasks if kind > FORWARD))
        forward, backward = self._edges[1], self._edges[-1]
        return Footprint(
            activation_in_bytes=nbytes(self._specs(forward.arrives)),
            activation_out_bytes=nbytes(self._specs(i for i in forward.sends if i not in held)),
            gradient_in_bytes=nbytes(self._specs(backward.arrives)),
            gradient_out_bytes=nbytes(self._specs(backward.sends)),
            **held_fields({kind: task.held_bytes for kind, task in tasks.items()}),
            temporary_bytes={
                kind.letter: 0 if task.program is None else task.program.temporary_bytes
                for kind, task in tasks.items()
            },
            dropped_bytes={kind.letter: task.dropped_bytes for kind, task in tasks.items()},
        )

    def read_by(self, *kinds: Kind) -> set[int]:
        """Values of the values that tasks of these kinds read."""
        return {number for kind in kinds for number in self._reads(kind)}

    def _calls(self, kind: Kind) -> list[_Planned]:
        return [step for step in self._steps[kind] if step.program is not None]

    def _reads(self, kind: Kind) -> list[int]:
        """The values that a task reads or sends and does not compute, in order."""
        read, made = dict[int, None](), set[int]()
        for step in self._calls(kind):
            read |= dict.fromkeys(n for n in step.takes if n not in made)
            made.update(step.gives)
        sent = self._sent if KINDS[kind].flow > 0 else ()
        return [*read, *dict.fromkeys(n for n in sent if n not in made and n not in read)]

    def _new(self, specs: Sequence[Any]) -> list[int]:
        """The numbers of further values."""
        self.values += specs
        return [*range(len(self.values) - len(specs), len(self.values))]

    def _bytes(self, values: Collection[int]) -> int:
        """Bytes of values, without data and the loss scale, which are not of a microbatch in flight."""
        others = {*self.inputs, *self._edges[-1].scale, *range(self._fixed)}
        return nbytes(self._specs(i for i in values if i not in others))

    def _specs(self, values: Iterable[int]) -> list[Any]:
        return [self.values[i] for i in values]


def _row(
    steps: list[_Planned], given: Values, gives: Values, sums: int, specs: Specs, statistics: Values = ()
) -> Row | None:
    """The calls that take `sums` sums and the values `given`, and give the values `gives`, then the sums.

    Of those that it gives, `statistics` are not counted in a footprint.
    """
    if not steps and not gives:
        return None
    place = {number: sums + i for i, number in enumerate(given)}
    current, end, planned = [*range(sums)], sums + len(given), list[tuple[_Planned, list[int], range]]()
    for step in steps:
        takes = [*(current[i] for i in step.sums), *(place[number] for number in step.takes)]
        count = len(step.gives)
        made = range(end, end := end + count + (len(step.sums) + 1 if step.sums else 0))
        place.update(zip(step.gives, made[:count], strict=True))
        for i, slot in zip(step.sums, made[count:-1], strict=True):
            current[i] = slot
        planned.append((step, takes, made))
    results = [*(place[number] for number in gives), *current]
    read = {slot for _, takes, _ in planned for slot in takes}
    tokens = [made[-1] for step, _, made in planned if made and (step.sums or read.isdisjoint(made))]
    counted = {place[number] for number in gives if number not in statistics}
    uncounted = {*results, *tokens} - counted
    last = {slot: k for k, (_, takes, _) in enumerate(planned) for slot in takes}
    temporary = {id(one): temporary_bytes(one) for one in each_once(step.program for step in steps)}
    sizes: dict[int, int] = {}
    for step, _, made in planned:
        own = zip(step.gives, made, strict=False)
        sizes |= {slot: nbytes(specs[number]) for number, slot in own if slot not in uncounted}
    # Bytes between calls, beside those of all results, which count from the first call on.
    calls, live, most = list[Call](), -sum(size for slot, size in sizes.items() if slot in counted), 0
    for k, (step, takes, made) in enumerate(planned):
        live += sum(sizes.get(slot, 0) for slot in made)
        most = max(most, live + temporary[id(step.program)])
        mine = [slot for slot in dict.fromkeys([*takes, *made]) if slot in sizes and slot not in counted]
        done = [slot for slot in mine if last.get(slot, k) == k]
        live -= sum(sizes[slot] for slot in done)
        calls.append(Call(step.program, takes, done))
    return Row(calls, results, tokens, most)
