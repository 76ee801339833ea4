"""Steps of any size for properties of the simulator, with a small class for costs without any structure."""

import dataclasses
import random

from hypothesis import strategies as st

from rrfp_jax.core.hints import Ranked
from rrfp_jax.core.rules import StepRules
from rrfp_jax.core.schedules import NAMED
from rrfp_jax.core.tasks import BACKWARD, INPUT, WEIGHT, Placement
from rrfp_jax.sim.costs import Costs


@dataclasses.dataclass(frozen=True)
class Drawn(Costs):
    """Each task and each transfer has a time of its own, some of them none."""

    placement: Placement
    seed: int
    slowest_transfer: float = 1.0

    def draw(self, *key):
        return random.Random(repr((self.seed, *key)))

    def duration(self, stage, task):
        kind, chunk, microbatch = task
        if kind is BACKWARD:
            return sum(self.duration(stage, task._replace(kind=half)) for half in (INPUT, WEIGHT))
        draw = self.draw(stage, int(kind), chunk, microbatch)
        return draw.choice((0.0, 1.0, draw.expovariate(1.0), draw.uniform(0.5, 1.5)))

    def transfer(self, stage, task):
        destination = self.placement.destination(stage, task)
        if destination is None or destination[0] == stage:
            return 0.0
        draw = self.draw("transfer", stage, int(task.kind in (BACKWARD, INPUT)), task.chunk, task.microbatch)
        return draw.choice((0.0, draw.uniform(0.0, self.slowest_transfer)))


@st.composite
def placements(draw, stages=4):
    chunks = draw(st.integers(1, 2))
    return Placement(draw(st.integers(1, stages)), chunks, draw(st.sampled_from(["looped", "v"])))


@st.composite
def steps(draw, stages=4, microbatches=6):
    """Rules with any schedule that is defined for their sizes, and costs."""
    placement, count = draw(placements(stages)), draw(st.integers(1, microbatches))
    named = [NAMED[name] for name in sorted(NAMED) if defined(NAMED[name], placement, count)]
    schedules = named + [Ranked(s) for s in named if hasattr(s, "order")]
    rules = StepRules(
        placement=placement,
        microbatches=count,
        schedule=draw(st.sampled_from(schedules)),
        limit=draw(st.none() | st.integers(1, 4)),
        accumulation=draw(st.sampled_from(["index", "arrival"])),
    )
    return rules, Drawn(placement, draw(st.integers(0, 10**6)))


def defined(schedule, placement, microbatches):
    try:
        return not hasattr(schedule, "order") or bool(schedule.order(0, placement, microbatches))
    except ValueError:
        return False


def peak(order):
    """Most microbatches that a stage's order holds at once, of one chunk each."""
    held = peak = 0
    for task in order:
        held += task.kind.letter == "F"
        peak = max(peak, held)
        held -= task.kind in (BACKWARD, WEIGHT)
    return peak
