"""From the last backward of a step to the first forward of the next: how long, beside the update alone?"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from time import perf_counter

import jax
import optax

import rrfp_jax as rrfp
from benchmarks.harness import Aim, Found, bench, on_ranks, say, table
from benchmarks.rivals.cases import STAGES, given_value, model_of
from configs.quickstart import pipeline

CASES = ("real-8", "real-32", "empty-8", "empty-32")
"""See `benchmarks/rivals/cases.py`."""

AIM_CASE, MOST_IDLE = "real-32", 1.0
WARM_UP, STEPS, UPDATES = 5, 20, 9
CASE_SECONDS = 300.0


@bench(
    "How long from the last backward of a step to the first forward of the next, beside the update alone?",
    minutes="3",
    aims="idle for 1 % of a step of 32 microbatches at most",
)
def step_end(rounds: int = 3, clip_norm: float | None = None) -> Found:
    """A GPT of 4 blocks on 4 virtual CPU devices, AdamW, schedule `bf`, each round in a process of its own.
    The gap ends with the first forward's start, and the update is in it; *alone* is the update of zero
    gradients when nothing else runs, which every loop needs. What is left over is idle. Medians."""
    found: dict[str, list[Mapping[str, float]]] = {case: [] for case in CASES}
    for number in range(rounds):
        for case, own in found.items():
            own.append(on_ranks(0, gaps, case, clip_norm, seconds=CASE_SECONDS))
            say(f"round {number}, {case}: {own[-1]}")
    of = {case: {name: median(one[name] for one in own) for name in own[0]} for case, own in found.items()}
    rows = [
        (case, *(f"{one[name]:.1f}" for name in ("step", "gap", "update")), f"{idle_percent(one):.2f}")
        for case, one in of.items()
    ]
    heads = ["case", "step, ms", "gap, ms", "update alone, ms", "idle, % of a step"]
    aim = Aim(f"idle at the end of a step, {AIM_CASE}", idle_percent(of[AIM_CASE]), MOST_IDLE, "%")
    return Found(found, [aim], {"benchmarks.md step end": table(heads, rows)})


def idle_percent(one: Mapping[str, float]) -> float:
    """The gap without the update, of the step."""
    return 100 * max(0.0, one["gap"] - one["update"]) / one["step"]


def gaps(case: str, clip_norm: float | None) -> dict[str, float]:
    """Medians, in ms: of a step, of the gap behind it, and of the update alone."""
    jax.config.update("jax_num_cpu_devices", STAGES)
    model = model_of(case)
    trainer = rrfp.Trainer(
        pipeline(model.config),
        optax.adamw(1e-3),
        data=model.batch,
        mesh=rrfp.Mesh(pp=STAGES),
        init=given_value,
        settings=rrfp.Settings(clip_norm=clip_norm),
    )
    reports = list(trainer.steps(WARM_UP + STEPS))[WARM_UP:]
    traces = [report.trace for report in reports]
    between = [after.start - before.end for before, after in pairwise(traces)]
    engine, alone = trainer._engine, []
    engine.reset_gradients()
    for _ in range(UPDATES):
        jax.block_until_ready([stage.sums for stage in engine.stages.values()])
        began = perf_counter()
        engine.update(1.0)
        jax.block_until_ready(trainer.stage_params)
        alone.append(perf_counter() - began)
    steps = [after.start - before.start for before, after in pairwise(traces)]
    seconds = {"step": steps, "gap": between, "update": alone}
    return {name: 1e3 * median(own) for name, own in seconds.items()}
