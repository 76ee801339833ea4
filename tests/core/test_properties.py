"""Large steps with deliveries and room in random order: what is checked exhaustively for small ones."""

import dataclasses

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from rrfp_jax.core.hints import BFW, Hint, Ranked
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import NAMED
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from tests.support.drain import Drain
from tests.support.interleave import World

HINTS = [schedule for schedule in NAMED.values() if isinstance(schedule, Hint)]
SEEDS = st.integers(0, 2**32)
PASSES = 0.01
"""Share of events after which all tasks are gone through, which takes long in large steps."""

large = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # for a small example there is the exploration
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def steps(draw, stages=16, microbatches=64, chunks=4, **kwargs):
    placement = Placement(
        draw(st.integers(1, stages)), draw(st.integers(1, chunks)), draw(st.sampled_from(["looped", "v"]))
    )
    rules = {
        "placement": placement,
        "microbatches": draw(st.integers(1, microbatches)),
        "schedule": draw(st.sampled_from(HINTS)),
        "accumulation": draw(st.sampled_from(["index", "arrival"])),
        "spare_gradients": draw(st.integers(0, 4)),
        "limit": draw(st.none() | st.integers(1, 40)),
    }
    return StepRules(**rules | kwargs)


@st.composite
def budgets(draw, rules):
    """One per stage, with costs that differ by up to a factor of ten."""
    row = st.lists(st.integers(1, 10), min_size=rules.microbatches, max_size=rules.microbatches)
    chunks = rules.placement.chunks
    costs = [draw(st.lists(row, min_size=chunks, max_size=chunks)) for _ in range(rules.placement.stages)]
    return tuple(
        Budget(own, max(map(sum, zip(*own, strict=True))) + draw(st.integers(0, 30))) for own in costs
    )


@large
@given(steps().flatmap(lambda rules: st.tuples(st.just(rules), st.none() | budgets(rules))), SEEDS)
@example((StepRules(placement=Placement(16, 4), microbatches=64, schedule=BFW(), limit=32), None), 0)
def test_hints(step, seed):
    """Also that a stage never idles while it has an admissible ready task."""
    rules, budgets = step
    World(rules, seed, budgets, checked=PASSES).run()


@large
@given(
    steps(stages=8, microbatches=24, chunks=2),
    st.integers(2, 4),
    st.sampled_from(["leader", "unanimous"]),
    SEEDS,
)
@example(
    StepRules(placement=Placement(8, 2, "v"), microbatches=24, schedule=BFW(), limit=4), 4, "unanimous", 0
)
def test_groups(rules, ranks, protocol, seed):
    World(rules, seed, ranks=ranks, protocol=protocol, checked=PASSES).run()


@large
@given(steps(limit=None), SEEDS)
def test_drain(rules, seed):
    rules = dataclasses.replace(rules, schedule=Drain(rules.schedule, 3))
    World(rules, seed, checked=PASSES).run()


@large
@given(st.data(), st.booleans(), SEEDS)
def test_fixed_orders(data, ranked, seed):
    """Followed they are kept; as rankings they may be left, within a limit."""
    schedule = data.draw(st.sampled_from([s for s in NAMED.values() if isinstance(s, FixedOrder)]))
    stages = data.draw(st.integers(1, 16))
    placement = schedule.placement_for(stages, data.draw(st.integers(1, 4)))
    microbatches = stages * data.draw(st.integers(1, 64 // stages))
    limit = data.draw(st.none() | st.integers(1, 40))
    rules = StepRules(
        placement=placement,
        microbatches=microbatches,
        schedule=Ranked(schedule) if ranked else schedule,
        limit=limit,
    )
    world = World(rules, seed, checked=PASSES).run()
    for stage, order in enumerate(world.orders):
        planned = list(schedule.order(stage, placement, microbatches))
        assert sorted(order) == sorted(planned) if ranked else order == planned
