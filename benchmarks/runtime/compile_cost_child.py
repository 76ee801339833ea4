"""One cold start of a run in one process, and plain JAX for the same shapes: CPU seconds as a line of JSON.

    python -m benchmarks.runtime.compile_cost_child quickstart|gpt_lengths|three_buckets

All jobs run on one thread, one after the other, so that the process's CPU time belongs to what is being done.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import process_time
from typing import Any

import jax
import optax
from flax import nnx

import rrfp_jax as rrfp
from models import gpt
from rrfp_jax.data.contract import as_data, buckets_of, declared_buckets, plan_step
from rrfp_jax.runtime.model.pipeline import IDS, Pipeline, run_layers
from rrfp_jax.runtime.programs import compiler, executables, library

STAGES = 4

Run = tuple[Pipeline, optax.GradientTransformation, Any, Any]
"""Model, optimizer, data to train on and to evaluate."""


def main(argv: Sequence[str]) -> int:
    """Start, measure, print; the exit status."""
    pipe, optimizer, data, validation = run_of(argv[0])
    plan_step(data, 0)  # what the data costs is no question here
    meter, texts = Meter(), Texts()
    with meter.of_jax(), texts.counted(), one_thread():
        trainer = rrfp.Trainer(pipe, optimizer, data=data, mesh=rrfp.Mesh(pp=STAGES))
        began = process_time()
        trainer.start(validation)
        total = process_time() - began
    made = trainer._engine.executables
    buckets = list(dict.fromkeys([*buckets_of(plan_step(data, 0)), *declared_buckets(data)]))
    found = {
        "cpu_seconds": total,
        **meter.seconds,
        "other": total - sum(meter.seconds.values()),
        "requested": texts.asked,
        "distinct": len(texts.distinct),
        "compiled": made.compiles,
        "buckets": len(buckets),
        "plain_cpu_seconds": plain_seconds(pipe, trainer._engine.library, buckets),
    }
    print(json.dumps(found))
    return 0


def run_of(name: str) -> Run:
    """What is started."""
    if name == "three_buckets":
        return three_buckets()
    config = importlib.import_module(f"configs.{name}").get_config()
    return config.pipeline(), config.optimizer(), config.train_data(), config.validation_data()


def three_buckets() -> Run:
    """A GPT of 8 blocks, two on each stage and the rest at the ends, on microbatches of three lengths."""
    model = gpt.GPTConfig(d_model=64, n_heads=2, d_ff=128, n_layers=8)
    from configs.quickstart import pipeline

    def draw_step(step: int) -> list[dict[str, Any]]:
        draw = jax.random.key(step)
        shapes = [(2, length) for length in (32, 64, 96, 32)]
        tokens = [jax.random.randint(draw, shape, 0, 256) for shape in shapes]
        return [{"tokens": own, "labels": own, "mask": own > 0} for own in map(jax.device_get, tokens)]

    drawn = as_data(draw_step)
    return pipeline(model), optax.adamw(1e-3), drawn, drawn


def plain_seconds(pipe: Pipeline, specs: library.Library, buckets: Sequence[Any]) -> float:
    """CPU seconds to trace and compile the loss's value and gradient, the model as one program, by bucket."""

    def objective(params: Any, fields: Any, ids: Any) -> Any:
        _, loss = run_layers(pipe, range(len(pipe)), list(params.values()), None, fields, ids)
        assert loss is not None
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
        """Measure while this is open."""
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

    @property
    def asked(self) -> int:
        """How many have been asked for."""
        return self.distinct.total()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while this is open."""
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


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    sys.exit(main(sys.argv[1:]))
