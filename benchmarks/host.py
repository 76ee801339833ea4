"""What the runtime costs the host per task, and what one stage loses to a hand-written loop."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from benchmarks.harness import Aim, Found, bench, median_and_p99, on_ranks, say
from configs.decoders import RandomTokens
from configs.quickstart import loss, pipeline
from models import gpt
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.tasks import BACKWARD, FORWARD, Task
from rrfp_jax.data import contract
from rrfp_jax.runtime.engine.loop import StepExecution
from rrfp_jax.runtime.model.layers import MicrobatchView
from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages.step import ModelStep
from rrfp_jax.runtime.transport.choice import TransportName
from rrfp_jax.runtime.transport.mailed import MailedTransport
from rrfp_jax.runtime.transport.protocol import LocalTransport
from rrfp_jax.trace.costs import constant
from rrfp_jax.trace.records import StepTrace

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
        (segment,) = programs.segments
        for kind in (FORWARD, BACKWARD):
            zeros = [stage.stage_mesh.put(np.zeros(s.shape, s.dtype)) for s in segment.program(kind).specs]
            calls.append((segment.lowered[kind], zeros))
    samples = []
    for _ in range(rounds):
        for s, stage in engine.stages.items():
            began = perf_counter()
            (forward, its), (backward, reads) = calls[2 * s : 2 * s + 2]
            if forward is not None:  # the last stage's is in its backward
                forward(*its)
            sums = stage.sums_of(0)
            stage.put_sums(0, backward(*sums, *reads)[-1 - len(sums) : -1])
            samples.append((perf_counter() - began) / 2)
    engine.reset_gradients()
    return samples


def load_stages(trainer: rrfp.Trainer, data: Sequence[Mapping[str, Any]]) -> list[ModelStep]:
    """Every stage's part of a step, its data on the device and its sums zero."""
    engine, count = trainer._engine, len(data)
    bucket, _ = engine.library.first
    known = engine.programs_of(trainer._stepper.rules(count, "train"), [bucket] * count)
    inputs = engine._inputs.load(0, known, lambda fields: data)
    engine.reset_gradients()
    engine._has_gradients = True  # so that the trainer's next step starts from zero
    return [ModelStep(stage, "train", known.stages[s], inputs[s]) for s, stage in engine.stages.items()]


def run_plainly(parts: Sequence[ModelStep]) -> list[jax.Array]:
    """Dispatch every task, one microbatch after the other, without ever waiting; the gradient sums."""
    for j in range(len(parts[0].buckets)):
        carry: Sequence[jax.Array] = ()
        for part in parts:
            part.receive(task := Task(FORWARD, 0, j), carry)
            carry, _ = part.run(task, in_turn=True)
        for part in reversed(parts):
            part.receive(task := Task(BACKWARD, 0, j), carry)
            carry, _ = part.run(task, in_turn=True)
    return [leaf for part in parts for leaf in jax.tree.leaves(part.stage.gradients)]


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
        return self.microbatches * self.batch * self.length


class Tax:
    """Four ways to do the same step, each with parameters of its own; nothing is compiled in a measured step.

        pipeline   the Trainer
        programs   the Trainer's own programs, called by a plain loop
        fused      by hand: one program a microbatch, `value_and_grad` and the sum of gradients
        apart      by hand: forward and backward as two programs, as a pipeline must have them

    `pipeline` over `programs` is what scheduling and dispatch cost; `programs` over the faster of the last
    two is what cutting the model into stages costs.
    """

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
        parts = load_stages(self.trainer, self.data)
        run_plainly(parts)
        self.trainer._engine.update(1.0 / self.case.tokens)
        assert np.isfinite(jax.device_get(list(parts[-1].statistics.values()))).all()
        jax.block_until_ready(self.trainer.stage_params)
        return perf_counter() - began

    def by_pipeline(self) -> float:
        began = perf_counter()
        self.traces.append(self.trainer.step(self.data).trace)
        jax.block_until_ready(self.trainer.stage_params)
        return perf_counter() - began

    def measure(self, rounds: int = 25) -> dict[str, float]:
        """Median seconds a step of each way, and medians of the rounds' ratios, in percent of time.

        `tax_percent` is the pipeline over the faster hand-written loop; `driver_percent` and
        `programs_percent` are its two parts.
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


RUN_SECONDS = 600.0


@bench(
    "What does the runtime cost the host per task? What does one stage lose to a hand-written loop?",
    minutes="over 10 *",
    aims="scheduling 20 us, all 1.5 times bare; 4 processes: pick-up 100 us, idle 3 %; tax of one stage 2 %",
)
def overhead(
    part: tuple[str, ...] = ("host", "processes", "tax"),
    rounds: int = 25,
    steps: int = STEPS,
    share: bool = False,
) -> Found:
    """*host*: an empty pipeline, 4 stages on 4 devices of this process; the time between two dispatches in
    which the driver works is split into scheduling (the core), dispatch (calling programs) and transfer
    (offer, pull, poll); `all` adds the driver's own loop. Sleeping is not counted. `bare` is what the same
    programs cost per task when a plain loop calls them, stage after stage: the part that is JAX's and this
    machine's.

    *processes*: one stage each: a hop (from the end of a task to the moment the stage that it makes ready
    knows) by message size on paced devices, the time from the end of a message's write to dispatch on an idle
    device, the CPU share of a process that waits, and the host time per task.

    *tax*: a step of a GPT on one device, against hand-written jitted loops; see `Tax`."""
    parts: dict[str, Callable[[], Part]] = {
        "host": lambda: _host(steps, share),
        "processes": _processes,
        "tax": lambda: _tax(rounds),
    }
    found = {name: parts[name]() for name in part}
    return Found(
        {name: own for name, (own, _) in found.items()}, [aim for _, own in found.values() for aim in own]
    )


Part = tuple[Any, list[Aim]]


def _host(steps: int, share: bool) -> Part:
    rows, aims = [], []
    for leaves in (8, 30, 200):
        for microbatches in (8, 32):
            cost = host_cost(leaves, microbatches, share, steps)
            rows.append({"leaves": leaves, "microbatches": microbatches, **cost})
            label = f"{leaves} leaves, {microbatches} microbatches"
            say(f"{label}, us per task: {_shown(cost)}")
            aims.append(Aim(f"scheduling, {label}", cost["scheduling"]["median_us"], 20, "us"))
            if leaves <= 30:
                over = cost["all"]["median_us"] / cost["bare"]["median_us"]
                aims.append(Aim(f"all over bare, {label}", over, 1.5, "times"))
    return rows, aims


def _shown(cost: Mapping[str, Mapping[str, float]]) -> str:
    return "  ".join(f"{k} {v['median_us']:.1f} (p99 {v['p99_us']:.1f})" for k, v in cost.items())


def _processes() -> Part:
    found = on_ranks(STAGES, four_processes, seconds=RUN_SECONDS)
    pickup, idle = found["pickup"], max(found["idle_percent"])
    say(f"4 processes, hops, us: {_shown(found['hop'])}")
    say(f"4 processes, ready to dispatched, us: {_shown({'': pickup})}; idle {idle} % of a core")
    for cost in found["host"]:
        own = {name: value for name, value in cost.items() if name != "leaves"}
        say(f"4 processes, {cost['leaves']} leaves, us per task: {_shown(own)}")
    return found, [
        Aim("4 processes, ready to dispatched, median", pickup["median_us"], 100, "us"),
        Aim("4 processes, ready to dispatched, p99", pickup["p99_us"], 300, "us"),
        Aim("4 processes, CPU of an idle process", idle, 3, "%"),
    ]


def _tax(rounds: int) -> Part:
    model = gpt.GPTConfig(d_model=128, n_heads=4, d_ff=344, n_layers=4)
    found = Tax(TaxCase(model=model, microbatches=8, batch=4, length=128, mesh=rrfp.Mesh(pp=1))).measure(
        rounds
    )
    say(f"one stage, seconds a step: { {k: round(v, 4) for k, v in found.items()} }")
    return found, [Aim("tax of one stage", found["tax_percent"], 2, "%")]


SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24}
IDLE_SECONDS = 5.0
MICROBATCHES, PACED_STEPS, PICKUP_STEPS = 8, 6, 80


def paced_traces(message_bytes: int, seconds: float) -> list[StepTrace]:
    """Steps of four paced stages that differ only in the size of their messages; the first is left out."""
    from benchmarks.paced_run import Pace, PacedRun  # which needs more packages than a GPU machine may have
    from configs import quickstart

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        file.write_text(
            json.dumps(constant(STAGES, MICROBATCHES, seconds).as_json_object()), encoding="utf-8"
        )
        pace = Pace(workload=str(file), message_bytes=message_bytes)
    run = PacedRun(quickstart.get_config(), pace)
    return [report.trace for report in run.steps(PACED_STEPS)][1:]


def hops(traces: list[StepTrace]) -> list[float]:
    """Seconds from the end of a task to the moment the stage that it makes ready knows."""
    found = []
    for trace in traces:
        for record in trace.records:
            if (receiver := trace.receiver(record)) is not None:
                found.append(receiver.ready - record.end)
    return found


def pickups(world: World) -> list[float]:
    """Seconds from the moment that a task's input has been written to its dispatch, one microbatch at a time.

    The sender notes that moment. Nothing else runs meanwhile, so every task finds its device idle and every
    process asleep.
    """
    from rrfp_jax.nixl.sender import Sender

    written: dict[tuple[int, Any], float] = {}
    complete = Sender.complete

    def observed(self: Sender, number: int) -> list[Any]:
        key = self._outgoing[number].key
        written[key.stage, key.input] = perf_counter() + world.clock[0]
        return complete(self, number)

    Sender.complete = observed  # type: ignore[method-assign]
    found = []
    for report in empty_pipeline(8, 1, width=512, transport="nixl").steps(PICKUP_STEPS):
        for record in report.trace.records if report.step >= WARMUP else ():
            if (at := written.get((record.stage, record.task.input))) is not None:
                found.append(record.dispatched - at)
        written.clear()
    Sender.complete = complete  # type: ignore[method-assign]
    return found


def idle_share(world: World) -> float:
    """Share of a core that a process takes while it waits for others."""
    world.gather("the start of idling", None)
    began, cpu = perf_counter(), time.process_time()
    if world.rank == 0:
        time.sleep(IDLE_SECONDS)
    world.gather("the end of idling", None)
    return (time.process_time() - cpu) / (perf_counter() - began)


def four_processes() -> dict[str, Any]:
    world = join()
    figures: dict[str, Any] = {"hop": {}, "host": []}
    for name, size in SIZES.items():
        figures["hop"][name] = median_and_p99(hops(paced_traces(size, 0.01 if size < 2**24 else 0.05)))
    times = world.gather("the pick-up times", pickups(world))
    figures["pickup"] = median_and_p99([seconds for own in times for seconds in own])
    shares = world.gather("the idle shares", idle_share(world))
    figures["idle_percent"] = [round(100 * share, 2) for share in shares]
    for leaves in (8, 30):
        watch = Stopwatch()
        watched_steps(empty_pipeline(leaves, MICROBATCHES), watch, MailedTransport)
        samples = world.gather(f"the host times of {leaves} leaves", watch.samples)
        merged = {name: [s for own in samples for s in own[name]] for name in watch.samples}
        cost = {name: median_and_p99(seconds) for name, seconds in merged.items()}
        figures["host"].append({"leaves": leaves, **cost})
    return figures
