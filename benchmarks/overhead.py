"""What the runtime costs the host per task, and what one stage loses to a hand-written loop.

    python -m benchmarks.overhead [--json=FILE] [--check]

Part 1: an empty pipeline (tiny compute), 4 stages on 4 devices of this process; the time between two
dispatches in which the driver works is split into scheduling (the core), dispatch (calling programs) and
transfer (offer, pull, poll); `all` adds the driver's own loop. Sleeping is not counted. `bare` is what
the same programs cost per task when a plain loop calls them, stage after stage, with nothing around them: the
part that is JAX's and this machine's.
Part 2: four processes, one stage each: a hop (from the end of a task to the moment the stage that it makes
ready knows) by message size on paced devices, the time from the data's arrival to dispatch on an idle device,
the CPU share of a process that waits, and the host time per task as in part 1.
Part 3: the tax: a one-stage pipeline against two hand-written jitted loops over the same microbatches, a
fused `value_and_grad` and forward and backward apart, in turns, as the median of ratios to the faster one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from benchmarks.harness import Aim, finish, median_and_p99, parse
from models import gpt
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.runtime.driver import _Step
from rrfp_jax.runtime.stage import TrainingStep
from rrfp_jax.runtime.transport import LocalTransport

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


def empty_pipeline(leaves: int, microbatches: int, width: int = WIDTH) -> rrfp.Trainer:
    """A pipeline of 4 stages with that many parameter leaves each and, unless it is wide, no compute."""

    def layer(params: list[jax.Array], carry: jax.Array | None, mb: Any) -> jax.Array:
        x = mb["x"] if carry is None else carry
        for weight in params:
            x = jnp.tanh(x @ weight)
        return x

    def init(key: jax.Array) -> list[jax.Array]:
        return [jnp.eye(width) for _ in range(leaves)]

    def loss(x: jax.Array, mb: Any) -> rrfp.Loss:
        return rrfp.Loss(x.sum(), weight=x.shape[0])

    data = [{"x": np.ones((width // 4, width), np.float32)} for _ in range(microbatches)]
    pipe = rrfp.Pipeline([rrfp.layer(layer, init=init, repeat=STAGES)], loss)
    return rrfp.Trainer(pipe, optax.sgd(1e-3), data=data, mesh=rrfp.Mesh(pp=STAGES))


def watched_steps(trainer: rrfp.Trainer, watch: Stopwatch, transport: type) -> None:
    """Run steps with the driver's parts under a stopwatch."""
    for _ in trainer.steps(WARMUP):
        pass
    undo = [
        watch.wrap(StageScheduler, "handle", "scheduling"),
        watch.wrap(TrainingStep, "run", "dispatch"),
        watch.wrap(TrainingStep, "accumulate", "dispatch"),
        *(watch.wrap(transport, m, "transfer") for m in ("offer", "produced", "poll", "patience")),
        watch.wrap(_Step, "_sleep", "sleep"),
    ]
    dispatch = _Step._dispatch

    def closing(self: _Step, *args: Any) -> None:
        dispatch(self, *args)
        watch.close()

    _Step._dispatch = closing  # type: ignore[assignment,method-assign]
    try:
        for _ in trainer.steps(STEPS):
            watch.pause()
    finally:
        _Step._dispatch = dispatch  # type: ignore[method-assign]
        for restore in undo:
            restore()


def host_cost(leaves: int, microbatches: int) -> dict[str, dict[str, float]]:
    """Host time per task of an empty pipeline in one process, by part."""
    trainer = empty_pipeline(leaves, microbatches)
    watch = Stopwatch()
    watched_steps(trainer, watch, LocalTransport)
    samples = watch.samples | {"bare": bare(trainer)}
    return {name: median_and_p99(seconds) for name, seconds in samples.items()}


def in_processes() -> dict[str, Any]:
    """What four processes find: hops, pick-up times, idle shares, host times."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [*(sys.executable, "-m", "rrfp_jax.train.launch", "-n", str(STAGES))]
        command += ["--directory", folder, "-m", "benchmarks.overhead_rank", str(file)]
        subprocess.run(command, check=True, timeout=600)
        return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def show_processes(found: dict[str, Any]) -> list[Aim]:
    """Print the figures of four processes; their aims."""
    for name, hop in found["hop"].items():
        print(f"4 processes, hop of {name:>6}: {hop['median_us']:8.0f} us (p99 {hop['p99_us']:.0f})")
    pickup, idle = found["pickup"], max(found["idle_percent"])
    print(f"4 processes, ready to dispatched: {pickup['median_us']:.0f} us (p99 {pickup['p99_us']:.0f})")
    print(f"4 processes, CPU of an idle process: {idle:.2f} % of a core")
    for cost in found["host"]:
        parts = {name: cost[name] for name in ("scheduling", "dispatch", "transfer", "all")}
        text = "  ".join(f"{k} {v['median_us']:.1f} (p99 {v['p99_us']:.1f})" for k, v in parts.items())
        print(f"4 processes, {cost['leaves']:3} leaves, us per task: {text}")
    return [
        Aim("4 processes, ready to dispatched, median", pickup["median_us"], 100, "us"),
        Aim("4 processes, ready to dispatched, p99", pickup["p99_us"], 300, "us"),
        Aim("4 processes, CPU of an idle process", idle, 3, "%"),
    ]


def bare(trainer: rrfp.Trainer, rounds: int = 100) -> list[float]:
    """Seconds per task of calling every stage's forward, backward and accumulate in a plain loop."""
    engine = trainer._engine
    (compiled,) = engine._compiled.values()
    calls = []
    for stage, programs in zip(engine.stages.values(), compiled.train.values(), strict=True):
        assert programs.forward is not None and programs.backward is not None
        for call, program in ((programs.forward, "forward"), (programs.backward, "backward")):
            specs = getattr(programs.traced, program).specs
            zeros = [jax.device_put(np.zeros(s.shape, s.dtype), stage.device) for s in specs]
            calls.append((call, zeros))
    gradients = [[jnp.zeros_like(leaf) for leaf in stage.leaves] for stage in engine.stages.values()]
    samples = []
    for _ in range(rounds):
        for s, stage in engine.stages.items():
            began = perf_counter()
            for call, arguments in calls[2 * s : 2 * s + 2]:
                call(*arguments)
            stage.add(gradients[s])
            samples.append((perf_counter() - began) / 2)
    engine.reset_gradients()
    return samples


class Tax:
    """One training step of a small GPT, by the pipeline with one stage and by two hand-written loops."""

    MODEL = gpt.GPTConfig(d_model=128, n_heads=4, d_ff=344, n_layers=4)
    MICROBATCHES, BATCH, LENGTH = 8, 4, 128

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        shape = (self.BATCH, self.LENGTH + 1)
        tokens = [random.integers(0, 256, shape, np.int32) for _ in range(self.MICROBATCHES)]
        self.data = [{"tokens": t[:, :-1], "labels": t[:, 1:]} for t in tokens]
        self.optimizer = optax.adamw(1e-3)
        layers = [
            rrfp.layer(gpt.Embed, self.MODEL),
            rrfp.layer(gpt.Block, self.MODEL, repeat=self.MODEL.n_layers),
            rrfp.layer(gpt.Head, self.MODEL),
        ]
        self.pipe = rrfp.Pipeline(layers, self.loss)
        self.trainer = rrfp.Trainer(self.pipe, self.optimizer, data=self.data, mesh=rrfp.Mesh(pp=1))
        self.trainer.start()
        self.params = jax.tree.map(jnp.copy, self.trainer.params)
        self.state = self.optimizer.init(self.params)
        self._forward: Any = jax.jit(lambda params, mb: jax.vjp(lambda p: self.total(p, mb), params))
        self._backward: Any = jax.jit(lambda vjp: vjp(jnp.ones(()))[0])
        self._fused = jax.jit(self._fused_step, donate_argnums=1)
        self._add = jax.jit(lambda sums, g: jax.tree.map(jnp.add, sums, g), donate_argnums=0)
        self._update = jax.jit(self._update_step, donate_argnums=(0, 1, 2))

    @staticmethod
    def loss(logits: jax.Array, mb: Any) -> rrfp.Loss:
        """Summed cross entropy."""
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
        return rrfp.Loss(nll.sum(), weight=nll.size)

    def total(self, params: Any, mb: Any) -> jax.Array:
        """The model's summed loss, written out."""
        carry: Any = None
        for index in range(len(self.pipe)):
            carry, _ = self.pipe.apply_layer(index, params[str(index)], carry, mb)
        return self.loss(carry, mb).total  # type: ignore[no-any-return]

    def _fused_step(self, params: Any, sums: Any, mb: Any) -> tuple[Any, Any]:
        value, gradient = jax.value_and_grad(self.total)(params, mb)
        return value, jax.tree.map(jnp.add, sums, gradient)

    def _update_step(self, params: Any, state: Any, sums: Any) -> tuple[Any, Any, Any]:
        count = self.MICROBATCHES * self.BATCH * self.LENGTH
        gradient = jax.tree.map(lambda g: g / count, sums)
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

    def by_pipeline(self) -> float:
        """Seconds of one step of the pipeline."""
        began = perf_counter()
        self.trainer.step(self.data)
        jax.block_until_ready(self.trainer.params)
        return perf_counter() - began

    def measure(self, rounds: int = 25) -> dict[str, float]:
        """Median seconds of each, and the median of the rounds' ratios to the faster hand-written loop."""
        ways: dict[str, Callable[[], float]] = {
            "pipeline": self.by_pipeline,
            "fused": lambda: self.by_hand(apart=False),
            "apart": lambda: self.by_hand(apart=True),
        }
        for way in ways.values():
            way()
        times = {name: np.empty(rounds) for name in ways}
        for i in range(rounds):
            for name, way in ways.items():
                times[name][i] = way()
        medians = {name: float(np.median(t)) for name, t in times.items()}
        faster = min(("fused", "apart"), key=medians.__getitem__)
        ratio = float(np.median(times["pipeline"] / times[faster]))
        return {**medians, "tax_percent": 100 * (ratio - 1)}


def main() -> int:
    """Measure, print, write."""
    options = parse(__doc__).parse_args()
    figures: dict[str, Any] = {"host": [], "tax": {}}
    aims = []
    for leaves, all_limit in ((8, 100.0), (30, 150.0), (200, None)):
        for microbatches in (8, 32):
            cost = host_cost(leaves, microbatches)
            figures["host"].append({"leaves": leaves, "microbatches": microbatches, **cost})
            text = "  ".join(f"{k} {v['median_us']:6.1f} (p99 {v['p99_us']:7.1f})" for k, v in cost.items())
            print(f"{leaves:4} leaves, {microbatches:3} microbatches, us per task: {text}", flush=True)
            label = f"{leaves} leaves, {microbatches} microbatches"
            aims.append(Aim(f"scheduling, {label}", cost["scheduling"]["median_us"], 20, "us"))
            if all_limit is not None:
                aims.append(Aim(f"all, {label}", cost["all"]["median_us"], all_limit, "us"))
    figures["processes"] = in_processes()
    aims += show_processes(figures["processes"])
    figures["tax"] = Tax().measure()
    print("one stage, seconds a step:", {k: round(v, 4) for k, v in figures["tax"].items()})
    aims.append(Aim("tax of one stage", figures["tax"]["tax_percent"], 3, "%"))
    return finish(options, figures, aims)


if __name__ == "__main__":
    sys.exit(main())
