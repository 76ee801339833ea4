"""Small steps explored exhaustively, a slice of `tests.verification.explore`; large ones in random order."""

import copy
import dataclasses
import random

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from rrfp_jax.core.hints import BF, BFW, Hint, Ranked
from rrfp_jax.core.orders import ZBH1, FixedOrder
from rrfp_jax.core.progress import ReadyQueue
from rrfp_jax.core.schedules import NAMED
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from tests.support.drain import Drain
from tests.support.interleave import World
from tests.verification.exploration import keys
from tests.verification.exploration.cases import cases, schedules, sizes
from tests.verification.exploration.faults import faults
from tests.verification.exploration.space import Case, Space, explore, real
from tests.verification.exploration.visits import Violation

SLICE = 8
"""Cases of each size; as they are shuffled, all kinds are among them."""
MOST_STATES = 20_000

ASIDE = {"log", "cached", "_note", "_sums", "_level"}
"""What a machine keeps for messages, or so as not to search twice."""


def step(stages=2, microbatches=2, schedule=None, **kwargs):
    return StepRules(
        placement=Placement(stages), microbatches=microbatches, schedule=schedule or BF(), **kwargs
    )


@pytest.mark.parametrize("size", [size for size in sizes() if size.effort < 18], ids=str)
def test_every_state_is_as_it_must_be(size):
    for case in cases(size)[:SLICE]:
        reach = explore(case, enough=lambda states: states >= MOST_STATES)
        assert reach.whole or reach.states >= MOST_STATES


@pytest.mark.parametrize("protocol", ["leader", "unanimous"])
def test_groups_of_three(protocol):
    assert explore(Case(rules=step(1, 2), ranks=3, protocol=protocol)).whole


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_fault_is_found(fault):
    with pytest.raises(Violation, match=fault.said):
        explore(fault.case, fault.make)
    assert explore(fault.case).whole


def test_what_is_wrong_is_shown_by_the_shortest_way():
    fault = next(fault for fault in faults() if fault.name == "no limit")
    with pytest.raises(Violation, match=r"limit is 1, after: stage 0 runs F0 on room$"):
        explore(fault.case, fault.make)


def test_cases_hold_what_they_say():
    looped, v = Placement(2, 2), Placement(2, 2, "v")
    names = [str(schedule) for schedule in schedules(looped, 2)]
    assert sum("Interleaved1F1B" in name for name in names) == 3  # followed, and as two rankings
    assert not any("ZBV" in name for name in names)
    assert any("ZBV" in str(schedule) for schedule in schedules(v, 2))
    largest = [case for size in sizes() if (size.stages, size.microbatches) == (3, 3) for case in cases(size)]
    assert {case.rules.limit for case in largest} >= {None, 1, 2, 3}
    assert {(case.rules.accumulation, case.rules.spare_gradients) for case in largest} >= {
        ("index", 0), ("index", 1), ("index", 2), ("arrival", 0)
    }  # fmt: skip
    assert {(case.ranks, case.protocol) for case in largest} == {
        (1, "leader"), (2, "leader"), (2, "unanimous")
    }  # fmt: skip
    assert any(len(set(budget.costs[0])) > 1 for case in largest for budget in case.budgets or ())


class TestKeys:
    """States are told apart by `key_of`: it must say all that a machine remembers."""

    @pytest.mark.parametrize(
        "case",
        [
            Case(rules=step(microbatches=3, schedule=BFW(), limit=2)),
            Case(rules=step(microbatches=3, schedule=Drain(BF(), 3), accumulation="arrival")),
            Case(rules=step(), ranks=2),
            Case(rules=step(), ranks=2, protocol="unanimous"),
            Case(rules=step(microbatches=3, schedule=Ranked(ZBH1()), limit=2)),
        ],
        ids=["admission", "drain", "leader", "unanimous", "ranked"],
    )
    def test_equal_keys_mean_equal_memories(self, case):
        known, met, space = {}, 0, Space(case)
        for seed in range(40):
            for node, machine in walk(space, random.Random(seed)):
                key, memories = (node, keys.key_of(machine)), memory(machine)
                met += key in known
                assert known.setdefault(key, memories) == memories
        assert met > 300

    def test_a_key_that_says_too_little_is_noticed(self, monkeypatch):
        key_of = keys.key_of
        monkeypatch.setattr(keys, "key_of", lambda machine: key_of(getattr(machine, "scheduler", machine)))
        with pytest.raises(AssertionError):
            self.test_equal_keys_mean_equal_memories(Case(rules=step(), ranks=2, protocol="unanimous"))


def walk(space, rng):
    """Machines on a random way through a case, with their nodes, each as it is after one more event."""
    case, state = space.case, 0
    now = [real(case, s, r) for s in range(case.rules.placement.stages) for r in range(case.ranks)]
    for _ in range(1000):
        if not (moves := list(space.moves(state))):
            return
        move, state = rng.choice(moves)
        now[move.node].handle(move.step.event)
        yield move.node, now[move.node]
    raise AssertionError("no end in sight")


def memory(value):
    """Everything in a machine as it is now, but what is only told to users or found faster for."""
    if keys.is_ranking(value):
        return memory(value[1])
    if isinstance(value, (list, tuple)):
        return [memory(each) for each in value]
    if isinstance(value, dict):
        return {key: memory(each) for key, each in value.items()}
    if isinstance(value, ReadyQueue):
        return memory(value.tasks), bytes(value.states), value.lowest
    if type(value).__module__.startswith("rrfp_jax.core") and hasattr(value, "__dict__"):
        return {name: memory(each) for name, each in vars(value).items() if name not in ASIDE}
    return copy.copy(value)


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
@example((StepRules(placement=Placement(16, 4), microbatches=32, schedule=BFW(), limit=32), None), 0)
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


@pytest.mark.slow(reason="5 s: larger cases; test_every_state_is_as_it_must_be has smaller ones whole")
@large
@given(steps(limit=None), SEEDS)
def test_drain(rules, seed):
    rules = dataclasses.replace(rules, schedule=Drain(rules.schedule, 3))
    World(rules, seed, checked=PASSES).run()


@pytest.mark.slow(reason="5 s: larger cases; test_every_state_is_as_it_must_be has smaller ones whole")
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
