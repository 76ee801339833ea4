"""Planned orders at run time: found before each step, the same everywhere, kept within limits, followed."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.orders import OneFOneB, planned_order
from rrfp_jax.core.schedules import NAMED
from rrfp_jax.core.step_rules import StepRules, bucket_name
from rrfp_jax.core.tasks import Placement
from rrfp_jax.data.contract import InMemory, buckets_of
from rrfp_jax.schedules import BF, BFW, Planned
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import CostTable, Workload, WorkloadCosts, log_normal, measured
from rrfp_jax.trace.records import RecordedStep
from rrfp_jax.train.named import read_costs
from tests.support import toy
from tests.support.programs import compilations

ROOT = Path(__file__).parents[2]

LENGTHS = (4, 8, 16)

TWO = log_normal(1, 2, forward=1.0, sigma=0, shared=0, seed=0)

BUDGET = 80_000
"""Bytes of a stage, for three or four of the longest microbatches."""


def mixed(step, count=8):
    """Microbatches of three shapes, another mixture each step."""
    lengths = np.random.default_rng(step).choice(LENGTHS, count)
    return [toy.microbatches(1, seed=100 * step + j, length=n)[0] for j, n in enumerate(lengths)]


def buckets(batch):
    return buckets_of(InMemory(batch).plan(0))


def table(stages=4):
    """Costs that grow with length."""
    found, hop = {}, ((1e-4,),) * stages
    for length in LENGTHS:
        (bucket,) = buckets(toy.microbatches(1, length=length))
        one = ((1e-3 * length,),) * stages
        found[bucket_name(bucket)] = Workload(one, one, one, hop, hop)
    return CostTable(found)


def orders(report):
    return [report.trace.order(stage) for stage in range(report.trace.stages)]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(json.dumps(table().as_json_object()))
    return path


class TestCostTables:
    def test_a_step_has_the_columns_of_its_buckets(self):
        own = table()
        short, _, long = own.buckets
        workload = own.workload([long, short, long])
        assert workload.forward == ((0.016, 0.004, 0.016),) * 4
        assert workload.transfer_backward == ((1e-4,) * 3,) * 4
        assert CostTable.from_json_object(json.loads(json.dumps(own.as_json_object()))) == own
        assert repr(own) == repr(table()) != repr(table(2))

    @pytest.mark.parametrize("name", ["1f1b", "bf", "bfw", "zb-h1", "interleaved-1f1b", "zb-v"])
    def test_what_was_simulated_is_measured(self, name):
        """A run whose tasks last as a workload says, measured, gives that workload; B's in equal halves."""
        placement = NAMED[name].placement_for(2)
        workload = log_normal(2, 4, forward=1.0, sigma=0.3, shared=0.5, seed=0, transfer=0.1)
        rules = StepRules(placement=placement, microbatches=4, schedule=NAMED[name])
        trace = simulate(rules, WorkloadCosts(workload, placement))
        found = measured([RecordedStep(trace=trace, rules=rules, buckets="abcd")]).workload("abcd")
        for part in ("forward", "backward_input", "backward_weight"):
            np.testing.assert_allclose(getattr(found, part), getattr(workload, part), rtol=1e-6)
        crossing = 2 if placement.chunks > 1 and placement.shape == "looped" else 1
        np.testing.assert_allclose(found.transfer_forward[:crossing], workload.transfer_forward[:crossing])
        assert measured([]) is None

    def test_medians_over_steps(self):
        own = Placement(1)
        rules = StepRules(placement=own, microbatches=2, schedule=BF())
        workloads = [log_normal(1, 2, forward=f, sigma=0, shared=0, seed=0) for f in (1.0, 9.0, 2.0)]
        traces = [simulate(rules, WorkloadCosts(workload, own)) for workload in workloads]
        steps = [RecordedStep(trace=trace, rules=rules, buckets="ab") for trace in traces]
        assert measured(steps).buckets["a"].forward == ((2.0,),)

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("[]", "a cost table is a list"),
            ("{}", "the cost table is empty"),
            ('{"a": 1}', "bucket 'a': a workload is a int"),
            (json.dumps({"a": TWO.as_json_object()}), "give one microbatch"),
            ("{", "no cost table"),
        ],
    )
    def test_files_that_do_not_do_are_refused(self, tmp_path, content, said):
        (tmp_path / "c.json").write_text(content)
        with pytest.raises(rrfp.UsageError, match=r"costs=.*c\.json: no cost table") as error:
            rrfp.Trainer(toy.pipeline(), schedule=f"planned:{tmp_path}/c.json")
        assert said in str(error.value)
        with pytest.raises(rrfp.UsageError, match=r"no\.json: cannot be read"):
            toy.trainer(schedule=Planned(costs="no.json"))


class TestOrders:
    @pytest.mark.parametrize("base", [BF(), BFW(), OneFOneB(), NAMED["zb-h1"]], ids=repr)
    def test_splits_as_its_base_does_and_is_no_worse(self, base):
        workload = log_normal(4, 8, forward=1.0, sigma=0.4, shared=0.9, seed=3)
        rules = StepRules(placement=Placement(4), microbatches=8, schedule=base, limit=6)
        costs = WorkloadCosts(workload, rules.placement)
        found = Planned(base=base, evaluations=60).plan(rules, costs)
        own = dataclasses.replace(rules, schedule=found.order)
        for stage in range(4):
            assert own.backward_kinds(stage) == rules.backward_kinds(stage)
            planned_order(found.order, stage, rules.placement, 8, False)
        assert found.makespan <= simulate(rules, costs).makespan + 1e-9
        assert simulate(own, costs).makespan == found.makespan

    def test_a_negative_number_of_simulations_is_refused(self):
        with pytest.raises(ValueError, match="evaluations=-1"):
            Planned(evaluations=-1)


class TestTraining:
    @pytest.mark.slow(reason="9 s: it measures three steps")
    def test_first_the_base_then_what_was_measured(self):
        trainer = toy.trainer(2, data=mixed, schedule=Planned(base=OneFOneB(), evaluations=20))
        reports = list(trainer.steps(4))
        first = [OneFOneB().order(stage, Placement(2), 8) for stage in range(2)]
        assert orders(reports[0]) == first and reports[0].planning_seconds is None
        assert "planned" not in str(reports[0])
        for report in reports[1:]:
            assert 0 < report.planning_seconds < report.wall_seconds and report.predicted_seconds > 0
            assert report.as_dict()["planning_seconds"] == report.planning_seconds
            assert str(report).endswith(f"planned in {report.planning_seconds:.1f} s")
        plain = toy.trainer(2, data=mixed, schedule="1f1b")
        assert [r.loss for r in plain.steps(4)] == [r.loss for r in reports]
        assert trainer.evaluate(mixed).loss == plain.evaluate(mixed).loss

    @pytest.mark.slow(reason="several steps are measured")
    @pytest.mark.parametrize("base", [BF(), BFW()], ids=["BF", "BFW"])
    def test_by_a_file_from_the_first_step_on(self, file, base):
        schedule = f"planned:{file}" if base == BF() else Planned(base=base, costs=str(file))
        trainer = toy.trainer(4, data=mixed, schedule=schedule, activation_budget=BUDGET)
        trainer.start()
        reports = list(trainer.steps(3))
        tight = False
        for report in reports:
            own = buckets(mixed(report.step))
            workload = read_costs(file, "").workload([bucket_name(bucket) for bucket in own])
            costs = WorkloadCosts(workload, Placement(4))
            rules = StepRules(placement=Placement(4), microbatches=8, schedule=base)
            budgets = trainer._engine.memory.of_step(rules, own).budgets
            found = Planned(base=base).plan(rules, costs, budgets)
            assert orders(report) == list(map(list, found.order.rows))
            assert report.predicted_seconds == found.makespan
            assert max(report.peak_bytes) <= BUDGET
            tight |= Planned(base=base).plan(rules, costs).makespan < found.makespan
        assert tight

    def test_a_table_that_lacks_a_bucket_or_a_stage_is_refused_at_start(self, tmp_path):
        own = table()
        few = CostTable(dict(list(own.buckets.items())[:1]))
        (known,) = few.buckets
        with pytest.raises(rrfp.UsageError, match=rf"the bucket labels .*; it has {re.escape(known)}: "):
            toy.trainer(4, data=mixed, schedule=Planned(costs=few)).start()
        with pytest.raises(rrfp.UsageError, match="the workload has 4 stages, the placement 2"):
            toy.trainer(2, data=mixed, schedule=Planned(costs=own)).start()

    @pytest.mark.slow(reason="two Trainers that measure")
    def test_what_a_run_has_measured_can_be_given_to_the_next(self, tmp_path):
        trainer = toy.trainer(2, data=mixed)
        trainer.write_costs(tmp_path / "none.json")
        assert not (tmp_path / "none.json").exists()
        list(trainer.steps(2))
        trainer.write_costs(tmp_path / "costs.json")
        assert len(read_costs(tmp_path / "costs.json", "").buckets) == 3
        (report,) = toy.trainer(2, data=mixed, schedule=f"planned:{tmp_path}/costs.json").steps(1)
        assert report.planning_seconds > 0


def test_the_simulator_refuses_it_as_an_object():
    with pytest.raises(rrfp.UsageError, match=r"Planned\(.*or planned"):
        rrfp.simulate("log-normal", Planned())


def test_nothing_is_compiled_for_a_plan():
    planned = Planned(base=BFW(), evaluations=20)
    trainer = toy.trainer(2, data=lambda step: toy.microbatches(6), schedule=planned)
    list(trainer.steps(1))
    with compilations() as compiled:
        reports = list(trainer.steps(3))
    assert compiled == [] and all(report.planning_seconds for report in reports)
