"""A virtual stage, consecutive layers of the model, as a pure function of flat lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rrfp_jax.runtime._jax import cast_like
from rrfp_jax.runtime.autodiff.residuals import NONE
from rrfp_jax.runtime.autodiff.traced import Specs
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh, WidthChanges
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.metrics import Name, kinds_of, numbers_of
from rrfp_jax.runtime.model.pipeline import IDS, LayerShapes, Pipeline, run_layers
from rrfp_jax.runtime.model.pipeline import Specs as Fields
from rrfp_jax.runtime.model.sharding import WHOLE, Sharding
from rrfp_jax.runtime.sizes import on_the_way


@dataclass(frozen=True, kw_only=True)
class VirtualStageShape:
    """One virtual stage for microbatches of given fields; specs only.

    `params` is {layer index as text: nested dict}; flat lists of parameters are in its leaf order.

    Attributes:
        shapes: of all layers of the model.
        remat: what the layers' backwards compute again; see `autodiff/remat.py`.
        trainable: which of the virtual stage's parameters have a gradient; None for all.
        carry_gradients: which leaves of the carry that arrives have a gradient; None for all that could.
        cotangents: the same of the carry that leaves; see `gradient_flow.py`.
        sharding: of parameters and carries, where the stage has several devices.
        ends: how the virtual stage meets its neighbours.
    """

    pipe: Pipeline
    layers: range
    fields: Fields
    shapes: Sequence[LayerShapes]
    remat: str = NONE
    trainable: Sequence[bool] | None = None
    carry_gradients: Sequence[int] | None = None
    cotangents: Sequence[int] | None = None
    sharding: Sharding = field(default_factory=Sharding)
    ends: WidthChanges = field(default_factory=WidthChanges)

    @cached_property
    def params(self) -> Params:
        """Specs of the virtual stage's parameters."""
        return {str(i): self.shapes[i].params for i in self.layers}

    @cached_property
    def carry_in(self) -> Any:
        """Specs of what arrives from the virtual stage before (None for the first)."""
        return self.shapes[self.layers.start].carry_in

    @cached_property
    def carry_out(self) -> Any:
        """Specs of what goes to the virtual stage after."""
        return self.shapes[self.layers.stop - 1].carry_out

    @property
    def input_names(self) -> list[str]:
        """The fields in the order of a program's inputs; the numbers for random keys come after them."""
        return sorted(self.fields)

    @cached_property
    def statistics(self) -> list[Name] | None:
        """What the statistics vector holds after total and weight: metrics; None if there is no loss here."""
        loss = jax.eval_shape(
            lambda *a: self._run(*a)[1],
            [self.params[str(i)] for i in self.layers],
            self.carry_in,
            dict(self.fields),
            IDS,
        )
        return None if loss is None else list(kinds_of([loss.metrics]).items())

    def _run(self, params: Any, carry: Any, fields: Any, ids: Any, training: bool = True) -> Any:
        return run_layers(
            self.pipe, self.layers, params, carry, fields, ids, training=training, remat=self.remat
        )

    def flat(
        self, params: Sequence[Any], carry: Sequence[Any], inputs: Sequence[Any], training: bool = True
    ) -> tuple[Any, Any, Any]:
        """The virtual stage as a function of flat lists; see `differentiate.StageFunction`."""
        tree = jax.tree.unflatten(jax.tree.structure(self.params), params)
        specs, structure = jax.tree.flatten(self.carry_in)
        carry = jax.tree.unflatten(structure, map(cast_like, carry, specs))
        names = zip(self.input_names, inputs, strict=False)
        fields = {name: value.astype(self.fields[name].dtype) for name, value in names}
        out, loss = self._run([tree[str(i)] for i in self.layers], carry, fields, inputs[-1], training)
        leaves = [leaf.astype(on_the_way(leaf).dtype) for leaf in map(jnp.asarray, jax.tree.leaves(out))]
        if loss is None:
            return leaves, None, None
        numbers = [loss.total, loss.weight]
        for name in sorted(loss.metrics):
            numbers += numbers_of(loss.metrics[name]).values()
        real = jnp.result_type(jnp.float32, *numbers)
        return leaves, loss.total, jnp.stack([jnp.asarray(n, real) for n in numbers])

    def specs(self) -> tuple[Specs, Specs, Specs]:
        """Flat specs of parameters, carry and inputs."""
        inputs = [*(on_the_way(self.fields[name]) for name in self.input_names), IDS]
        return jax.tree.leaves(self.params), list(map(on_the_way, jax.tree.leaves(self.carry_in))), inputs

    def placed(self, stage_mesh: StageMesh) -> tuple[Specs, Specs, Specs]:
        """The same with their shardings on a stage's devices."""
        params, carry, inputs = self.specs()
        return (
            stage_mesh.spread(params, self.sharding.of_params(self.params)),
            stage_mesh.spread(carry, self.carry_specs(carry, self.ends.before)),
            stage_mesh.spread(inputs, [WHOLE] * len(inputs)),
        )

    def carry_specs(self, leaves: Sequence[Any], resized: bool) -> list[PartitionSpec]:
        """How a carry lies, at an end where the neighbour has another number of devices or not."""
        return [WHOLE] * len(leaves) if resized else self.sharding.of_carry(leaves)


def placed_params(params: Params, stage_mesh: StageMesh, sharding: Sharding) -> Params:
    """Specs of parameters, {layer index as text: tree}, with where they lie on a stage's devices."""
    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, stage_mesh.spread(leaves, sharding.of_params(params)))
