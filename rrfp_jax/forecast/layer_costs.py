"""What each layer of a model takes of a device in time and memory, predicted from shapes alone.

Every distinct layer is traced and analysed once, as a virtual stage of one layer. A virtual stage of several
layers takes what they take together, so any split can be judged without tracing it. That leaves out what
layers share when they are compiled together. It is next to nothing, since only the carry is between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from rrfp_jax.core.buckets import Bucket
from rrfp_jax.core.memory.footprint import Footprint
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind
from rrfp_jax.forecast.cost_analysis import ProgramCost, program_cost
from rrfp_jax.runtime.autodiff.differentiate import differentiate
from rrfp_jax.runtime.memory.ledger import BucketLedger
from rrfp_jax.runtime.model.gradient_flow import Border, gradient_flow
from rrfp_jax.runtime.model.paths import leaf_paths
from rrfp_jax.runtime.model.pipeline import IDS, LayerShapes, Pipeline
from rrfp_jax.runtime.model.roles import Roles
from rrfp_jax.runtime.programs.gradients import wide
from rrfp_jax.runtime.programs.library import specs_of
from rrfp_jax.runtime.programs.liveness import Liveness, footprint_of, program_of
from rrfp_jax.runtime.programs.stage_mesh import tracing_alone
from rrfp_jax.runtime.programs.virtual_stage import VirtualStageShape
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.runtime.stages.whole_optimizer import WholeOptimizer


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer for one microbatch of a bucket.

    Attributes:
        programs: what each kind of task costs; a kind that computes nothing here costs nothing.
        footprint: of the layer as a virtual stage by itself.
        prepared_bytes: made of parameters once a step.
        inputs: indices of the fields and numbers that it reads.
        carry_bytes: what it gives to the next layer.
    """

    programs: Mapping[Kind, ProgramCost]
    footprint: Footprint
    prepared_bytes: int
    inputs: frozenset[int]
    carry_bytes: int


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """What one layer keeps whatever the microbatches are.

    Attributes:
        parameters: their number.
        gradient_bytes: of the gradient of one microbatch; sums of them are float32 or wider.
    """

    parameters: int
    weight_bytes: int
    optimizer_bytes: int
    sum_bytes: int
    gradient_bytes: int

    @property
    def adding_bytes(self) -> int:
        """Moved to add a microbatch's gradient to the sums."""
        return self.gradient_bytes + 2 * self.sum_bytes

    @property
    def update_bytes(self) -> int:
        """Moved once a step: norms read parameters and sums, the update reads and writes all there is."""
        return 3 * (self.weight_bytes + self.sum_bytes) + 2 * self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """All layers of a model.

    Attributes:
        layers: by bucket, in the model's order.
        states: in the model's order.
        parameters: their number, tied ones once.
    """

    layers: Mapping[Bucket, Sequence[LayerCost]]
    states: Sequence[LayerState]
    parameters: int

    @classmethod
    def of(
        cls,
        pipe: Pipeline,
        buckets: Iterable[Bucket],
        optimizer: optax.GradientTransformation | None,
        *,
        kinds: Collection[Kind],
        remat: str,
    ) -> ModelCosts:
        """Analyse a model; nothing is allocated or compiled.

        Args:
            pipe: the model.
            buckets: at least one.
            optimizer: None if nothing is updated.
            kinds: of backward tasks that its schedule has.
            remat: see `autodiff/remat.py`.

        Raises:
            UsageError: a model or optimizer that does not work; see `Pipeline.shapes`, `Roles.of`,
                `gradient_flow` and `WholeOptimizer.trace`.
        """
        with tracing_alone():
            shapes = {bucket: pipe.shapes(specs_of(bucket)) for bucket in dict.fromkeys(buckets)}
            params = {str(i): layer.params for i, layer in enumerate(next(iter(shapes.values())))}
            roles = Roles.of(params, pipe.frozen, pipe.tied)
            own, leaves = roles.leaves(params), jax.tree.leaves(params)
            updated = own.owned_tree([leaves[place] for place in own.owned])
            whole = None if optimizer is None else WholeOptimizer.trace(optimizer, updated)
            layers = {
                b: layer_costs(
                    pipe, b, own, roles, gradient_flow(pipe, own, specs_of(b), roles), kinds, remat
                )
                for b, own in shapes.items()
            }
        return cls(
            layers=layers,
            states=[_state({layer: own}, roles, whole) for layer, own in params.items()],
            parameters=sum(
                leaf.size
                for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True)
                if path not in roles.owners
            ),
        )

    def bucket_ledger(
        self, bucket: Bucket, chunks: Sequence[range], kinds: Sequence[Collection[Kind]]
    ) -> BucketLedger:
        """What a bucket needs on a stage with these chunks; `kinds` of backward are by chunk."""
        inputs = [*specs_of(bucket).values(), IDS]
        virtual_stages = [[self.layers[bucket][i] for i in layers] for layers in chunks]
        read = frozenset().union(
            *(layer.inputs for virtual_stage in virtual_stages for layer in virtual_stage)
        )
        return BucketLedger(
            data_bytes=nbytes([inputs[i] for i in read]),
            prepared_bytes=sum(
                layer.prepared_bytes for virtual_stage in virtual_stages for layer in virtual_stage
            ),
            chunks=[
                _joined(virtual_stage, own) for virtual_stage, own in zip(virtual_stages, kinds, strict=True)
            ],
        )


def layer_costs(
    pipe: Pipeline,
    bucket: Bucket,
    shapes: Sequence[LayerShapes],
    roles: Roles,
    flow: Sequence[Border],
    kinds: Collection[Kind],
    remat: str,
) -> list[LayerCost]:
    """All layers of a model for a microbatch of a bucket, in the model's order; inside `tracing_alone`.

    Args:
        pipe: the model.
        bucket: of the microbatch.
        shapes: of its layers (`Pipeline.shapes`).
        roles: of its parameters.
        flow: which leaves of the carries have a gradient (`gradient_flow`).
        kinds: of backward tasks.
        remat: see `autodiff/remat.py`.
    """
    known: dict[Any, LayerCost] = {}
    costs = []
    for i, own in enumerate(shapes):
        trained = set(roles.leaves({str(i): own.params}).trained)
        shape = VirtualStageShape(
            pipe=pipe,
            layers=range(i, i + 1),
            fields=specs_of(bucket),
            shapes=shapes,
            trainable=[place in trained for place in range(len(jax.tree.leaves(own.params)))],
            carry_gradients=flow[i],
            cotangents=flow[i + 1],
            remat=remat,
        )
        leaves, structure = jax.tree.flatten(own.carry_in)
        last = i == len(pipe) - 1  # which has the loss as well
        alike = id(pipe.layers[i]), structure, *leaves, *sorted(trained), flow[i], flow[i + 1], last
        if alike not in known:
            known[alike] = _layer_cost(shape, kinds)
        costs.append(known[alike])
    return costs


def _layer_cost(shape: VirtualStageShape, kinds: Collection[Kind]) -> LayerCost:
    params, carry, inputs = shape.specs()
    traced = differentiate(
        *(shape.flat, params, carry, inputs),
        *(shape.trainable, shape.carry_gradients, shape.cotangents),
    )
    live = Liveness.unplaced(traced, carry, inputs, kinds)
    tasks = live.task_programs(dict.fromkeys((FORWARD, *kinds)))
    trained = len(traced.backward.closed.jaxpr.outvars) - len(traced.moving_in)
    added = {BACKWARD: trained, WEIGHT: trained}
    programs = {kind: program_cost(program_of(traced, kind).closed, added.get(kind, 0)) for kind in tasks}
    temporary = {kind.letter: cost.temporary_bytes for kind, cost in programs.items()}
    footprint = footprint_of(tasks, carry, live.sent, live.cotangents, live.gradients_sent)
    return LayerCost(
        programs=programs,
        footprint=replace(footprint, temporary_bytes=temporary),
        prepared_bytes=0 if traced.prepare is None else nbytes(traced.prepare.outputs),
        inputs=live.inputs,
        carry_bytes=nbytes(traced.forward.outputs[: traced.out]),
    )


def _state(params: Mapping[str, Any], roles: Roles, whole: WholeOptimizer | None) -> LayerState:
    """Of one layer, {index as text: tree}."""
    own, leaves = roles.leaves(params), jax.tree.leaves(params)
    (layer,) = map(int, params)
    trained = [leaves[place] for place in own.trained]
    return LayerState(
        parameters=sum(leaf.size for leaf in leaves),
        weight_bytes=nbytes(leaves),
        optimizer_bytes=whole.state_bytes(layer) if whole is not None and own.owned else 0,
        sum_bytes=nbytes([wide(leaf) for leaf in trained]),
        gradient_bytes=nbytes(trained),
    )


def _joined(costs: Sequence[LayerCost], kinds: Collection[Kind]) -> Footprint:
    """Of layers in a row, between which activations and gradients are temporary."""
    layers, tasks = [cost.footprint for cost in costs], (FORWARD, *kinds)
    first, last, letters = layers[0], layers[-1], [kind.letter for kind in tasks]
    halfway = sum(layer.held_after_input_bytes for layer in layers)
    return Footprint(
        activation_in_bytes=first.activation_in_bytes,
        activation_out_bytes=last.activation_out_bytes,
        gradient_in_bytes=last.gradient_in_bytes,
        gradient_out_bytes=first.gradient_out_bytes,
        held_after_forward_bytes=sum(layer.held_after_forward_bytes for layer in layers),
        held_after_input_bytes=halfway if INPUT in kinds else 0,
        temporary_bytes={kind.letter: _temporary(kind, costs) for kind in tasks},
        dropped_bytes={kind: _dropped(kind, layers) for kind in letters},
    )


def _temporary(kind: Kind, costs: Sequence[LayerCost]) -> int:
    """Of the layer that needs most, beside what the others need from the beginning."""
    own = [cost.programs[kind] for cost in costs]
    return sum(one.first_bytes for one in own) + max(one.temporary_bytes - one.first_bytes for one in own)


def _dropped(kind: str, layers: Sequence[Footprint]) -> int:
    """Arguments of a virtual stage's program that nobody needs after it."""
    own = [layer.dropped_bytes[kind] for layer in layers]
    if kind == FORWARD.letter:
        return own[0]
    if kind == WEIGHT.letter:
        return sum(own)
    inner = zip(own[:-1], layers, strict=False)  # whose gradients do not arrive as arguments
    return own[-1] + sum(max(size - layer.gradient_in_bytes, 0) for size, layer in inner)
