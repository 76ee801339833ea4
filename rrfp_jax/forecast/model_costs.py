"""What a whole model takes: its layers' costs by bucket, and what each layer keeps on its devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from rrfp_jax.core.step_rules import Bucket
from rrfp_jax.core.tasks import Kind
from rrfp_jax.forecast.layer_costs import LayerCost, joined, layer_costs
from rrfp_jax.runtime.mesh.stage_mesh import tracing_alone
from rrfp_jax.runtime.model.gradient_flow import gradient_flow, refuse_untrained
from rrfp_jax.runtime.model.pipeline import Pipeline
from rrfp_jax.runtime.model.roles import Roles, leaf_paths
from rrfp_jax.runtime.programs.gradients import wide
from rrfp_jax.runtime.programs.library import specs_of
from rrfp_jax.runtime.sizes import nbytes
from rrfp_jax.runtime.stages.memory import BucketLedger
from rrfp_jax.runtime.stages.optimizer import WholeOptimizer


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
            remat: see `autodiff/residuals.py`.

        Raises:
            UsageError: a model or optimizer that does not work; see `Pipeline.shapes`, `Roles.of`,
                `gradient_flow`, `refuse_untrained` and `WholeOptimizer.trace`.
        """
        with tracing_alone():
            shapes = {bucket: pipe.shapes(specs_of(bucket)) for bucket in dict.fromkeys(buckets)}
            params = {str(i): layer.params for i, layer in enumerate(next(iter(shapes.values())))}
            roles = Roles.of(params, pipe.frozen, pipe.tied, pipe.constants(params))
            own, leaves = roles.leaves(params), jax.tree.leaves(params)
            updated = own.owned_tree([leaves[place] for place in own.owned])
            whole = None if optimizer is None else WholeOptimizer.trace(optimizer, updated)
            flows = {b: gradient_flow(pipe, own, specs_of(b), roles) for b, own in shapes.items()}
            if optimizer is not None:
                refuse_untrained([*flows.values()])
            layers = {
                b: layer_costs(pipe, b, own, roles, flows[b].borders, kinds, remat)
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
        virtual_stages = [[self.layers[bucket][i] for i in layers] for layers in chunks]
        footprints = [joined(layers, own) for layers, own in zip(virtual_stages, kinds, strict=True)]
        return BucketLedger.of(bucket, [layer for own in virtual_stages for layer in own], footprints)


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
