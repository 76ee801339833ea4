"""The kind of task that tests/house/diffs adds: a Trainer runs it, and all that shows tasks knows it."""

import json
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax as rrfp
from rrfp_jax.core.footprint import costs
from rrfp_jax.core.hints import BFR
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, KINDS, RECOMPUTE, Placement, Task
from rrfp_jax.report.explanation import TimedStep, explain
from rrfp_jax.report.page import page
from rrfp_jax.report.perfetto import write_trace
from rrfp_jax.report.run_folder import Run
from rrfp_jax.report.store import StepLine, read_steps, write_steps
from rrfp_jax.report.timeline import Panel, Timeline
from rrfp_jax.runtime.run.recorder import FlightRecorder, read
from rrfp_jax.sim.engine import simulate
from rrfp_jax.studies.bounds import lower_bound
from rrfp_jax.trace.costs import WorkloadCosts, constant, recorded
from rrfp_jax.trace.records import peak_in_flight

WIDTH, ROWS, MICROBATCHES = 16, 8, 4
BUDGET = 8192
"""Bytes for two microbatches on the first stage if the charge is what is held after R, for all after F."""


def layer(params, carry, mb):
    return jnp.tanh((mb["x"] if carry is None else carry) @ params["w"] + params["b"])


def init(key):
    return {"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5, "b": jnp.zeros(WIDTH)}


def loss(carry, mb):
    return rrfp.Loss((carry**2).sum(), weight=carry.shape[0])


def trained(schedule, **settings):
    """A trainer that has done two steps, and the report of each."""
    random = np.random.default_rng(0)
    trainer = rrfp.Trainer(
        rrfp.Pipeline([rrfp.layer(layer, init=init) for _ in range(4)], loss),
        optax.sgd(0.1),
        data=[{"x": random.normal(size=(ROWS, WIDTH)).astype(np.float32)} for _ in range(MICROBATCHES)],
        mesh=rrfp.Mesh(pp=2),
        schedule=schedule,
        **settings,
    )
    return trainer, list(trainer.steps(2))


def footprints(trainer):
    """What a microbatch takes, by stage."""
    library = trainer._stepper.engine.library
    (bucket,) = library.buckets("train")
    return [[chunk.footprint for chunk in library.programs(bucket, "train")[stage]] for stage in range(2)]


def check_training():
    """Losses and parameters are equal to the bit, less is held until R, and a budget holds; the last step."""
    plain, before = trained("bf")
    trainer, after = trained(BFR(), activation_budget=BUDGET)
    assert [report.loss for report in after] == [report.loss for report in before]
    leaves = [jax.tree.leaves(one.stage_params) for one in (plain, trainer)]
    assert all((a == b).all() for a, b in zip(*leaves, strict=True))
    for saved, held in zip(footprints(plain), footprints(trainer), strict=True):
        assert held[0].held_after_forward_bytes < held[0].held_after_recompute_bytes
        assert held[0].held_after_recompute_bytes == saved[0].held_after_forward_bytes
        assert costs(held) == costs(saved)
    assert all(size <= BUDGET for report in after for size in report.peak_bytes)
    step = trainer._stepper.recorded[-1]
    assert peak_in_flight(step.trace)[0] == 2
    for stage in range(2):
        again = {task.microbatch for task in step.trace.order(stage) if task.kind is RECOMPUTE}
        assert again == set(range(MICROBATCHES))
    return step


def check_views(step, folder):
    """The picture, the report, the trace file and a killed rank's recording have its letter and words."""
    row = KINDS[RECOMPUTE]
    svg = Timeline([Panel("again", step)]).svg()
    assert f"{row.letter}: {row.title}" in svg and row.colour in svg
    wall = 1.1 * step.trace.makespan
    steps = [TimedStep(recorded=step, wall_seconds=wall)]
    html = page(Run(name="again", steps=steps, history=[StepLine(0, wall)], settings={}), explain(steps))
    assert f'"k":"{row.letter}:{row.title}","t":"R3onstage' in re.sub(r"\s", "", html)
    write_trace(folder / "trace.json", {"run": [step]})
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    write_steps(folder / "steps.msgpack", {"run": [step]})
    (read_again,) = read_steps(folder / "steps.msgpack")["run"]
    rules, taken = read_again.rules, recorded(read_again.trace)
    listed = replace(rules, schedule=rules.schedule.order)  # that order strictly, which a hint only prefers
    preferred, replayed = simulate(rules, taken), simulate(listed, taken)
    for stage in range(2):
        assert read_again.trace.order(stage) == replayed.order(stage) == step.trace.order(stage)
        assert {*preferred.order(stage)} == {*replayed.order(stage)}
    recorder = FlightRecorder(folder / "flight-0", 0, "stage 0")
    recorder.begin_round(1, 1, step.rules, [0])
    recorder.dispatched(1, 0, Task(RECOMPUTE, 0, 3))
    assert "last dispatched R3 on stage 0" in read(folder / "flight-0").sentence(0.0)


def check_simulator(placement):
    """Each R takes as long as an F, between its F and its backward; no faster than the bound says."""
    rules = StepRules(placement=placement, microbatches=MICROBATCHES, schedule=BFR(), limit=2)
    found = WorkloadCosts(constant(placement.stages, MICROBATCHES, 1.0, transfer=0.125), placement)
    trace = simulate(rules, found)
    assert trace.makespan >= lower_bound(rules, found) > 0
    ran = {(record.stage, *record.task): record for record in trace.records}
    for stage, chunk, j in product(range(placement.stages), range(placement.chunks), range(MICROBATCHES)):
        forward, own, backward = (ran[stage, kind, chunk, j] for kind in (FORWARD, RECOMPUTE, BACKWARD))
        assert forward.end <= own.start and own.end <= backward.start
        assert own.end - own.start == forward.end - forward.start
    return trace.order(0)


def main():
    folder = Path(sys.argv[1])
    check_views(check_training(), folder)
    check_simulator(Placement(3, 2, "v"))
    print(f"{KINDS[RECOMPUTE].title}: {' '.join(map(str, check_simulator(Placement(3))))}")


if __name__ == "__main__":
    sys.exit(main())
