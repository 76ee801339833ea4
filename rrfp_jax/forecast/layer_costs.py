"""What each layer of a model takes of a device in time and memory, predicted from shapes alone.

Every distinct layer is traced and analysed once, as a virtual stage of one layer. A virtual stage of several
layers takes what they take together, so any split can be judged without tracing it. That leaves out what
layers share when they are compiled together. It is next to nothing, since only the carry is between them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh

from rrfp_jax.core.footprint import Footprint
from rrfp_jax.core.step_rules import Bucket
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind
from rrfp_jax.forecast.cost_analysis import ProgramCost, program_cost
from rrfp_jax.forecast.placed_programs import placed_programs
from rrfp_jax.forecast.temporaries import temporaries_of
from rrfp_jax.runtime.autodiff.differentiate import differentiate
from rrfp_jax.runtime.model.pipeline import LayerShapes, Pipeline
from rrfp_jax.runtime.model.roles import Roles
from rrfp_jax.runtime.model.sharding import Sharding
from rrfp_jax.runtime.model.untrained import Border
from rrfp_jax.runtime.programs.library import specs_of
from rrfp_jax.runtime.programs.stage_programs import Liveness, footprint_of, program_of
from rrfp_jax.runtime.programs.virtual_stage import VirtualStageShape
from rrfp_jax.runtime.sizes import nbytes


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer for one microbatch of a bucket.

    Attributes:
        programs: what each kind of task costs; a kind that computes nothing here costs nothing.
        largest_result: by kind, bytes of the largest array that its program gives, besides gradients.
        footprint: of the layer as a virtual stage by itself.
        prepared_bytes: made of parameters once a step.
        inputs: indices of the fields and numbers that it reads.
        carry_bytes: what it gives to the next layer.
    """

    programs: Mapping[Kind, ProgramCost]
    largest_result: Mapping[Kind, int]
    footprint: Footprint
    prepared_bytes: int
    inputs: frozenset[int]
    carry_bytes: int


def layer_costs(
    pipe: Pipeline,
    bucket: Bucket,
    shapes: Sequence[LayerShapes],
    roles: Roles,
    flow: Sequence[Border],
    kinds: Collection[Kind],
    remat: str,
    sharding: Sharding | None = None,
    mesh: AbstractMesh | None = None,
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
        sharding, mesh: of stages of several devices; inside the mesh.
    """
    known: dict[Any, LayerCost] = {}
    costs = []
    sharding = sharding or Sharding()
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
            sharding=sharding,
        )
        leaves, structure = jax.tree.flatten(own.carry_in)
        last = i == len(pipe) - 1  # which has the loss as well
        lie = (*sharding.of_params({str(i): own.params}),)
        alike = id(pipe.layers[i]), structure, *leaves, *sorted(trained), flow[i], flow[i + 1], last, lie
        if alike not in known:
            known[alike] = _layer_cost(shape, kinds, mesh)
        costs.append(known[alike])
    return costs


def _layer_cost(shape: VirtualStageShape, kinds: Collection[Kind], mesh: AbstractMesh | None) -> LayerCost:
    params, carry, inputs = shape.specs()
    traced = differentiate(
        *(shape.flat, params, carry, inputs),
        *(shape.trainable, shape.carry_gradients, shape.cotangents),
    )
    every = (FORWARD, *kinds)
    whole = {kind: program_of(traced, kind).closed for kind in every}
    own: Mapping[Kind, ClosedJaxpr] = whole
    prepared: Sequence[Any] = () if traced.prepare is None else traced.prepare.outputs
    if mesh is None:
        live = Liveness.unplaced(traced, carry, inputs, kinds)
    else:
        placed = placed_programs(traced, shape, mesh, kinds)
        live = Liveness(traced, kinds, placed.values[traced.fixed :], len(carry), len(inputs), shape.ends)
        own, prepared = placed.programs, placed.prepared
    tasks = live.task_programs(dict.fromkeys(every))
    trained = len(traced.backward.closed.jaxpr.outvars) - len(traced.moving_in)
    added = {kind: trained if kind in (BACKWARD, WEIGHT) else 0 for kind in every}
    programs = {
        kind: replace(
            program_cost(whole[kind], added[kind]),
            temporaries=temporaries_of(own[kind], added[kind], mesh is not None),
        )
        for kind in every
    }
    temporary = {kind.letter: cost.temporary_bytes for kind, cost in programs.items()}
    footprint = footprint_of(tasks, live.carry, live.sent, live.cotangents, live.gradients_sent)
    return LayerCost(
        programs=programs,
        largest_result={kind: _largest_result(own[kind], added[kind]) for kind in every},
        footprint=replace(footprint, temporary_bytes=temporary),
        prepared_bytes=nbytes(prepared),
        inputs=live.inputs,
        carry_bytes=nbytes(traced.forward.outputs[: traced.out]),
    )


def _largest_result(closed: ClosedJaxpr, added: int) -> int:
    outputs = closed.jaxpr.outvars[: len(closed.jaxpr.outvars) - added]
    return max((nbytes(atom.aval) for atom in outputs), default=0)


def joined(costs: Sequence[LayerCost], kinds: Collection[Kind]) -> Footprint:
    """What a microbatch takes of layers in a row, between which activations and gradients are temporary.

    Args:
        costs: of the layers.
        kinds: of backward tasks.
    """
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
    """Of the layer that needs most, beside what is there of the others.

    A place of a later layer's result is free until that is written. What is written first of another layer is
    there, and what its gradients wait with; see `Temporaries`. But what takes more memory than any kernel of
    this layer waits until this layer is done, so gradients wait and first writes are no first ones.
    """
    own = [cost.programs[kind].temporaries for cost in costs]
    most = 0
    for i, one in enumerate(own):
        later = costs[i + 1 :] if kind is FORWARD else costs[:i]
        spare = max((cost.largest_result[kind] for cost in later), default=0)
        others = [*own[:i], *own[i + 1 :]]
        first = sum(other.first_bytes for other in others if other.first_bytes <= one.steepest)
        left = sum(kept for after in own[i + 1 :] for rise, kept in after.late if rise > one.steepest)
        left += sum(after.waiting_bytes for after in own[i + 1 :])
        most = max(most, one.most(spare) + first + left)
    return most


def _dropped(kind: str, layers: Sequence[Footprint]) -> int:
    """Arguments of a virtual stage's program that nobody needs after it."""
    own = [layer.dropped_bytes[kind] for layer in layers]
    if kind == FORWARD.letter:
        return own[0]
    if kind == WEIGHT.letter:
        return sum(own)
    inner = zip(own[:-1], layers, strict=False)  # whose gradients do not arrive as arguments
    return own[-1] + sum(max(size - layer.gradient_in_bytes, 0) for size, layer in inner)
