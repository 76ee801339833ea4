"""A Trainer whose layers last as long as they are told, on whichever stage they are: all else is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from rrfp_jax.core.tasks import FORWARD
from rrfp_jax.runtime.engine.device import Running
from rrfp_jax.runtime.engine.pacing import Delays, JitteredQueue, QueueFactory
from rrfp_jax.trace import jitter

WIDTH, ROWS = 16, 8


@dataclass(frozen=True, kw_only=True)
class LayerPace(Delays):
    """Keeps a stage busy for as long as its layers take.

    Attributes:
        seconds: by layer, of its forward; its backward takes twice as long.
        slowness: by stage, how many times as long everything takes there.
        split: gives the present one.
    """

    seconds: Sequence[float] = ()
    slowness: Sequence[float] = ()
    split: list[Callable[[], Sequence[int]]] = field(default_factory=list, compare=False, repr=False)

    def queue(self) -> QueueFactory:
        """Makes the queue of a device; see `Delays.queue`."""
        model = jitter.Jitter(jitter.by_name(self.jitter), self.seed)

        def delay(running: Running, computed: float) -> float:
            sizes = self.split[0]()
            first = sum(sizes[: running.stage])
            own = sum(self.seconds[first : first + sizes[running.stage]]) * self.slowness[running.stage]
            own *= 1 if running.task.kind is FORWARD else 2
            own += model.delay(running.step, running.stage, running.task, own)
            return max(own - computed, 0.0)

        return lambda name, wake: JitteredQueue(name, wake, delay)


def trainer(
    seconds: Sequence[float],
    slowness: Sequence[float],
    split: Sequence[int],
    microbatches: int,
    level: str = "J0",
    **settings: Any,
) -> rrfp.Trainer:
    """A model of as many equal layers, one chunk on each stage.

    Args:
        seconds, slowness: see `LayerPace`.
        split: at first.
        microbatches: of each step.
        level: of the jitter, J0 to J3.
        settings: besides the delays.
    """
    pace = LayerPace(jitter=level, seconds=tuple(seconds), slowness=tuple(slowness))
    layers = [rrfp.layer(_block, init=_init, repeat=len(seconds))]
    random = np.random.default_rng(0)
    data = [{"x": random.normal(size=(ROWS, WIDTH)).astype(np.float32)} for _ in range(microbatches)]
    made = rrfp.Trainer(
        rrfp.Pipeline(layers, _loss),
        optax.adamw(1e-3),
        data=data,
        mesh=rrfp.Mesh(pp=len(slowness)),
        split=list(split),
        settings=rrfp.Settings(delays=pace, **settings),
    )
    pace.split.append(lambda: made.split)
    return made


def _init(key: jax.Array) -> Any:
    return jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5


def _block(weight: Any, carry: Any, mb: Any) -> Any:
    x = mb["x"] if carry is None else carry
    return x + jnp.tanh(x @ weight)


def _loss(x: jax.Array, mb: Any) -> rrfp.Loss:
    return rrfp.Loss((x**2).sum(), weight=x.shape[0])
