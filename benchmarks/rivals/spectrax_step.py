"""SpectraX's 1F1B on the model of a case. Nothing imports this, as its package `spectrax-lib` is AGPL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
import spectrax
from spectrax.runtime import Std1F1B, sxjit, sxstage_iter, sxvalue_and_grad

from benchmarks.rivals.cases import STAGES, CaseModel
from benchmarks.rivals.one_process import System, optimizer
from configs.quickstart import loss


class SpectraX:
    """Value and gradient by its schedule, one function with marks between stages; then an update of each
    stage, on its device. Its backwards compute the forward again, from a stage's inputs. Microbatches of
    several lengths are padded to the longest, as its schedules cut one array."""

    def __init__(self, model: CaseModel) -> None:
        self._model = model
        mesh = spectrax.create_mesh(axis_dims=(STAGES, 1, 1, 1, 1, 1), mpmd_axis="pp")
        schedule = Std1F1B(microbatches=model.case.microbatches)
        piped = sxjit(self._loss, mesh=mesh, schedule=schedule, batch_argnums=1)
        self._value_and_grad = sxvalue_and_grad(piped)
        self._values = [
            jax.device_put(model.stage_values(stage), jax.devices()[stage]) for stage in range(STAGES)
        ]
        self._states = [jax.jit(optimizer().init)(own) for own in self._values]
        self._update = jax.jit(self._updated, donate_argnums=(0, 1))
        self._batch = {k: v.reshape(-1, *v.shape[2:]) for k, v in model.padded.items()}

    def _loss(self, params: Any, mb: Any) -> Any:
        """Of a microbatch; the schedule takes the mean of them."""
        carry: Any = None
        for stage, own in enumerate(params):
            carry = self._model.run_stage(stage, own, carry, mb)
            if stage < STAGES - 1:
                carry = sxstage_iter(carry)
        return loss(carry, mb).total * (self._model.case.microbatches / self._model.weight)

    def _updated(self, params: Any, state: Any, gradient: Any) -> Any:
        updates, state = optimizer().update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    def step(self) -> float:
        value, (gradient,) = self._value_and_grad(self._values, self._batch)
        updated = map(self._update, self._values, self._states, gradient)
        self._values, self._states = map(list, zip(*updated, strict=True))
        return float(value)

    def params(self) -> Any:
        return self._values


SYSTEMS: Mapping[str, Callable[[CaseModel], System]] = {"spectrax": SpectraX}
