"""How long a run takes to begin: compiling, the first step cold and warm, and commands that begin nothing."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import jax
import optax
from flax import nnx

import rrfp_jax as rrfp
from benchmarks.harness import LAUNCH, REPOSITORY, Aim, Found, bench, on_ranks, say
from configs.quickstart import pipeline
from models import gpt
from rrfp_jax.data.contract import as_data, buckets_of, declared_buckets, plan_step
from rrfp_jax.runtime.model.layers import MicrobatchView
from rrfp_jax.runtime.model.pipeline import IDS, Pipeline
from rrfp_jax.runtime.programs import compiler, executables, library

STAGES = 4
LIMIT_SECONDS = 600.0
READY = re.compile(r"ready after ([\d.]+) s: (\d+) programs compiled, (\d+) loaded")

BEFORE = {"quickstart": 12.6, "gpt_lengths": 4.9, "three_buckets": 5.9}
"""Times what plain JAX took, before equal programs were compiled once; jax 0.10.2 on 2 cores.

CPU seconds of the same work differ by a third with what else runs on the machine, and these much less.
"""

Run = tuple[Pipeline, optax.GradientTransformation, Any, Any]
"""Model, optimizer, data to train on and to evaluate."""


@bench(
    "What CPU seconds does compiling take of a cold start, where do they go, and what does plain JAX take?",
    minutes="-",
    aims="half of what it was, beside plain JAX",
)
def compile_cost(
    rounds: int = 3, model: tuple[str, ...] = tuple(BEFORE), depth: tuple[int, ...] = (4, 8)
) -> Found:
    """Each start is a process of its own with all four stages, no folder of stored programs, and one thread,
    so that CPU time belongs to what is being done. Beside it: what `jax.jit(jax.value_and_grad(...))` of the
    whole model takes for the same shapes. That is less than a run needs: it has no initial values, no
    optimizer, no evaluation. `depth`: the same of a GPT of so many blocks; no aim yet."""
    figures: dict[str, dict[str, float]] = {}
    for name in [*model, *(f"blocks {blocks}" for blocks in depth)]:
        starts = [on_ranks(0, start_once, name, seconds=LIMIT_SECONDS) for _ in range(rounds)]
        figures[name] = {key: round(median(one[key] for one in starts), 2) for key in starts[0]}
        say(f"{name}: {figures[name]}")
    aims = []
    for name in model:
        now = figures[name]["cpu_seconds"] / figures[name]["plain_cpu_seconds"]
        aims.append(Aim(f"{name}: of what it was, beside plain JAX", now / BEFORE[name], 0.5, "times"))
    return Found(figures, aims)


def start_once(name: str) -> dict[str, float]:
    """CPU seconds of one cold start in this process, by what they were for, and of plain JAX."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    pipe, optimizer, data, validation = run_of(name)
    plan_step(data, 0)  # what the data costs is no question here
    meter, texts = Meter(), Texts()
    with meter.of_jax(), texts.counted(), one_thread():
        trainer = rrfp.Trainer(pipe, optimizer, data=data, mesh=rrfp.Mesh(pp=STAGES))
        began = process_time()
        trainer.start(validation)
        total = process_time() - began
    buckets = list(dict.fromkeys([*buckets_of(plan_step(data, 0)), *declared_buckets(data)]))
    return {
        "cpu_seconds": total,
        **meter.seconds,
        "other": total - sum(meter.seconds.values()),
        "requested": texts.distinct.total(),
        "distinct": len(texts.distinct),
        "compiled": trainer._engine.executables.compiles,
        "buckets": len(buckets),
        "plain_cpu_seconds": plain_seconds(pipe, trainer._engine.library, buckets),
    }


def run_of(name: str) -> Run:
    if name == "three_buckets":
        return of_lengths(8, (32, 64, 96, 32))
    if name.startswith("blocks "):
        return of_lengths(int(name.split()[1]), (64,) * STAGES)
    config = importlib.import_module(f"configs.{name}").get_config()
    return config.pipeline(), config.optimizer(), config.train_data(), config.validation_data()


def of_lengths(blocks: int, lengths: Sequence[int]) -> Run:
    """A GPT of equal blocks, on microbatches of some lengths."""
    model = gpt.GPTConfig(d_model=64, n_heads=2, d_ff=128, n_layers=blocks)

    def draw_step(step: int) -> list[dict[str, Any]]:
        draw = jax.random.key(step)
        tokens = [jax.random.randint(draw, (2, length), 0, 256) for length in lengths]
        return [{"tokens": own, "labels": own, "mask": own > 0} for own in map(jax.device_get, tokens)]

    drawn = as_data(draw_step)
    return pipeline(model), optax.adamw(1e-3), drawn, drawn


def plain_seconds(pipe: Pipeline, specs: library.Library, buckets: Sequence[Any]) -> float:
    """CPU seconds to trace and compile the loss's value and gradient, the model as one program, by bucket."""

    def objective(params: Any, fields: Any, ids: Any) -> Any:
        carry: Any = None
        for index in range(len(pipe)):
            carry, _ = pipe.apply_layer(index, params[str(index)], carry, MicrobatchView(fields, ids, index))
        loss = pipe.apply_loss(carry, MicrobatchView(fields, ids, len(pipe)))
        return loss.total / loss.weight

    began = process_time()
    for bucket in buckets:
        step = jax.jit(jax.value_and_grad(objective))
        params = {str(i): specs.params[str(i)] for i in range(len(pipe))}
        step.lower(params, library.specs_of(bucket), IDS).compile()
    return process_time() - began


class Meter:
    """CPU seconds of this process by what JAX does; what is done inside another belongs to itself only."""

    def __init__(self) -> None:
        self.seconds = {"tracing": 0.0, "lowering": 0.0, "compiling": 0.0, "loading": 0.0}
        self._inside: list[float] = []

    @contextmanager
    def of_jax(self) -> Iterator[None]:
        places = [
            (jax, "make_jaxpr", "tracing", True),
            (jax, "eval_shape", "tracing", False),
            (jax.stages.Traced, "lower", "lowering", False),
            (jax.stages.Lowered, "as_text", "lowering", False),
            (executables.Executables, "_compile", "compiling", False),
            (executables.Executables, "_load", "loading", False),
            (executables.Executables, "_store", "loading", False),
            (nnx, "split", "tracing", False),
        ]
        kept = [(owner, name, getattr(owner, name)) for owner, name, _, _ in places]
        for owner, name, what, later in places:
            setattr(owner, name, self._measured(getattr(owner, name), what, later))
        try:
            yield
        finally:
            for owner, name, function in kept:
                setattr(owner, name, function)

    def _measured(self, function: Callable[..., Any], what: str, later: bool) -> Callable[..., Any]:
        """The function, its time counted; or that of the function which it gives."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            began = process_time()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                taken, inside = process_time() - began, self._inside.pop()
                if self._inside:
                    self._inside[-1] += taken
                self.seconds[what] += taken - inside

        if not later:
            return measured
        return lambda *args, **kwargs: self._measured(function(*args, **kwargs), what, False)


class Texts:
    """Counts the programs that are asked for, and how many of them are equal but for their devices."""

    def __init__(self) -> None:
        self.distinct: Counter[str] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        kept = executables.Executables.compiled

        def compiled(store: Any, lowered: Any, devices: Any, *rest: Any, **more: Any) -> Any:
            self.distinct[hashlib.sha256(lowered.as_text().encode()).hexdigest()] += 1
            return kept(store, lowered, devices, *rest, **more)

        executables.Executables.compiled = compiled  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            executables.Executables.compiled = kept  # type: ignore[method-assign]


class _Here:
    """An executor that does everything at once, in the thread that asks."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def map(self, function: Callable[..., Any], *items: Iterable[Any]) -> list[Any]:
        return list(map(function, *items))

    def shutdown(self, **_: Any) -> None: ...


@contextmanager
def one_thread() -> Iterator[None]:
    """While it is open, programs are made one after the other."""
    place = vars(compiler)
    kept, place["ThreadPoolExecutor"] = place["ThreadPoolExecutor"], _Here
    try:
        yield
    finally:
        place["ThreadPoolExecutor"] = kept


@bench(
    "How long is it from launch to the end of the first step, cold and warm?",
    minutes="1 a round *",
    aims="nothing compiled by a warm start",
)
def startup(rounds: int = 3) -> Found:
    """Each round launches the quickstart twice in a folder of its own, in four processes: cold, when every
    program is compiled, and warm, when all are loaded. It is ended by Ctrl-C after the first step."""
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind, starts in found.items():
                starts.append(_launched(Path(folder)))
                say(f"{kind}: {starts[-1]}")
    medians = {
        kind: {name: median(one[name] for one in starts) for name in starts[0]}
        for kind, starts in found.items()
    }
    say(medians)
    compiled = max(one["compiled"] for one in found["warm"])
    return Found(
        {"starts": found, **medians}, [Aim("programs compiled by a warm start", compiled, 0, "programs")]
    )


def _launched(folder: Path) -> dict[str, float]:
    """Seconds to the end of the start and of the first step, and how many programs all ranks compiled."""
    command = [*(sys.executable, "-m", *LAUNCH, f"--config={REPOSITORY}/configs/quickstart.py")]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    began, said, found = time.monotonic(), [], {}
    with subprocess.Popen(
        [*command, f"--config.directory={folder}"], cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            said.append(line)
            if ready := READY.search(line):
                found = {"ready_seconds": float(ready[1]), "compiled": int(ready[2]), "loaded": int(ready[3])}
            if "step     0" in line:
                found["first_step_seconds"] = round(time.monotonic() - began, 1)
                run.send_signal(signal.SIGINT)
                break
        run.stdout.read()
        run.wait(LIMIT_SECONDS)
    if "first_step_seconds" not in found:
        raise RuntimeError(f"no first step:\n{''.join(said)}")
    return found


CONFIG = "configs/quickstart.py"
COMMANDS = ("train", "launch", "sim", "plan", "report", "top", "doctor")

AT_ONCE = [
    *((command, word) for word in ("--help", "--nonsense", CONFIG) for command in COMMANDS),
    ("sim", "--family=log-normal", "--stages=4", "--microbatches=8"),
]
WITH_JAX = [*((command, f"--config={CONFIG}", "--help") for command in ("train", "launch")), ("doctor",)]

AIM_SECONDS = 0.4
"""Of all that needs no JAX."""


@bench(
    "How long do commands take to tell their help, and to refuse what is mistyped?",
    minutes="1",
    aims="0.4 s of the slowest without JAX",
)
def commands(rounds: int = 5) -> Found:
    """Each is a process of its own. Medians of its processor time, which other load disturbs least; on a
    quiet machine it takes as long. What needs a config's fields reads the config, which imports JAX."""
    found: dict[str, float] = {}
    for words in [*AT_ONCE, *WITH_JAX]:
        name = f"rrfp {' '.join(words)}"
        found[name] = median(_processor_seconds(words) for _ in range(rounds))
        say(f"{found[name]:6.2f} s  {name}")
    slowest = max(list(found.values())[: len(AT_ONCE)])
    return Found({"seconds": found}, [Aim("the slowest without JAX", slowest, AIM_SECONDS, "s")])


def _processor_seconds(words: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = [sys.executable, "-m", "rrfp_jax", *words]
    subprocess.run(whole, cwd=REPOSITORY, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
