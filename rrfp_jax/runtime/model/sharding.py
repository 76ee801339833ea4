"""How parameters and carries lie on the devices of a stage: what `sharding=` and `carry=` mean leaf by leaf.

The product of activations with a matrix whose columns are spread ("column-parallel", `P(None, "tp")`) needs
no communication. If its rows are spread (`P("tp", None)`), a sum over the devices follows (arXiv:1909.08053).
XLA derives the shardings of everything in between from those of the parameters, and puts the collectives in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.pipeline import WHOLE, LayerShapes, Pipeline
from rrfp_jax.runtime.model.roles import Roles, leaf_paths, matching

TP = "tp"


@dataclass(frozen=True)
class Sharding:
    """Specs of parameters that are spread, by path, and of carries with as many dimensions as `carry`."""

    params: Mapping[str, PartitionSpec] = field(default_factory=dict)
    carry: PartitionSpec = WHOLE

    def of_params(self, tree: Params) -> list[PartitionSpec]:
        """Specs of the leaves of {layer index as text: tree}."""
        return [self.params.get(path, WHOLE) for path in leaf_paths(tree)]

    def of_carry(self, carry: Any) -> list[PartitionSpec]:
        """Specs of the leaves of a carry."""
        leaves, least = jax.tree.leaves(carry), len(self.carry)
        return [self.carry if len(leaf.shape) >= least else WHOLE for leaf in leaves]

    def check_carry(self, carry: Any, tp: int) -> None:
        """Refuse a carry with a dimension that `tp` devices cannot share evenly."""
        for leaf, spec in zip(jax.tree.leaves(carry), self.of_carry(carry), strict=True):
            _check(f"carry={self.carry}: a carry of {leaf.dtype}{list(leaf.shape)}", leaf.shape, spec, tp)


def sharding_of(
    pipe: Pipeline, shapes: Sequence[LayerShapes], roles: Roles, layers: Collection[int], tp: int
) -> Sharding:
    """The sharding on the stages of `tp` devices that have these layers; only names are checked for one.

    The first of the model's patterns that matches a parameter goes before what its layer says of it. Tied
    parameters lie alike, whichever name a pattern matches.
    """
    params = {str(i): layer.params for i, layer in enumerate(shapes)}
    specs = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    rules = [
        (matching(f"sharding={{{pattern!r}: ...}}", pattern, specs, len(params)), spec)
        for pattern, spec in pipe.sharding.items()
    ]
    if tp == 1:
        return Sharding()

    def of(path: str) -> PartitionSpec:
        owner = roles.owners.get(path, path)
        names = [owner, *(alias for alias, own in roles.owners.items() if own == owner)]
        given = (spec for matched, spec in rules if not matched.isdisjoint(names))
        layer, _, own = owner.partition(".")
        said = shapes[int(layer)].partition.get(own, WHOLE)  # for any mesh: whole where it names other axes
        return next(given, PartitionSpec(*(TP if TP in axes else None for axes in _axes(said))))

    found = {path: of(path) for path in specs if int(path.partition(".")[0]) in layers}
    for path, spec in found.items():
        shape, dtype = specs[path].shape, specs[path].dtype
        _check(f"parameter {path}, {dtype}{list(shape)}", shape, spec, tp)
    _check(f"carry={pipe.carry}", (), pipe.carry, tp)
    return Sharding({path: spec for path, spec in found.items() if spec != WHOLE}, pipe.carry)


def _axes(spec: PartitionSpec) -> list[tuple[Any, ...]]:
    """By dimension, the axes that it is spread over."""
    return [names if isinstance(names, tuple) else (names,) for names in spec]


def _check(what: str, shape: Sequence[int], spec: PartitionSpec, tp: int) -> None:
    """Refuse a spec that cannot be; of a shape without dimensions only its axes are looked at."""
    if shape and len(spec) > len(shape):
        raise UsageError(f"{what}: {spec} has more dimensions than it")
    for i, axes in enumerate(_axes(spec)):
        if wrong := [name for name in axes if name not in (None, TP)]:
            raise UsageError(f"{what}: {spec} names the axis {wrong[0]!r}; stages have one, 'tp'")
        if TP in axes and shape and shape[i] % tp:
            raise UsageError(
                f"{what}: dimension {i} cannot be shared evenly by tp={tp} devices as {spec} asks; take "
                f"another size, or keep it whole, PartitionSpec()"
            )
