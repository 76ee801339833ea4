"""A virtual stage, consecutive layers of the model, as a pure function of flat lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rrfp_jax.runtime._jax import cast_like
from rrfp_jax.runtime.autodiff.differentiate import Differentiated, differentiate
from rrfp_jax.runtime.autodiff.residuals import NONE
from rrfp_jax.runtime.autodiff.traced import Specs, reduce
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh, WidthChanges
from rrfp_jax.runtime.model.layers import Params
from rrfp_jax.runtime.model.metrics import Name, kinds_of, numbers_of
from rrfp_jax.runtime.model.pipeline import IDS, LayerShapes, Pipeline, run_layers
from rrfp_jax.runtime.model.pipeline import Specs as Fields
from rrfp_jax.runtime.model.sharding import WHOLE, Sharding
from rrfp_jax.runtime.sizes import on_the_way

Spread: TypeAlias = Callable[[Sequence[Any], Sequence[PartitionSpec]], list[Any]]
"""Specs of leaves, and how each is partitioned -> specs with where they lie."""


@dataclass(frozen=True, kw_only=True)
class VirtualStageShape:
    """One virtual stage for microbatches of given fields; specs only.

    `params` is {layer index as text: nested dict}; flat lists of parameters are in its leaf order.

    Attributes:
        shapes: of all layers of the model.
        remat: what the layers' backwards compute again; see `autodiff/residuals.py`.
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

    def traced(self, training: bool) -> Differentiated:
        """Its programs: for training, or a forward alone, which leaves nothing for a backward."""
        if training:
            chosen = self.trainable, self.carry_gradients, self.cotangents
            return differentiate(self.flat, *self.specs(), *chosen)
        params, carry, _ = self.specs()
        n, m, sends = len(params), len(params) + len(carry), 0

        def forward(*args: Any) -> list[Any]:
            nonlocal sends
            leaves, _, statistics = self.flat(args[:n], args[n:m], args[m:], training=False)
            sends = len(leaves)
            return [*leaves, *([] if statistics is None else [statistics])]

        program = reduce(jax.make_jaxpr(forward)(*chain.from_iterable(self.specs())))
        return Differentiated(
            prepare=None,
            forward=program,
            backward=reduce(jax.make_jaxpr(lambda: [])()),
            out=sends,
            moving_in=(),
            moving_out=(),
            has_statistics=len(program.outputs) > sends,
            fixed=n,
            cotangents=m,
        )

    def placed(self, spread: Spread) -> tuple[Specs, Specs, Specs]:
        """The same as `specs`, with where they lie."""
        params, carry, inputs = self.specs()
        return (
            spread(params, self.sharding.of_params(self.params)),
            spread(carry, self._carry_specs(carry, self.ends.before)),
            spread(inputs, [WHOLE] * len(inputs)),
        )

    def sent(self, spread: Spread, count: int) -> Specs:
        """The first leaves of the carry that goes on, with where they lie; the model's last sends none."""
        leaves = list(map(on_the_way, jax.tree.leaves(self.carry_out)[:count]))
        return spread(leaves, self._carry_specs(leaves, self.ends.after))

    def _carry_specs(self, leaves: Sequence[Any], resized: bool) -> list[PartitionSpec]:
        """How a carry lies, at an end where the neighbour has another number of devices or not."""
        return [WHOLE] * len(leaves) if resized else self.sharding.of_carry(leaves)


def placed_params(params: Params, stage_mesh: StageMesh, sharding: Sharding) -> Params:
    """Specs of parameters, {layer index as text: tree}, with where they lie on a stage's devices."""
    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, stage_mesh.spread(leaves, sharding.of_params(params)))
