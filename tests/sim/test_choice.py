"""What simulations choose: hints and splits, what-ifs, and planned orders."""

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core.orders import GPipe, OneFOneB
from rrfp_jax.core.schedules import NAMED, by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import WEIGHT, Placement
from rrfp_jax.report.what_if import what_ifs
from rrfp_jax.sim.choice import CANDIDATES, GAIN, Auto, Candidate, choose
from rrfp_jax.sim.choice import EQUAL as AS_FAST
from rrfp_jax.sim.engine import simulate
from rrfp_jax.sim.planned import plan
from rrfp_jax.studies.bounds import lower_bound
from rrfp_jax.studies.compare import Conditions, choice
from rrfp_jax.studies.families import Step, varied
from rrfp_jax.trace.costs import WorkloadCosts, constant, log_normal
from rrfp_jax.trace.records import Part, RecordedStep, StepTrace
from tests.support.optimum import optimum
from tests.support.spoilt import EVEN, MICROBATCHES, STAGES, ran, rows, rules, spoilt
from tests.support.steps import Drawn, peak, steps


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
        assert found.name == expected and found.seconds.keys() == {*names}
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
        assert (found.name, list(found.seconds)) == ("bf", ["bf"])
        told = "bfw: limit=8: .*could never be admitted.*; ranked:zb-v: too few layers$"
        with pytest.raises(ValueError, match=told):
            choose({name: given[name] for name in ("bfw", "ranked:zb-v")})
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
def drawn_steps(draw):
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
@given(drawn_steps())
def test_choices_are_what_they_say(step):
    given, present, most_tasks = step
    try:
        found = choose(given, present, most_tasks)
    except ValueError:
        assert most_tasks < 10**6 or all(map(_refused, given.values()))
        return
    assert found.name in found.seconds and found.seconds.keys() <= given.keys()
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


@pytest.mark.parametrize(
    ("name", "kind", "subject"),
    [
        ("stage", "stage", 2),
        ("jitter", "jitter", None),
        ("lengths", "lengths", None),
        ("link", "link", (1, 2)),
    ],
)
def test_undoing_what_is_wrong_saves_most(name, kind, subject):
    step, undone = spoilt(name)
    found = what_ifs(step, tried=())
    assert found.error < 1e-9
    one = next(change for change in found.changes if (change.kind, change.subject) == (kind, subject))
    assert one.seconds == pytest.approx(undone, rel=0.03)
    rivals = {"stages", "links"} - {kind}  # which undo the same, and more
    assert next(change for change in found.changes if change.kind not in rivals) == one


def test_a_limit_that_is_too_small():
    slow_link = replace(
        EVEN, transfer_forward=rows([20e-3] * STAGES), transfer_backward=rows([20e-3] * STAGES)
    )
    costs = WorkloadCosts(slow_link, rules().placement)
    by_number = what_ifs(ran(costs, limit=3))
    more = next(change for change in by_number.changes if (change.kind, change.subject) == ("in flight", 1))
    assert more.seconds == pytest.approx(simulate(rules(limit=4), costs).makespan)
    costs_in_bytes = [[10] * MICROBATCHES]
    by_bytes = what_ifs(ran(costs, limit=None, budgets=[Budget(costs_in_bytes, 30)] * STAGES))
    wider = next(change for change in by_bytes.changes if change.kind == "bytes")
    assert wider.seconds == pytest.approx(simulate(rules(limit=4), costs).makespan)
    assert not [change for change in what_ifs(ran(costs, limit=None)).changes if change.kind == "bytes"]


def test_another_schedule_takes_what_it_takes():
    costs = WorkloadCosts(EVEN, rules().placement)
    found = what_ifs(ran(costs, "1f1b"), tried=["1f1b", "bf", "bfw", "zb-v"])
    tried = {change.subject: change.seconds for change in found.changes if change.kind == "schedule"}
    assert set(tried) == {"bf", "bfw"}, "its own is not tried, nor one for another placement"
    for name, seconds in tried.items():  # with as much as 1F1B holds
        assert seconds == pytest.approx(simulate(rules(name, limit=STAGES), costs).makespan)


def test_another_schedule_holds_no_more():
    costs = WorkloadCosts(EVEN, rules().placement)
    budgets = [Budget([[10] * MICROBATCHES], 40)] * STAGES

    def tried(step):
        found = what_ifs(step, tried=["gpipe", "zb-h1", "zb-h2"])
        return {change.subject for change in found.changes if change.kind == "schedule"}

    assert tried(ran(costs)) == tried(ran(costs, "1f1b")) == {"zb-h1"}
    assert tried(ran(costs, limit=None, budgets=budgets)) == {"zb-h1"}
    assert tried(ran(costs, limit=None)) == {"gpipe", "zb-h1", "zb-h2"}


@pytest.mark.parametrize(
    ("own", "stages", "other", "limit"), [("zb-v", 8, "ranked:zb-v", 8), ("interleaved-1f1b", 4, "bf", 5)]
)
def test_another_schedule_holds_no_more_chunks(own, stages, other, limit):
    """Parts of more microbatches than they would be whole: 16 chunks, and 11."""
    placement = by_name(own).placement_for(stages, 2)
    mine = StepRules(placement=placement, microbatches=32, schedule=by_name(own))
    costs = WorkloadCosts(log_normal(stages, 32, forward=0.01, sigma=0.3, shared=0.5, seed=1), placement)
    step = RecordedStep(trace=simulate(mine, costs), rules=mine, buckets=[""] * 32)
    (found,) = [change for change in what_ifs(step, tried=[other]).changes if change.kind == "schedule"]
    as_much = replace(mine, schedule=by_name(other), limit=limit)
    assert found.seconds == pytest.approx(simulate(as_much, costs).makespan)


@given(steps())
@settings(max_examples=100, deadline=None)
def test_a_replay_takes_as_long_as_the_step(drawn):
    own, costs = drawn
    trace = simulate(own, costs)
    step = RecordedStep(trace=trace, rules=own, buckets=[""] * own.microbatches)
    assert what_ifs(step, tried=()).error < 1e-9


def test_the_hosts_time_is_replayed_and_can_be_taken_out():
    host, own = 3e-3, rules()
    slow = replace(EVEN, **{part: rows([11.5e-3] * STAGES) for part in ("backward_input", "backward_weight")})
    trace = simulate(own, WorkloadCosts(replace(slow, forward=rows([13e-3] * STAGES)), own.placement))
    records = [record._replace(start=record.start + host) for record in trace.records]
    step = RecordedStep(
        trace=StepTrace(0, trace.placement, [Part.of(records)]), rules=own, buckets=[""] * MICROBATCHES
    )
    found = what_ifs(step, tried=())
    assert found.error < 0.01
    without = next(change for change in found.changes if change.kind == "host")
    assert without.seconds == pytest.approx(simulate(own, WorkloadCosts(EVEN, own.placement)).makespan)


def plan_of(rules, costs, links="parallel", budgets=None, **options):
    return plan(Candidate(rules=rules, costs=costs, links=links, budgets=budgets), **options)


FUSED = {name: NAMED[name] for name in ("bf", "b-priority", "1f1b", "gpipe")}


def varied_step(stages, microbatches, **options):
    """A step of log-normal durations, by the rules of the product unless said otherwise."""
    workload = log_normal(stages, microbatches, forward=1.0, sigma=0.3, shared=0.5, seed=0)
    placement = Placement(stages)
    rules = StepRules(placement=placement, microbatches=microbatches, schedule=GPipe(), **options)
    return rules, WorkloadCosts(workload, placement)


def best_candidate(rules, costs, **options):
    return plan_of(rules, costs, evaluations=0, **options).makespan


def followed(rules, costs, planned, **options):
    return simulate(dataclasses.replace(rules, schedule=planned.order), costs, **options)


@pytest.mark.slow(reason="many simulated steps")
@given(steps(stages=3))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_plan_is_followed_as_predicted(step):
    rules, costs = step
    planned = plan_of(rules, costs, evaluations=30)
    trace = followed(rules, costs, planned)
    assert [trace.order(stage) for stage in range(trace.stages)] == list(map(list, planned.order.rows))
    assert trace.makespan == planned.makespan
    assert lower_bound(rules, costs) <= planned.makespan * (1 + 1e-9)
    assert planned.makespan <= best_candidate(rules, costs)
    assert plan_of(rules, costs, evaluations=30) == planned


@pytest.mark.parametrize("links", ["serial", "synchronous"])
def test_a_plan_for_other_links(links):
    rules, _ = varied_step(3, 6)
    costs = Drawn(rules.placement, 1)
    planned = plan_of(rules, costs, evaluations=40, links=links)
    assert followed(rules, costs, planned, links=links).makespan == planned.makespan


@pytest.mark.parametrize("accumulation", ["index", "arrival"])
@pytest.mark.parametrize("limit", [4, 32])
def test_the_search_gains(limit, accumulation):
    rules, costs = varied_step(4, 12, limit=limit, accumulation=accumulation)
    planned = plan_of(rules, costs, candidates=FUSED)
    assert planned.makespan < 0.97 * best_candidate(rules, costs, candidates=FUSED)
    assert max(map(peak, planned.order.rows)) <= limit
    assert not any(task.kind is WEIGHT for row in planned.order.rows for task in row)


def test_a_plan_keeps_to_a_budget():
    rules, costs = varied_step(4, 12)
    in_bytes = [3 + 2 * (j % 3) for j in range(12)]
    planned = plan_of(rules, costs, budgets=[Budget([in_bytes], 15)] * 4, evaluations=60)
    for row in planned.order.rows:
        held = 0
        for kind, _, j in row:
            held += in_bytes[j] * {"F": 1, "I": 0, "B": -1, "W": -1}[kind.letter]
            assert held <= 15


def test_little_is_left_to_gain_in_a_tiny_step():
    rules, costs = varied_step(3, 4, accumulation="arrival")
    planned = plan_of(rules, costs, candidates=FUSED)
    assert 1 - 1e-9 <= planned.makespan / optimum(rules, costs).makespan <= 1.02


def test_refused_candidates_are_named():
    rules, costs = varied_step(4, 8, limit=2)
    refused = (
        "1f1b: exceeds the limit in flight on stage 0; zb-v: ZB-V is defined for 2 chunks a stage, got 1"
    )
    with pytest.raises(ValueError, match=f"no candidate for a plan: {refused}"):
        plan_of(rules, costs, candidates={"1f1b": OneFOneB(), "zb-v": by_name("zb-v")})


def test_other_seeds_other_plans():
    rules, costs = varied_step(4, 8)
    assert len({plan_of(rules, costs, evaluations=60, seed=seed).order for seed in range(3)}) > 1


def test_one_microbatch():
    rules, costs = varied_step(2, 1)
    planned = plan_of(rules, costs, evaluations=30)
    assert planned.makespan == pytest.approx(lower_bound(rules, costs))
