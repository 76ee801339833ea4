"""Training with random delays: equal to the bit under every schedule of a placement, close between them."""

import random
import re

import chex
import jax
import optax
import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.orders import FixedOrder, GPipe
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import FORWARD
from rrfp_jax.runtime.engine.pacing import ArrivalDelays
from rrfp_jax.train.named import read_schedule
from tests.support import toy
from tests.support.selected import is_quick

pytestmark = pytest.mark.optimized

STAGES, MICROBATCHES = 4, 8
STEPS, FEW_STEPS = 10, 3  # the latter in `make test`


class OutOfTurn(FixedOrder):
    """GPipe with its backwards in another order: of 8, 4 gradients are parked, up to two at once."""

    def order(self, stage, placement, microbatches):
        tasks = GPipe().order(stage, placement, microbatches)
        forwards, backwards = ([t for t in tasks if (t.kind is FORWARD) == own] for own in (True, False))
        return [*forwards, *(backwards[j] for j in (1, 2, 0, 3, 5, 4, 7, 6))]


PLACEMENTS = {
    "one chunk": (rrfp.Mesh(pp=STAGES), ["gpipe", "1f1b", "zb-h1", "bf", "bfw", "ranked:zb-h1", OutOfTurn()]),
    "looped": (rrfp.Mesh(pp=STAGES, chunks=2), ["interleaved-1f1b", "bf", "bfw"]),
    # "auto" goes on from the schedule before it, by what that one's steps took.
    "v": (
        rrfp.Mesh(pp=STAGES, chunks=2, shape="v"),
        ["zb-v", "bf", "bfw", "ranked:zb-v", "auto"],
    ),
}
FEW = "one chunk", "v"
"""Placements in `make test`: both kinds of chunks, and orders that park."""

LONGEST_DELAY_SECONDS = 1e-3


def data(step):
    return toy.microbatches(MICROBATCHES, seed=step)


class Runs:
    """Training from the same start again and again on one trainer, so that programs are compiled once."""

    def __init__(self, mesh, schedules, steps):
        self.steps = steps
        self.trainer = toy.trainer(
            mesh=mesh,
            optimizer=optax.adam(1e-2),
            data=data,
            max_in_flight=MICROBATCHES,
            schedule=schedules[0],
        )
        self.trainer.start()
        self.driver = self.trainer._engine.driver
        self.start = jax.device_get([(own.stages[0].leaves, own.state) for own in self.optimizers])

    @property
    def optimizers(self):
        return self.trainer._engine.optimizers

    def run(self, schedule, seed):
        """Losses of all steps, parameters after them, orders of tasks, with arrivals held up at random."""
        draw = random.Random(seed)
        self.driver.delays = ArrivalDelays(
            lambda arrival, now: (now + draw.uniform(0, LONGEST_DELAY_SECONDS), 0.0)
        )
        for own, start in zip(self.optimizers, self.start, strict=True):
            own.stages[0].leaves, own.state = jax.device_put(start, own.stage_mesh.device)
        self.trainer.schedule, self.trainer._stepper.steps_done = schedule, 0
        reports = list(self.trainer.steps(self.steps))
        orders = [[str(r.task) for r in report.trace.stage_records(1)] for report in reports]
        return [report.loss for report in reports], jax.device_get(self.trainer.stage_params), orders


@pytest.fixture(scope="module")
def runs(request):
    """By placement and schedule, two runs with other delays."""
    found, names, steps = {}, PLACEMENTS, STEPS
    if is_quick(request):
        names, steps = FEW, FEW_STEPS
    for name in names:
        mesh, schedules = PLACEMENTS[name]
        own = Runs(mesh, schedules, steps)
        found |= {(name, schedule): [own.run(schedule, seed) for seed in (0, 1)] for schedule in schedules}
    return found


def test_equal_to_the_bit_within_a_placement(runs):
    for (name, schedule), pair in runs.items():
        losses, params, _ = runs[name, PLACEMENTS[name][1][0]][0]
        for other_losses, other_params, _ in pair:
            assert other_losses == losses, (name, schedule)
            chex.assert_trees_all_equal(params, other_params, custom_message=f"{name}, {schedule}")


def test_hints_ran_in_other_orders(runs):
    """So that the delays did something. On a busy machine all may arrive before a stage chooses."""
    hints = {key: pair for key, pair in runs.items() if re.match("bfw?$|ranked:", str(key[1]))}
    assert len(hints) >= 3 * len(FEW)
    others = [first != second for (_, _, first), (_, _, second) in hints.values()]
    assert sum(others) > len(others) / 2


def test_an_order_parked_gradients():
    mesh, schedules = PLACEMENTS["one chunk"]
    rules = [
        StepRules(placement=mesh.placement(own), microbatches=MICROBATCHES, schedule=own)
        for own in map(read_schedule, schedules)
    ]
    # In turn; in turn; in turn; hints may park as many as they are let; two.
    assert [own.unadded_gradients for own in rules] == [0, 0, 0, 2, 2, 2, 2]


def test_losses_between_placements_are_close(runs):
    finals = [run[0][-1] for pair in runs.values() for run in pair]
    assert max(finals) - min(finals) <= 1e-5 * max(finals)


@pytest.mark.slow(reason="6 s: optimized programs; within a placement, the test of equal bits")
def test_gradients_between_placements_are_those_of_plain_jax(runs):
    """Of every step of a run, at that step's parameters."""
    for mesh, schedules in PLACEMENTS.values():
        trainer = toy.trainer(mesh=mesh, schedule=schedules[-1], data=data)
        for step in range(STEPS):
            batch = data(step)
            gradient = trainer.value_and_grad(batch)[1]
            assert toy.worst_leaf(gradient, toy.reference(trainer.stage_params, batch)[1]) <= 1e-5
            trainer.step(batch)
