"""What each layer of a model takes of a device in time and memory, predicted from shapes alone.

Every distinct layer is traced and analysed once, as a virtual stage of one layer. A virtual stage of several
layers takes what they take together, so any split can be judged without tracing it. That leaves out what
layers share when they are compiled together. It is next to nothing, since only the carry is between them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax

from rrfp_jax.core.footprint import Footprint
from rrfp_jax.core.step_rules import Bucket
from rrfp_jax.core.tasks import FORWARD, INPUT, KINDS, Kind
from rrfp_jax.forecast.cost_analysis import ProgramCost, program_cost
from rrfp_jax.runtime.autodiff.traced import Program
from rrfp_jax.runtime.model.gradient_flow import Border
from rrfp_jax.runtime.model.pipeline import LayerShapes, Pipeline
from rrfp_jax.runtime.model.roles import Roles
from rrfp_jax.runtime.programs.library import specs_of
from rrfp_jax.runtime.programs.stage_programs import StagePrograms, VirtualStageShape
from rrfp_jax.runtime.sizes import nbytes


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer for one microbatch of a bucket.

    Attributes:
        programs: what each kind of task costs; a kind that computes nothing here costs nothing.
        footprint: of the layer as a virtual stage by itself.
        gradient_bytes: of the largest gradient of a parameter.
        prepared_bytes: made of parameters once a step.
        inputs: indices of the fields and numbers that it reads.
        carry_bytes: what it gives to the next layer.
    """

    programs: Mapping[Kind, ProgramCost]
    footprint: Footprint
    gradient_bytes: int
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
) -> list[LayerCost]:
    """All layers of a model for a microbatch of a bucket, in the model's order; inside `tracing_alone`.

    Args:
        pipe: the model.
        bucket: of the microbatch.
        shapes: of its layers (`Pipeline.shapes`).
        roles: of its parameters.
        flow: which leaves of the carries have a gradient (`gradient_flow`).
        kinds: of backward tasks.
        remat: see `autodiff/residuals.py`.
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


@dataclass(frozen=True)
class CountedProgram:
    """What a program costs; asked for its memory like a compiled one."""

    cost: ProgramCost

    def memory_analysis(self) -> CountedProgram:
        """As of a compiled program, whose bytes of temporaries are asked for."""
        return self

    @property
    def temp_size_in_bytes(self) -> int:
        """See `memory_analysis`."""
        return self.cost.temporary_bytes


class OnPaper:
    """Counts what programs cost, wherever values lie; see `Lowering`."""

    def spread(self, leaves: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        """The specs of leaves as they are."""
        return list(leaves)

    def lower(
        self, program: Program, given: Sequence[Any], first: Sequence[Any], sums: Sequence[Any]
    ) -> CountedProgram:
        """What a program costs, even if it does nothing."""
        return CountedProgram(program_cost(program.closed, len(sums)))

    def outputs(self, program: Program, lowered: CountedProgram) -> list[Any]:
        """Specs of its results."""
        return program.outputs


def _layer_cost(shape: VirtualStageShape, kinds: Collection[Kind]) -> LayerCost:
    params, _, _ = shape.specs()
    programs = StagePrograms.lower(shape, kinds, OnPaper())
    traced = programs.traced
    return LayerCost(
        programs={kind: own.cost for kind, own in programs.lowered.items()},
        footprint=programs.footprint,
        gradient_bytes=max(map(nbytes, compress(params, shape.trainable or ())), default=0),
        prepared_bytes=programs.prepared_bytes,
        inputs=programs.inputs,
        carry_bytes=nbytes(traced.forward.outputs[: traced.out]),
    )


def joined(costs: Sequence[LayerCost], kinds: Collection[Kind]) -> Footprint:
    """What a microbatch takes of layers in a row, between which activations and gradients are temporary.

    Args:
        costs: of the layers.
        kinds: of backward tasks.
    """
    layers, tasks = [cost.footprint for cost in costs], (FORWARD, *kinds)
    first, last = layers[0], layers[-1]
    halfway = sum(layer.held_after_input_bytes for layer in layers)
    return Footprint(
        activation_in_bytes=first.activation_in_bytes,
        activation_out_bytes=last.activation_out_bytes,
        gradient_in_bytes=last.gradient_in_bytes,
        gradient_out_bytes=first.gradient_out_bytes,
        held_after_forward_bytes=sum(layer.held_after_forward_bytes for layer in layers),
        held_after_input_bytes=halfway if INPUT in kinds else 0,
        temporary_bytes={kind.letter: _temporary(kind, costs) for kind in tasks},
        dropped_bytes={kind.letter: _dropped(kind, layers) for kind in tasks},
    )


def _temporary(kind: Kind, costs: Sequence[LayerCost]) -> int:
    """Of the layer that needs most; a compiler may keep one gradient of another layer beside it."""
    needed = [cost.programs[kind].temporary_bytes for cost in costs]
    if len(KINDS[kind].parts) == 1:
        return max(needed)
    others = [max((own.gradient_bytes for own in costs if own is not cost), default=0) for cost in costs]
    return max(own + other for own, other in zip(needed, others, strict=True))


def _dropped(kind: Kind, layers: Sequence[Footprint]) -> int:
    """Arguments of a virtual stage's program that nobody needs after it."""
    own = [layer.dropped_bytes[kind.letter] for layer in layers]
    if (flow := KINDS[kind].flow) >= 0:
        return own[0] if flow else sum(own)
    inner = zip(own[:-1], layers, strict=False)  # whose gradients do not arrive as arguments
    return own[-1] + sum(max(size - layer.gradient_in_bytes, 0) for size, layer in inner)
