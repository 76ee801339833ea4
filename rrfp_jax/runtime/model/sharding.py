"""How parameters and carries lie on the devices of a stage: what `sharding=` and `carry=` mean leaf by leaf.

The product of activations with a matrix whose columns are spread ("column-parallel", `P(None, "tp")`) needs
no communication. If its rows are spread (`P("tp", None)`), a sum over the devices follows (arXiv:1909.08053).
XLA derives the shardings of everything in between from those of the parameters, and puts the collectives in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.roles import from_the_front, leaf_paths, some_of

TP = "tp"

WHOLE = PartitionSpec()
"""Of what every device of a stage has."""


def without_mesh() -> Any:
    """Inside, axes in the metadata of parameters are names of any mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def here(spec: PartitionSpec) -> PartitionSpec:
    """A spec for any mesh as one for a stage's: whole where it names other axes."""

    def own(names: Any) -> Any:
        return TP if TP in (names if isinstance(names, tuple) else (names,)) else None

    return PartitionSpec(*map(own, spec))


@dataclass(frozen=True)
class Sharding:
    """Of a model's parameters and carries.

    Attributes:
        params: by path, of those that are spread over a stage's devices.
        carry: of what stages send to each other, as far as it has so many dimensions; else it is whole.
    """

    params: Mapping[str, PartitionSpec] = field(default_factory=dict)
    carry: PartitionSpec = WHOLE

    def of_params(self, tree: Params) -> list[PartitionSpec]:
        """Of the leaves of {layer index as text: tree}."""
        return [self.params.get(path, WHOLE) for path in leaf_paths(tree)]

    def of_carry(self, carry: Any) -> list[PartitionSpec]:
        """Of the leaves of a carry."""
        leaves, least = jax.tree.leaves(carry), len(self.carry)
        return [self.carry if len(leaf.shape) >= least else WHOLE for leaf in leaves]

    def check_carry(self, carry: Any, tp: int) -> None:
        """Refuse a carry that cannot be spread.

        Raises:
            UsageError: a dimension that `tp` devices cannot share evenly.
        """
        for leaf, spec in zip(jax.tree.leaves(carry), self.of_carry(carry), strict=True):
            _check(f"carry={self.carry}: a carry of {leaf.dtype}{list(leaf.shape)}", leaf.shape, spec, tp)

    @classmethod
    def of(
        cls,
        params: Params,
        layers: Collection[int],
        metadata: Mapping[str, PartitionSpec],
        patterns: Mapping[str, PartitionSpec],
        carry: PartitionSpec,
        owners: Mapping[str, str],
        tp: int,
    ) -> Sharding:
        """Resolve patterns and metadata; with one device per stage they are only checked for their names.

        Args:
            params: specs of the whole model, {layer index as text: tree}.
            layers: indices of those that lie on such stages.
            metadata: what the layers themselves say, by path.
            patterns: of paths, as in `Pipeline(frozen=...)`; the first that matches goes before metadata.
            carry: see `Sharding`.
            owners: by path of each tied alias its owner's; they lie alike, whichever name a pattern matches.
            tp: number of devices per stage.

        Raises:
            UsageError: a pattern that matches nothing, an axis that there is not, a dimension that the
                devices cannot share evenly.
        """
        specs = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
        rules = [(from_the_front(pattern, len(params)), spec) for pattern, spec in patterns.items()]
        for pattern, (wanted, _) in zip(patterns, rules, strict=True):
            if not any(fnmatchcase(path, wanted) for path in specs):
                raise UsageError(
                    f"sharding={{{pattern!r}: ...}} matches no parameter; there are {some_of(specs)}"
                )
        if tp == 1:
            return cls()

        def of(path: str) -> PartitionSpec:
            owner = owners.get(path, path)
            names = [owner, *(alias for alias, own in owners.items() if own == owner)]
            given = (spec for wanted, spec in rules if any(fnmatchcase(name, wanted) for name in names))
            return next(given, metadata.get(owner, WHOLE))

        found = {path: of(path) for path in specs if int(path.split(".")[0]) in layers}
        for path, spec in found.items():
            shape, dtype = specs[path].shape, specs[path].dtype
            _check(f"parameter {path}, {dtype}{list(shape)}", shape, spec, tp)
        _check(f"carry={carry}", (), carry, tp)
        return cls({path: spec for path, spec in found.items() if spec != WHOLE}, carry)


def _check(what: str, shape: Sequence[int], spec: PartitionSpec, tp: int) -> None:
    """Refuse a spec that cannot be; of a shape without dimensions only its axes are looked at."""
    if shape and len(spec) > len(shape):
        raise UsageError(f"{what}: {spec} has more dimensions than it")
    for i, names in enumerate(spec):
        axes = names if isinstance(names, tuple) else (names,)
        if wrong := [name for name in axes if name not in (None, TP)]:
            raise UsageError(f"{what}: {spec} names the axis {wrong[0]!r}; stages have one, 'tp'")
        if TP in axes and shape and shape[i] % tp:
            raise UsageError(
                f"{what}: dimension {i} cannot be shared evenly by tp={tp} devices as {spec} asks; take "
                f"another size, or keep it whole, PartitionSpec()"
            )
