"""Which hint is chosen: the fastest in the simulator that can run, the present one unless another gains."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.sim.choice import CANDIDATES, GAIN, Auto, Candidate, choose
from rrfp_jax.sim.choice import EQUAL as AS_FAST
from rrfp_jax.sim.compare import Conditions, choice
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.families import Step, varied
from rrfp_jax.trace.costs import WorkloadCosts, constant, log_normal
from tests.support.steps import Drawn


def candidate(name, workload, limit=None, **kwargs):
    hint = by_name(name)
    rules = StepRules(
        placement=hint.placement_for(workload.stages),
        microbatches=workload.microbatches,
        schedule=hint,
        limit=limit,
    )
    return Candidate(rules=rules, costs=WorkloadCosts(workload, rules.placement), **kwargs)


def candidates(workload, names=CANDIDATES, **kwargs):
    return {name: candidate(name, workload, **kwargs) for name in names}


EQUAL = constant(4, 8, 1.0)


class TestAuto:
    @pytest.mark.parametrize(
        ("names", "said"),
        [((), "name hints"), (("bf", "best"), "no such schedule"), (("zb-v",), "choose ranked:zb-v")],
    )
    def test_only_hints_are_candidates(self, names, said):
        with pytest.raises(ValueError, match=said):
            Auto(candidates=names)

    def test_hints_by_name(self):
        assert list(Auto().hints) == list(CANDIDATES)
        assert Auto(candidates=("ranked:zb-h1",)).hints == {"ranked:zb-h1": by_name("ranked:zb-h1")}


class TestChoices:
    @pytest.mark.parametrize(
        ("limit", "transfer", "names", "expected"),
        [
            (None, 0.0, ("bf", "bfw"), "bfw"),
            (None, 0.0, CANDIDATES, "ranked:zb-v"),
            (2, 0.0, ("ranked:zb-v", "ranked:v-min", "bfw"), "ranked:v-min"),
            (None, 3.0, ("ranked:zb-v", "bfw"), "bfw"),  # half as many messages
        ],
    )
    def test_the_fastest(self, limit, transfer, names, expected):
        found = choose(candidates(constant(4, 8, 1.0, transfer=transfer), names, limit=limit))
        assert (found.name, found.refused) == (expected, {})
        assert found.seconds[expected] == min(found.seconds.values())

    def test_the_first_of_equals(self):
        """One microbatch leaves nothing to choose."""
        one = constant(2, 1, 1.0, backward_ratio=0.0)
        for names in (("fb", "bf"), ("bf", "fb")):
            assert choose(candidates(one, names)).name == names[0]

    def test_what_cannot_run_is_told(self):
        given = candidates(EQUAL, ("bf", "bfw")) | {"ranked:zb-v": "too few layers"}
        given["bfw"] = dataclasses.replace(given["bfw"], budgets=[Budget([[9] * 8], 8)] * 4)
        found = choose(given)
        assert (found.name, list(found.refused)) == ("bf", ["bfw", "ranked:zb-v"])
        assert "could never be admitted" in found.refused["bfw"]
        with pytest.raises(ValueError, match=r"bfw: limit=8: .*; ranked:zb-v: too few layers$"):
            choose({name: given[name] for name in found.refused})
        with pytest.raises(ValueError, match="none to choose from"):
            choose({})

    def test_the_present_one_stays_unless_another_gains(self):
        given = candidates(EQUAL, ("bf", "bfw"))
        spans = {name: one.seconds() for name, one in given.items()}
        assert spans["bfw"] < (1 - GAIN) * spans["bf"]
        assert choose(given, present="bf").name == "bfw"
        close = candidates(EQUAL, ("ranked:zb-h2", "bfw"))
        assert {choose(close, present=name).name for name in close} == set(close)
        assert choose(close, present="gone").name == choose(close).name

    def test_stages_that_share_cores_are_no_faster_than_these(self):
        """With one core for all, what counts is the compute; a split backward gains nothing then."""
        given = candidates(EQUAL, ("bfw", "bf"), at_once=1)
        assert choose(given).seconds == {"bfw": 4 * 8 * 3.0, "bf": 4 * 8 * 3.0}
        assert choose(given).name == "bf"

    def test_of_those_as_fast_the_one_with_fewest_tasks(self):
        given = candidates(EQUAL, ("ranked:zb-v", "bfw", "bf"), at_once=1)
        assert [given[name].tasks for name in given] == [4 * 2 * 3, 3 * 3 + 2, 4 * 2]
        slower = dataclasses.replace(given["bf"], costs=WorkloadCosts(constant(4, 8, 1.02), Placement(4)))
        assert choose(given | {"bf": slower}).name == "bfw"
        little = dataclasses.replace(given["bf"], costs=WorkloadCosts(constant(4, 8, 1.005), Placement(4)))
        assert choose(given | {"bf": little}).name == "bf"

    def test_told_in_a_line(self):
        told = str(choose(candidates(EQUAL)))
        assert told.startswith("ranked:zb-v: 2") and told.count("\n") == 0
        assert " s a step, beside " in told and told.endswith(", 4 more")
        assert (
            str(choose(candidates(EQUAL, ("bf",)))) == f"bf: {candidate('bf', EQUAL).seconds():.4g} s a step"
        )


class TestLargeSteps:
    def test_are_cut_short(self):
        workload = log_normal(4, 64, forward=1.0, sigma=0.3, shared=0.5, seed=0)
        given = candidates(workload, ("bf", "ranked:zb-v"))
        each = 4 * 2 + 4 * 2 * 3
        found = choose(given, most_tasks=10 * each)
        assert (found.simulated, found.microbatches) == (8, 64)  # a multiple of the stages
        assert "for 8 of 64 microbatches" in str(found)
        shorter = dataclasses.replace(given["bf"].rules, microbatches=8, schedule=by_name("bf"))
        assert found.seconds["bf"] == simulate(shorter, given["bf"].costs).makespan

    def test_a_microbatch_a_stage_is_simulated_in_any_case(self):
        given = candidates(EQUAL, ("bf", "bfw"))
        assert choose(given, most_tasks=1).simulated == 4
        assert choose(candidates(constant(4, 3, 1.0)), most_tasks=1).simulated == 3

    def test_budgets_are_cut_with_them(self):
        given = candidates(EQUAL, ("bfw",), budgets=[Budget([[1] * 4 + [5] * 4], 4)] * 4)
        with pytest.raises(ValueError, match="microbatch 4 costs 5"):
            choose(given)
        assert choose(given, most_tasks=1).name == "bfw"


@st.composite
def steps(draw):
    """Candidates of one step with costs and limits of all kinds, and which is present."""
    stages, count = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    names = draw(st.lists(st.sampled_from([*CANDIDATES, "fb", "ranked:1f1b"]), min_size=1, unique=True))
    seed, limit = draw(st.integers(0, 10**6)), draw(st.none() | st.integers(1, 4))
    room = draw(st.none() | st.integers(1, 12))
    found = {}
    for name in names:
        hint = by_name(name)
        placement = hint.placement_for(stages)
        budget = (
            None if room is None else Budget([[1 + j % 3 for j in range(count)]] * placement.chunks, room)
        )
        found[name] = Candidate(
            rules=StepRules(placement=placement, microbatches=count, schedule=hint, limit=limit),
            costs=Drawn(placement, seed),
            budgets=[budget] * stages,
        )
    return found, draw(st.none() | st.sampled_from(names)), draw(st.sampled_from([1, 200, 10**6]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps())
def test_choices_are_what_they_say(step):
    given, present, most_tasks = step
    try:
        found = choose(given, present, most_tasks)
    except ValueError:
        assert most_tasks < 10**6 or all(map(_refused, given.values()))
        return
    assert {*found.seconds} | {*found.refused} == {*given} and not {*found.seconds} & {*found.refused}
    assert all(found.seconds[name] == given[name].first(found.simulated).seconds() for name in found.seconds)
    fastest = min(found.seconds.values())
    assert list(found.seconds.values()) == sorted(found.seconds.values())
    as_fast = [name for name in found.seconds if (1 - AS_FAST) * found.seconds[name] <= fastest]
    if present in found.seconds and fastest >= (1 - GAIN) * found.seconds[present]:
        assert found.name == present
    else:
        assert found.name in as_fast
        assert given[found.name].tasks == min(given[name].tasks for name in as_fast)
    assert choose(given, present, most_tasks) == found
    stages = next(iter(given.values())).rules.placement.stages
    each = sum(one.tasks for one in given.values())
    assert each * found.simulated <= max(most_tasks, each * stages)


def _refused(one):
    try:
        one.seconds()
    except ValueError:
        return True
    return False


def test_a_step_is_judged_by_what_is_known_of_it():
    """What happens has nothing to do with what is chosen before."""
    known = varied(4, 8, 0, sigma=0.3)
    slow = Step(known.known, constant(4, 8, 1.0, transfer=9.0))
    given = Conditions(limit=8)
    assert choice(Auto(), slow, given) == choice(Auto(), Step(known.known, known.known), given)
