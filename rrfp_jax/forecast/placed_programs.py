"""The programs of a virtual stage on several devices: where each value lies, and what one device runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind
from rrfp_jax.forecast.per_device import per_device
from rrfp_jax.forecast.propagation import Layout, layouts
from rrfp_jax.runtime.autodiff.differentiate import Differentiated
from rrfp_jax.runtime.autodiff.traced import SCALE, Program, inline, without_barriers
from rrfp_jax.runtime.mesh.stage_mesh import AXES
from rrfp_jax.runtime.model.sharding import TP, WHOLE
from rrfp_jax.runtime.programs.gradients import where, wide
from rrfp_jax.runtime.programs.stage_programs import program_of
from rrfp_jax.runtime.programs.virtual_stage import VirtualStageShape
from rrfp_jax.runtime.sizes import on_the_way


def stage_of(width: int) -> AbstractMesh:
    """The mesh of a stage replica of so many devices, which nobody needs to have."""
    return AbstractMesh((1, width), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclass(frozen=True)
class PlacedPrograms:
    """What is known of a virtual stage's programs.

    Attributes:
        values: specs, with shardings, of their full argument lists; see `Differentiated`.
        programs: by kind, as one device has them.
        prepared: specs of what is made of parameters once a step.
    """

    values: Sequence[Any]
    programs: Mapping[Kind, ClosedJaxpr]
    prepared: Sequence[Any]


def placed_programs(
    traced: Differentiated, shape: VirtualStageShape, mesh: AbstractMesh, kinds: Collection[Kind]
) -> PlacedPrograms:
    """One program after the other, each for where those before leave their results, as they are compiled.

    Args:
        traced: of the virtual stage.
        shape: its layers and shardings.
        mesh: of the stage.
        kinds: of backward.
    """
    params, carry, inputs = shape.specs()
    values = spread(params, shape.sharding.of_params(shape.params), mesh)
    arriving = [
        *spread(carry, shape.carry_specs(carry, shape.ends.before), mesh),
        *spread(inputs, [WHOLE] * len(inputs), mesh),
    ]
    leaving = [*map(on_the_way, jax.tree.leaves(shape.carry_out)[: traced.out])]
    sent = spread(leaving, shape.carry_specs(leaving, shape.ends.after), mesh)
    trainable = shape.trainable or [True] * len(params)
    sums = where([wide(spec) for spec, own in zip(values, trainable, strict=True) if own])
    prepared: list[Any] = []
    if traced.prepare is not None:
        _, prepared = _placed(traced.prepare, values, [], mesh)
    values = [*values, *prepared, *arriving]
    flowing = [arriving[i].sharding for i in traced.moving_in]
    programs: dict[Kind, ClosedJaxpr] = {}
    for kind in (FORWARD, *sorted(kinds)):  # W takes what I gives
        out = {FORWARD: where(sent), WEIGHT: []}.get(kind, flowing)
        if kind is BACKWARD or kind is WEIGHT:
            out = [*out, *sums]
        programs[kind], results = _placed(program_of(traced, kind), values, out, mesh)
        if kind is FORWARD:
            values += [*results, *(sent[i] for i in traced.moving_out), *spread([SCALE], [WHOLE], mesh)]
        elif kind is INPUT:
            values += results
    return PlacedPrograms(values, programs, prepared)


def spread(leaves: Sequence[Any], specs: Sequence[PartitionSpec], mesh: AbstractMesh) -> list[Any]:
    """Specs of leaves, each with where it lies."""
    return [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, specs, strict=True)
    ]


def _placed(
    program: Program, values: Sequence[Any], out: Sequence[Any], mesh: AbstractMesh
) -> tuple[ClosedJaxpr, list[Any]]:
    """A program as one device has it, and specs of its results, the first of which lie as in `out`."""
    flat = without_barriers(inline(program.closed))
    free = len(flat.jaxpr.outvars) - len(out)
    known = layouts(flat, [values[i] for i in program.reads], [*out, *[None] * free])
    lie = [WHOLE if isinstance(atom, Literal) else _spec(known[atom], mesh) for atom in flat.jaxpr.outvars]
    return per_device(flat, known), spread(program.outputs, lie, mesh)


def _spec(layout: Layout, mesh: AbstractMesh) -> PartitionSpec:
    """A dimension that only some of the devices share counts as whole."""
    return PartitionSpec(*(TP if n > 1 and n == mesh.shape[TP] else None for n in layout))
