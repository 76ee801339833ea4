"""What the driver costs the host per task, measured in steps of a pipeline that computes next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from benchmarks.harness import median_and_p99
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import BACKWARD, FORWARD
from rrfp_jax.runtime.engine.loop import StepExecution
from rrfp_jax.runtime.stages.step import ModelStep
from rrfp_jax.runtime.transport.choice import TransportName
from rrfp_jax.runtime.transport.protocol import LocalTransport

WIDTH, STAGES, STEPS, WARMUP = 8, 4, 40, 5


class Stopwatch:
    """Sums the time spent in wrapped methods by name, and closes a sample at every dispatched task."""

    def __init__(self) -> None:
        self.open: dict[str, float] = {}
        self.samples: dict[str, list[float]] = {"scheduling": [], "dispatch": [], "transfer": [], "all": []}
        self._since = 0.0

    def wrap(self, owner: type, method: str, name: str) -> Callable[[], None]:
        """Time every call of a method under a name; the function that undoes it."""
        original = getattr(owner, method)

        def timed(*args: Any) -> Any:
            began = perf_counter()
            try:
                return original(*args)
            finally:
                self.open[name] = self.open.get(name, 0.0) + perf_counter() - began

        setattr(owner, method, timed)
        return lambda: setattr(owner, method, original)

    def close(self) -> None:
        """End the sample of one task."""
        now = perf_counter()
        if self._since:
            for name in ("scheduling", "dispatch", "transfer"):
                self.samples[name].append(self.open.get(name, 0.0))
            self.samples["all"].append(now - self._since - self.open.get("sleep", 0.0))
        self.open.clear()
        self._since = now

    def pause(self) -> None:
        """Between steps: what is open belongs to no task."""
        self.open.clear()
        self._since = 0.0


def empty_pipeline(
    leaves: int,
    microbatches: int,
    width: int = WIDTH,
    share_devices: bool = False,
    transport: TransportName = "auto",
) -> rrfp.Trainer:
    """A pipeline of 4 stages with that many parameter leaves each and, unless it is wide, no compute."""

    def layer(params: list[jax.Array], carry: jax.Array | None, mb: Any) -> jax.Array:
        x = jnp.broadcast_to(mb["x"], (width // 4, width)) if carry is None else carry
        for weight in params:
            x = jnp.tanh(x @ weight)
        return x

    def init(key: jax.Array) -> list[jax.Array]:
        return list(jax.random.normal(key, (leaves, width, width)) * width**-0.5)

    def loss(x: jax.Array, mb: Any) -> rrfp.Loss:
        return rrfp.Loss(x.sum(), weight=x.shape[0])

    data = empty_microbatches(microbatches, width)
    pipe = rrfp.Pipeline([rrfp.layer(layer, init=init, repeat=STAGES)], loss)
    mesh = rrfp.Mesh(pp=STAGES, share_devices=share_devices)
    return rrfp.Trainer(
        pipe, optax.sgd(1e-3), data=data, mesh=mesh, settings=rrfp.Settings(transport=transport)
    )


def empty_microbatches(count: int, width: int = WIDTH) -> list[dict[str, Any]]:
    """Data of such a pipeline: next to nothing to load, whatever the width."""
    random = np.random.default_rng(0)
    return [{"x": random.random((1, width), np.float32)} for _ in range(count)]


def watched_steps(trainer: rrfp.Trainer, watch: Stopwatch, transport: type, steps: int = STEPS) -> None:
    """Run steps with the driver's parts under a stopwatch."""
    for _ in trainer.steps(WARMUP):
        pass
    undo = [
        watch.wrap(StageScheduler, "handle", "scheduling"),
        watch.wrap(ModelStep, "run", "dispatch"),
        watch.wrap(ModelStep, "accumulate", "dispatch"),
        *(watch.wrap(transport, m, "transfer") for m in ("offer", "produced", "poll", "seconds_until_poll")),
        watch.wrap(StepExecution, "_sleep", "sleep"),
    ]
    dispatch = StepExecution._dispatch

    def closing(self: StepExecution, *args: Any) -> None:
        dispatch(self, *args)
        watch.close()

    StepExecution._dispatch = closing  # type: ignore[assignment,method-assign]
    try:
        for _ in trainer.steps(steps):
            watch.pause()
    finally:
        StepExecution._dispatch = dispatch  # type: ignore[method-assign]
        for restore in undo:
            restore()


def host_cost(
    leaves: int, microbatches: int, share_devices: bool = False, steps: int = STEPS
) -> dict[str, dict[str, float]]:
    """Host time per task of an empty pipeline in one process, by part."""
    trainer = empty_pipeline(leaves, microbatches, share_devices=share_devices)
    watch = Stopwatch()
    watched_steps(trainer, watch, LocalTransport, steps)
    samples = watch.samples | {"bare": bare(trainer)}
    return {name: median_and_p99(seconds) for name, seconds in samples.items()}


def bare(trainer: rrfp.Trainer, rounds: int = 100) -> list[float]:
    """Seconds per task of calling every stage's forward, and backward that adds, in a plain loop."""
    engine = trainer._engine
    (compiled,) = engine.library.all_programs("train")
    calls = []
    for stage, (programs,) in zip(engine.stages.values(), compiled.values(), strict=True):
        assert programs.traced is not None
        for kind, traced in ((FORWARD, programs.traced.forward), (BACKWARD, programs.traced.backward)):
            zeros = [stage.stage_mesh.put(np.zeros(s.shape, s.dtype)) for s in traced.specs]
            call = programs.tasks[kind].program
            assert call is not None
            calls.append((call, zeros))
    samples = []
    for _ in range(rounds):
        for s, stage in engine.stages.items():
            began = perf_counter()
            (forward, its), (backward, reads) = calls[2 * s : 2 * s + 2]
            forward(*its)
            sums = stage.sums_of(0)
            stage.put_sums(0, backward(*sums, *reads)[-1 - len(sums) : -1])
            samples.append((perf_counter() - began) / 2)
    engine.reset_gradients()
    return samples
