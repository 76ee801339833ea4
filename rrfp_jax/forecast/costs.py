"""What a model takes of its devices in time and memory, predicted from shapes alone, for any split of it.

Every distinct layer is traced and analysed once, as a virtual stage of one layer. A virtual stage of several
layers takes as much time as they take one after the other, so any split can be judged without tracing it. The
programs that a run would have are put in a row on paper, for the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add
from typing import Any

import jax
import optax

from rrfp_jax.core.footprint import Footprint
from rrfp_jax.core.step_rules import Bucket, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, KINDS, Kind, Task, parts_of
from rrfp_jax.forecast.cost_analysis import ProgramCost, program_cost
from rrfp_jax.forecast.devices import CPU, Accelerator, Link, accelerator_of_kind
from rrfp_jax.runtime.autodiff.traced import Program
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.runtime.engine.settings import Settings
from rrfp_jax.runtime.mesh.stage_mesh import tracing_alone
from rrfp_jax.runtime.model.gradient_flow import Border, gradient_flow, refuse_untrained
from rrfp_jax.runtime.model.pipeline import LayerShapes, Pipeline
from rrfp_jax.runtime.model.roles import Roles, leaf_paths
from rrfp_jax.runtime.programs.gradients import wide
from rrfp_jax.runtime.programs.library import specs_of
from rrfp_jax.runtime.programs.segments import Segment, SegmentShape, segments_of
from rrfp_jax.runtime.programs.stage_programs import StagePrograms
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.runtime.stages.memory import BucketLedger
from rrfp_jax.runtime.stages.optimizer import WholeOptimizer
from rrfp_jax.trace.costs import TableCosts
from rrfp_jax.trace.layers import LayerWork, Work


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer for one microbatch of a bucket.

    Attributes:
        programs: what each kind of task costs; a kind that computes nothing here costs nothing.
        footprint: of the layer as a virtual stage by itself.
        carry_bytes: what it gives to the next layer.
    """

    programs: Mapping[Kind, ProgramCost]
    footprint: Footprint
    carry_bytes: int


@dataclass(frozen=True)
class PaperSegments:
    """The programs of a model for a microbatch of a bucket, on paper; those of equal segments are one."""

    pipe: Pipeline
    bucket: Bucket
    shapes: Sequence[LayerShapes]
    roles: Roles
    flow: Sequence[Border]
    kinds: Collection[Kind]
    remat: str
    joined: bool  # see `StepRules.joined`
    halves: bool = False  # whether a whole backward is I and W back to back
    known: dict[Any, Segment] = field(default_factory=dict)  # by kind

    def __call__(self, layers: range) -> Segment:
        """Those of consecutive layers; inside `tracing_alone`."""
        shape = SegmentShape(
            pipe=self.pipe,
            layers=layers,
            fields=specs_of(self.bucket),
            shapes=self.shapes,
            roles=self.roles,
            borders=self.flow,
            remat=self.remat,
            joined=self.joined and layers.stop == len(self.shapes),
        )
        if shape.kind not in self.known:
            kinds = parts_of(self.kinds) if self.halves else self.kinds
            self.known[shape.kind] = Segment.lower(shape, kinds, OnPaper())
        return self.known[shape.kind]

    @cached_property
    def layers(self) -> list[LayerCost]:
        """What each layer costs, in the model's order; inside `tracing_alone`."""
        segments = [self(range(i, i + 1)) for i in range(len(self.shapes))]
        costs = {id(own): self._cost(own) for own in self.known.values()}
        return [costs[id(own)] for own in segments]

    def row(self, layers: Sequence[range], own: Sequence[Segment], kinds: Collection[Kind]) -> StagePrograms:
        """Segments of such layers as a virtual stage."""
        return StagePrograms.of(layers, own, kinds, OnPaper(), halves=self.halves)

    def _cost(self, segment: Segment) -> LayerCost:
        programs = dict(segment.lowered)
        if self.halves:
            for kind in self.kinds:
                programs[kind] = reduce(add, map(programs.__getitem__, KINDS[kind].parts))
        footprint = self.row([range(1)], [segment], self.kinds).footprint
        carry_bytes = nbytes(segment.specs.outputs[: segment.traced.out])
        return LayerCost(programs=programs, footprint=footprint, carry_bytes=carry_bytes)


class OnPaper:
    """Counts what programs cost, wherever values lie; see `Lowering`."""

    def spread(self, leaves: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        """The specs of leaves as they are."""
        return list(leaves)

    def lower(self, program: Program, given: Any, first: Any, sums: Sequence[Any]) -> ProgramCost:
        """What a program costs, even if it does nothing."""
        return program_cost(program.closed, len(sums))

    def outputs(self, program: Program, lowered: ProgramCost) -> list[Any]:
        """Specs of its results."""
        return program.outputs


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """What one layer keeps whatever the microbatches are.

    Attributes:
        parameters: their number.
        sum_bytes: of sums of gradients, which are float32 or wider.
        adding_bytes: moved to add a microbatch's gradient to the sums.
    """

    parameters: int
    weight_bytes: int
    optimizer_bytes: int
    sum_bytes: int
    adding_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """All layers of a model.

    Attributes:
        layers: by bucket, in the model's order.
        segments: by bucket.
        together: layers of a program.
        states: in the model's order.
        parameters: their number, tied ones once.
    """

    layers: Mapping[Bucket, Sequence[LayerCost]]
    segments: Mapping[Bucket, PaperSegments]
    together: int
    states: Sequence[LayerState]
    parameters: int

    @classmethod
    def of(
        cls,
        pipe: Pipeline,
        buckets: Iterable[Bucket],
        optimizer: optax.GradientTransformation | None,
        settings: Settings,
        kinds: Collection[Kind],
        joined: bool = False,
    ) -> ModelCosts:
        """Analyse a model with these kinds of backward, joined or not; nothing is allocated or compiled."""
        halves, remat = settings.equal_schedules, settings.remat
        joined, together = joined and not halves, settings.layers_per_program
        with tracing_alone():
            shapes = {bucket: pipe.shapes(specs_of(bucket)) for bucket in dict.fromkeys(buckets)}
            params = {str(i): layer.params for i, layer in enumerate(next(iter(shapes.values())))}
            roles = Roles.of(params, pipe.frozen, pipe.tied, pipe.constants(params))
            own, leaves = roles.leaves(params), jax.tree.leaves(params)
            updated = own.tree(own.owned, [leaves[place] for place in own.owned])
            whole = None if optimizer is None else WholeOptimizer.trace(optimizer, updated)
            flows = {b: gradient_flow(pipe, own, specs_of(b), roles) for b, own in shapes.items()}
            if optimizer is not None:
                refuse_untrained([*flows.values()])
            segments = {
                b: PaperSegments(pipe, b, own, roles, flows[b].borders, kinds, remat, joined, halves)
                for b, own in shapes.items()
            }
            layers = {bucket: own.layers for bucket, own in segments.items()}
        states = [_state({layer: own}, roles, whole) for layer, own in params.items()]
        paths = zip(leaf_paths(params), leaves, strict=True)
        parameters = sum(leaf.size for path, leaf in paths if path not in roles.owners)
        return cls(layers=layers, segments=segments, together=together, states=states, parameters=parameters)

    def bucket_ledger(
        self, bucket: Bucket, chunks: Sequence[range], kinds: Sequence[Collection[Kind]]
    ) -> BucketLedger:
        """What a bucket needs on a stage with these chunks; `kinds` of backward are by chunk."""
        programs, on_paper = [], self.segments[bucket]
        with tracing_alone():
            for layers, own in zip(chunks, kinds, strict=True):
                parts = segments_of(layers, 1, self.together)
                programs.append(on_paper.row(parts, list(map(on_paper, parts)), own))
        return BucketLedger.of(bucket, programs)


def _state(params: Mapping[str, Any], roles: Roles, whole: WholeOptimizer | None) -> LayerState:
    """Of one layer, {index as text: tree}."""
    own, leaves = roles.leaves(params), jax.tree.leaves(params)
    (layer,) = map(int, params)
    trained = [leaves[place] for place in own.trained]
    sum_bytes = nbytes([wide(leaf) for leaf in trained])
    return LayerState(
        parameters=sum(leaf.size for leaf in leaves),
        weight_bytes=nbytes(leaves),
        optimizer_bytes=whole.state_bytes(layer) if whole is not None and own.owned else 0,
        sum_bytes=sum_bytes,
        adding_bytes=nbytes(trained) + 2 * sum_bytes,
    )


@dataclass(frozen=True)
class LayerTimes:
    """A model's layers on accelerators of one kind."""

    model: ModelCosts
    accelerator: Accelerator

    @cached_property
    def tasks(self) -> dict[Bucket, list[dict[Kind, float]]]:
        """Seconds by bucket, layer and kind; what releases a microbatch has the adding of its gradient."""
        adding = [self.accelerator.seconds({}, state.adding_bytes) for state in self.model.states]

        def seconds(layer: LayerCost, more: float) -> dict[Kind, float]:
            return {
                kind: self.accelerator.seconds(cost.flops, cost.bytes) + more * (KINDS[kind].charge < 0)
                for kind, cost in layer.programs.items()
            }

        return {bucket: list(map(seconds, layers, adding)) for bucket, layers in self.model.layers.items()}

    @cached_property
    def updates(self) -> list[float]:
        """Seconds by layer of what is done once a step: norms and the optimizer."""
        # Norms read parameters and sums, the update reads and writes all there is.
        moved = [3 * (of.weight_bytes + of.sum_bytes) + 2 * of.optimizer_bytes for of in self.model.states]
        return [self.accelerator.seconds({}, size) for size in moved]

    @cached_property
    def kinds(self) -> list[Kind]:
        """Of the tasks that make up a microbatch: F and B, or F, I and W."""
        known = list(next(iter(self.model.layers.values()))[0].programs)
        return [FORWARD, BACKWARD] if BACKWARD in known else known

    def of_step(self, layer: int, buckets: Sequence[Bucket]) -> float:
        """Seconds of one layer in a step of microbatches of these buckets."""
        microbatches = sum(self.tasks[bucket][layer][kind] for bucket in buckets for kind in self.kinds)
        return microbatches + self.updates[layer]

    def flops(self, bucket: Bucket, chunks: Sequence[range]) -> float:
        """Of a microbatch, forward and backward, on a stage with these virtual stages of the model."""
        programs = [self.model.layers[bucket][i].programs for layers in chunks for i in layers]
        return sum(sum(own[kind].flops.values()) for own in programs for kind in self.kinds)

    def costs(
        self, rules: StepRules, buckets: Sequence[Bucket], chunks: Sequence[Sequence[range]], link: Link
    ) -> TableCosts:
        """What the simulator is to know of a step."""
        durations, transfers = {}, {}
        for stage, own in enumerate(chunks):
            for c, (layers, kinds) in enumerate(zip(own, rules.backward_kinds(stage), strict=True)):
                known = {b: self._virtual_stage(b, layers, kinds, link) for b in self.model.layers}
                for j, bucket in enumerate(buckets):
                    for kind, lasts, sent_for in known[bucket]:
                        durations[stage, Task(kind, c, j)] = lasts
                        transfers[stage, Task(kind, c, j)] = sent_for
        return TableCosts(durations, transfers)

    def _virtual_stage(
        self, bucket: Bucket, layers: range, kinds: Iterable[Kind], link: Link
    ) -> list[tuple[Kind, float, float]]:
        """A virtual stage's F and these kinds of backward: a task's seconds, and those of what it sends."""
        activation = self.model.layers[bucket][layers.stop - 1].carry_bytes
        gradient = self.model.layers[bucket][layers.start].footprint.gradient_out_bytes
        found = []
        for kind in (FORWARD, *kinds):
            duration = sum(self.tasks[bucket][i][kind] for i in layers)
            found.append((kind, duration, link.seconds(activation if KINDS[kind].flow > 0 else gradient)))
        return found


SAME = 1.05
"""The last layer has the loss as well. It is called as others of its name if that adds no more than this."""


def layer_work(engine: Engine, split: Sequence[int], buckets: Sequence[Bucket], remat: str) -> Work | None:
    """Of an engine's model, for one microbatch of the bucket that most have; None if it cannot be analysed.

    Each distinct layer is traced and lowered once. Nothing is compiled.
    """
    bucket, _ = Counter(buckets).most_common(1)[0]
    library = engine.library
    shapes, flow = library.examine(bucket), library.flow(bucket).borders  # which it knows
    try:
        with tracing_alone():
            model = engine.pipe, bucket, shapes, library.roles, flow
            costs = PaperSegments(*model, {BACKWARD}, remat, library.joined).layers
    except Exception:  # whatever it is: the model trains, and its report does without
        return None
    kind = next(iter(engine.layout.stage_meshes.values())).device.device_kind
    device = accelerator_of_kind(kind) or CPU
    names = [spec.name for spec in engine.pipe.layers]
    seconds = [sum(device.seconds(own.flops, own.bytes) for own in of.programs.values()) for of in costs]
    alike = [n for n, name in zip(seconds[:-1], names[:-1], strict=True) if name == names[-1]]
    if alike and seconds[-1] > SAME * max(alike):
        names[-1] += " and loss"
    lasting = _lasting_bytes(engine)
    known = enumerate(zip(names, seconds, costs, strict=True))
    layers = [LayerWork(name, n, of.footprint.held_bytes, lasting.get(i, 0)) for i, (name, n, of) in known]
    return Work(layers, split)


def _lasting_bytes(engine: Engine) -> dict[int, int]:
    """By layer what lasts on each device, where that leaves less room for microbatches; else nothing."""
    if engine.spec.settings.budget != "auto" or not engine.memory.limited:
        return {}
    params, roles, width = engine.library.params, engine.library.roles, max(engine.layout.widths)
    states = {int(layer): _state({layer: own}, roles, None) for layer, own in params.items()}
    found = {layer: state.weight_bytes + state.sum_bytes for layer, state in states.items()}
    if engine.spec.optimizer is not None:
        whole, _ = engine.staging.optimizer_parts
        for k, (_, spec) in enumerate(whole.state):
            if (of := whole.layer_of(k)) >= 0:
                found[of] += nbytes(spec)
    return {layer: size // width for layer, size in found.items()}
