"""Steps of many kinds for properties of the simulator, and costs without any structure."""

import dataclasses
import functools
import random

from hypothesis import strategies as st

from rrfp_jax.core.hints import Hint, Ranked
from rrfp_jax.core.schedules import NAMED
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Placement, Task
from rrfp_jax.trace.costs import StepCosts
from tests.support.drain import Drain


@functools.cache
def seconds(*key):
    """A time for any key: often nothing, or the same as others, so that many things happen at once."""
    draw = random.Random(repr(key))
    return draw.choice((0.0, 1.0, draw.expovariate(1.0), draw.uniform(0.5, 1.5)))


@dataclasses.dataclass(frozen=True)
class Drawn(StepCosts):
    """Each task and each transfer has a time of its own."""

    placement: Placement
    seed: int

    def duration(self, stage, task):
        kind, chunk, microbatch = task
        if kind is BACKWARD:
            return sum(self.duration(stage, Task(half, chunk, microbatch)) for half in (INPUT, WEIGHT))
        return seconds(self.seed, stage, int(kind), chunk, microbatch)

    def transfer(self, stage, task):
        destination = self.placement.destination(stage, task)
        if destination is None or destination[0] == stage:
            return 0.0
        return seconds(self.seed, "transfer", stage, task.kind is FORWARD, task.chunk, task.microbatch)


@st.composite
def placements(draw, stages=4):
    chunks = draw(st.integers(1, 2))
    return Placement(draw(st.integers(1, stages)), chunks, draw(st.sampled_from(["looped", "v"])))


@st.composite
def steps(draw, stages=4, microbatches=6, forwards=48):
    """Rules with any schedule that is defined for their sizes, and costs."""
    placement = draw(placements(stages))
    count = draw(st.integers(1, min(microbatches, forwards // (placement.last + 1))))
    named = [NAMED[name] for name in sorted(NAMED) if defined(NAMED[name], placement, count)]
    schedules = named + [Ranked(s) for s in named if hasattr(s, "order")]
    schedule, limit = draw(st.sampled_from(schedules)), draw(st.none() | st.integers(1, 4))
    if limit is not None and isinstance(schedule, Hint) and draw(st.booleans()):
        schedule, limit = Drain(schedule, limit), None
    rules = StepRules(
        placement=placement,
        microbatches=count,
        schedule=schedule,
        limit=limit,
        accumulation=draw(st.sampled_from(["index", "arrival"])),
    )
    return rules, Drawn(placement, draw(st.integers(0, 10**6)))


def defined(schedule, placement, microbatches):
    try:
        return not hasattr(schedule, "order") or bool(schedule.order(0, placement, microbatches))
    except ValueError:
        return False


def peak(order):
    """Most microbatches that a stage's order holds at once; with several chunks, if they run B's."""
    held = peak = 0
    for task in order:
        held += task.kind is FORWARD and task.chunk == 0
        peak = max(peak, held)
        held -= task.kind in (BACKWARD, WEIGHT) and task.chunk == 0
    return peak
