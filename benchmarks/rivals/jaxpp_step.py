"""JaxPP's 1F1B on the model of a case, from a folder with its sources: no registry has the package.

Its own way is a process a stage over NCCL. Without GPUs it runs in one process, with `jax.device_put` between
devices, which its sources provide for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jaxpp.api as jaxpp
import numpy as np
import optax

from benchmarks.rivals.cases import STAGES, CaseModel
from benchmarks.rivals.one_process import System, optimizer
from configs.quickstart import loss


class JaxPP:
    """Losses and gradient by its loop, one function with marks behind stages; then an update of each stage,
    on its device. Inside the loop's function the update would share a counter between stages, an array that
    jax 0.10 refuses in a run of one process. Microbatches of several lengths are padded to the longest, as
    the loop takes slices of one array."""

    def __init__(self, model: CaseModel) -> None:
        self._model = model
        devices = np.array(jax.devices()[:STAGES])
        mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("stages",)), "stages")
        self._schedule = jaxpp.Std1F1B(STAGES)
        places = [jax.sharding.NamedSharding(own, jax.sharding.PartitionSpec()) for own in mesh.unstack]
        self._values = [
            jax.device_put(model.stage_values(stage), place) for stage, place in enumerate(places)
        ]
        self._states = [jax.jit(optimizer().init)(own) for own in self._values]
        self._losses_and_grad = jaxpp.mpmd_jit_with_loop(self._looped, mesh)
        self._update = jax.jit(self._updated, donate_argnums=(0, 1))

    def _loss(self, params: Any, mb: Any) -> Any:
        """A microbatch's share of the loss."""
        carry: Any = None
        for stage, own in enumerate(params):
            carry = self._model.run_stage(stage, own, carry, mb)
            value = carry if stage < STAGES - 1 else loss(carry, mb).total / self._model.weight
            carry = jaxpp.mark_stage_end(value)
        return carry

    def _looped(self, params: Any, batch: Any) -> Any:
        of_one = partial(jax.value_and_grad(self._loss), params)
        return jaxpp.treduce(of_one, batch, schedule=self._schedule)

    def _updated(self, params: Any, state: Any, gradient: Any) -> Any:
        updates, state = optimizer().update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    def step(self) -> float:
        found = self._losses_and_grad(self._values, self._model.padded)
        losses, gradient = jax.tree.map(lambda own: own.to_mpmd_local_array, found)
        updated = map(self._update, self._values, self._states, gradient)
        self._values, self._states = map(list, zip(*updated, strict=True))
        return float(np.asarray(losses).sum())

    def params(self) -> Any:
        return self._values


SYSTEMS: Mapping[str, Callable[[CaseModel], System]] = {"jaxpp": JaxPP}
