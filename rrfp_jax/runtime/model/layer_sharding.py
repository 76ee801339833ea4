"""How a model's parameters lie on stages: what its layers say by themselves, and what its Pipeline says."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rrfp_jax.runtime.model.pipeline import LayerShapes, Pipeline
from rrfp_jax.runtime.model.roles import Roles
from rrfp_jax.runtime.model.sharding import Sharding, here


def sharding_of(
    pipe: Pipeline, shapes: Sequence[LayerShapes], roles: Roles, layers: Collection[int], width: int
) -> Sharding:
    """Of the stages of so many devices; see `Sharding.of`.

    Args:
        pipe: the model.
        shapes: of its layers.
        roles: of its parameters.
        layers: indices of those that lie on such stages.
        width: number of devices.

    Raises:
        UsageError: as `Library.sharding`.
    """
    metadata = {
        ".".join(filter(None, [str(i), path])): here(spec)
        for i, layer in enumerate(shapes)
        for path, spec in layer.partition.items()
    }
    params = {str(i): layer.params for i, layer in enumerate(shapes)}
    return Sharding.of(params, layers, metadata, pipe.sharding, pipe.carry, roles.owners, width)
