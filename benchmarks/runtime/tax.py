"""The tax: a step of a GPT by the pipeline on one device, against hand-written jitted loops.

Four ways to do the same step, timed in turns:

    pipeline   the Trainer
    programs   the Trainer's own programs, called by a plain loop
    fused      by hand: one program a microbatch, `value_and_grad` and the sum of gradients
    apart      by hand: forward and backward as two programs, as a pipeline must have them

`pipeline` over `programs` is what scheduling and dispatch cost; `programs` over the faster of the last two is
what cutting the model into stages costs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from benchmarks.runtime.plain_loop import load_step, run_plainly
from configs.decoders import RandomTokens
from configs.quickstart import loss, pipeline
from models import gpt
from rrfp_jax.data import contract
from rrfp_jax.runtime.model.layers import MicrobatchView
from rrfp_jax.trace.records import StepTrace


@dataclass(frozen=True, kw_only=True)
class TaxCase:
    """What is trained: `microbatches` of `batch` sequences of `length` tokens; the mesh has one device."""

    model: gpt.GPTConfig
    microbatches: int
    batch: int
    length: int
    mesh: rrfp.Mesh

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.microbatches * self.batch * self.length


class Tax:
    """The ways side by side, each with parameters of its own; nothing is compiled in a measured step."""

    def __init__(self, case: TaxCase) -> None:
        self.case = case
        self.data = contract.load_step(
            RandomTokens(case.model.vocab_size, (case.batch, case.length), case.microbatches, seed=0), 0
        )
        self.optimizer = optax.adamw(1e-3)
        self.pipe = pipeline(case.model)
        self.trainer = rrfp.Trainer(self.pipe, self.optimizer, data=self.data, mesh=case.mesh)
        self.trainer.start()
        self.traces: list[StepTrace] = []
        self.params = jax.tree.map(jnp.copy, self.trainer.stage_params)
        self.state = self.optimizer.init(self.params)
        self._compile()

    def _compile(self) -> None:
        """Compile the hand-written programs, side by side."""
        forward: Any = jax.jit(lambda params, mb: jax.vjp(lambda p: self._total(p, mb), params))
        backward: Any = jax.jit(lambda vjp: vjp(jnp.ones(()))[0])
        params, mb = self.params, self.data[0]
        vjp = jax.eval_shape(forward, params, mb)[1]
        lowered = [
            forward.lower(params, mb),
            backward.lower(vjp),
            jax.jit(self._fused_step, donate_argnums=1).lower(params, params, mb),
            jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0).lower(params, params),
            jax.jit(self._update_step, donate_argnums=(0, 1, 2)).lower(params, self.state, params),
        ]
        with ThreadPoolExecutor() as pool:
            compiled = list(pool.map(lambda program: program.compile(), lowered))
        self._forward, self._backward, self._fused, self._add, self._update = compiled

    def _total(self, params: Any, mb: Any) -> jax.Array:
        """The model's summed loss, written out."""
        carry: Any = None
        for index in range(len(self.pipe)):
            view = MicrobatchView(mb, (0, 0, 0), index)
            carry, _ = self.pipe.apply_layer(index, params[str(index)], carry, view)
        return loss(carry, mb).total  # type: ignore[no-any-return]

    def _fused_step(self, params: Any, sums: Any, mb: Any) -> tuple[Any, Any]:
        value, gradient = jax.value_and_grad(self._total)(params, mb)
        return value, jax.tree.map(jnp.add, sums, gradient)

    def _update_step(self, params: Any, state: Any, sums: Any) -> tuple[Any, Any, Any]:
        gradient = jax.tree.map(lambda g: g / self.case.tokens, sums)
        updates, state = self.optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, jax.tree.map(jnp.zeros_like, sums)

    def by_hand(self, apart: bool) -> float:
        """Seconds of one step of a hand-written loop."""
        began = perf_counter()
        sums = jax.tree.map(jnp.zeros_like, self.params)
        values = []
        for mb in self.data:
            if apart:
                value, vjp = self._forward(self.params, mb)
                sums = self._add(sums, self._backward(vjp))
            else:
                value, sums = self._fused(self.params, sums, mb)
            values.append(value)
        self.params, self.state, _ = self._update(self.params, self.state, sums)
        assert np.isfinite(jax.device_get(values)).all()
        jax.block_until_ready(self.params)
        return perf_counter() - began

    def by_programs(self) -> float:
        """Seconds of one step of the pipeline's programs in a plain loop."""
        began = perf_counter()
        parts = load_step(self.trainer, self.data)
        run_plainly(parts)
        self.trainer._engine.update(1.0 / self.case.tokens)
        assert np.isfinite(jax.device_get(list(parts[-1].statistics.values()))).all()
        jax.block_until_ready(self.trainer.stage_params)
        return perf_counter() - began

    def by_pipeline(self) -> float:
        """Seconds of one step of the pipeline."""
        began = perf_counter()
        self.traces.append(self.trainer.step(self.data).trace)
        jax.block_until_ready(self.trainer.stage_params)
        return perf_counter() - began

    def measure(self, rounds: int = 25) -> dict[str, float]:
        """Median seconds a step of each way, and medians of the rounds' ratios, in percent of time.

        `tax_percent` is the pipeline over the faster hand-written loop; `driver_percent` and
        `programs_percent` are its two parts, as the module's text has them.
        """
        ways: dict[str, Callable[[], float]] = {
            "pipeline": self.by_pipeline,
            "programs": self.by_programs,
            "fused": lambda: self.by_hand(apart=False),
            "apart": lambda: self.by_hand(apart=True),
        }
        for way in ways.values():
            way()
        self.traces.clear()
        times = {name: np.empty(rounds) for name in ways}
        for i in range(rounds):
            for name, way in ways.items():
                times[name][i] = way()
        medians = {name: float(np.median(t)) for name, t in times.items()}
        faster = min(("fused", "apart"), key=medians.__getitem__)

        def percent(way: str, other: str) -> float:
            return 100 * (float(np.median(times[way] / times[other])) - 1)

        return {
            **medians,
            "tax_percent": percent("pipeline", faster),
            "driver_percent": percent("pipeline", "programs"),
            "programs_percent": percent("programs", faster),
        }
