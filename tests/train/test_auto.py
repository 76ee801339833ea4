"""`schedule="auto"`: predicted before the first step, exchanged by what was measured, equal to the bit."""

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.schedules import by_name, name_of
from rrfp_jax.core.step_rules import Budget, StepRules, bucket_name
from rrfp_jax.core.tasks import WEIGHT
from rrfp_jax.data.contract import InMemory, buckets_of
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.stages.memory import StepMemory
from rrfp_jax.schedules import Auto
from rrfp_jax.sim.choice import CANDIDATES
from rrfp_jax.sim.engine import simulate
from rrfp_jax.trace.costs import CostTable, WorkloadCosts, constant
from rrfp_jax.trace.records import RecordedStep
from rrfp_jax.train import tuning
from rrfp_jax.train.tuning import HintExchange
from tests.support import toy

MICROBATCHES = 8


def data(step):
    return toy.microbatches(MICROBATCHES, seed=step)


def auto(*names, **kwargs):
    return Auto(candidates=names or CANDIDATES, **kwargs)


class TestBeforeTheFirstStep:
    def test_hint_and_placement_are_chosen_and_told(self, capfd):
        trainer = toy.trainer(2, data=data, schedule="auto")
        told = capfd.readouterr().out
        assert told.startswith(f"schedule auto: {name_of(trainer.schedule)}: ") and told.count("\n") == 1
        assert "; predicted in " in told and name_of(trainer.schedule) in CANDIDATES
        assert trainer._engine.placement == trainer.schedule.placement_for(2)
        assert trainer._stepper.exchange is not None

    def test_a_v_with_the_split_that_is_given(self):
        sizes = [1, 3, 2, 2]
        trainer = toy.trainer(2, data=data, schedule=auto("ranked:v-half", exchange=False), split=sizes)
        assert [[len(own) for own in chunks] for chunks in trainer._engine.chunks] == [[1, 2], [3, 2]]
        assert trainer._stepper.exchange is None

    @pytest.mark.slow(reason="a Trainer of its own")
    def test_what_does_not_fit_is_left_out(self, capfd):
        """Eight layers are too few for two chunks on each of five stages."""
        trainer = toy.trainer(5, data=data, schedule="auto", mesh=rrfp.Mesh(pp=5, share_devices=True))
        assert trainer._engine.placement.chunks == 1
        trainer = toy.trainer(2, data=data, schedule=auto("ranked:zb-v", "bf"), split="auto")
        assert sum(len(own) for chunks in trainer._engine.chunks for own in chunks) == toy.BLOCKS + 2
        capfd.readouterr()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"data": None}, "goes by the shapes of a first step: give Trainer"),
            ({"activation_budget": 1}, "no hint can run: bf: activation_budget=1: stage 0 has 1 bytes"),
            ({"split": [1, 2, 3]}, r"no hint can run: bf: split.*; ranked:zb-v: split"),
            ({"split": "auto", "mesh": rrfp.Mesh(pp=2, dp=2)}, "split='auto' with tp=1, dp=2"),
        ],
    )
    def test_refusals(self, arguments, said):
        with pytest.raises(rrfp.UsageError, match=said):
            toy.trainer(2, **{"data": data, "schedule": auto("bf", "ranked:zb-v")} | arguments)


class TestExchange:
    """What measured costs say, without a model."""

    def chosen(self, present, names, limit=None, budgets=None, looks=0):
        hint = by_name(present)
        placement = hint.placement_for(4)
        rules = StepRules(placement=placement, microbatches=8, schedule=hint, limit=limit)
        trace = simulate(rules, WorkloadCosts(constant(4, 8, 1.0), placement))
        engine = SimpleNamespace(
            world=World(),
            memory=SimpleNamespace(of_step=lambda rules, buckets: StepMemory((), budgets, 0)),
            prepare=lambda buckets, rules: None,
        )
        buckets = buckets_of(InMemory(toy.microbatches(8)).plan(0))
        name = bucket_name(buckets[0])
        earlier = [RecordedStep(trace=trace, rules=rules, buckets=[name] * 8)]
        exchange = HintExchange(auto(*names))
        for _ in range(looks):
            exchange.due()
        return name_of(exchange.chosen(7, rules, buckets, earlier, engine))

    def test_another_hint_that_gains(self, capfd):
        assert self.chosen("ranked:zb-v", ("ranked:zb-v", "ranked:v-min"), limit=2) == "ranked:v-min"
        told = capfd.readouterr().out
        assert told.startswith("schedule auto: from step 7 on ranked:v-min: ") and told.count("\n") == 1
        assert "ranked:zb-v" in told and "; measured, chosen in 0." in told

    def test_nothing_is_said_where_it_stays(self, capfd):
        assert self.chosen("ranked:zb-v", ("ranked:v-min", "ranked:zb-v")) == "ranked:zb-v"
        assert self.chosen("bf", ("bf",)) == "bf"
        assert capfd.readouterr().out == ""

    def test_only_hints_with_the_programs_that_are_there(self):
        """On one chunk BF splits no backward: that BFW would be faster is not known."""
        assert self.chosen("bf", ("bfw", "ranked:zb-h2", "fb")) == "bf"

    def test_it_is_said_once_that_no_other_has_these_programs(self, capfd):
        for looks in (1, 2):
            assert self.chosen("bf", ("bf", "bfw", "ranked:zb-v"), looks=looks) == "bf"
        assert self.chosen("ranked:zb-v", ("ranked:zb-v", "ranked:v-min", "bfw"), looks=1)
        told = capfd.readouterr().out
        assert told == "schedule auto: bf stays: no other has its placement, its programs, and room\n"

    def test_budgets_count(self):
        budgets = [Budget([[1] * 8] * 2, 4)] * 4
        assert self.chosen("ranked:zb-v", ("ranked:v-min",), budgets=budgets) == "ranked:v-min"

    def test_looked_at_ever_more_seldom(self):
        own = HintExchange(auto())
        assert [done for done in range(1, 40) if own.due()] == [1, 2, 4, 8, 16, 32]


class TestTraining:
    @pytest.mark.slow(reason="4 s: two Trainers")
    def test_an_exchange_changes_no_bit(self, monkeypatch, capfd):
        """Costs that leave no room to wait: V-Min takes over from ZB-V, and parameters stay what they are."""
        (bucket,) = set(buckets_of(InMemory(data(0)).plan(0)))
        one = CostTable({bucket_name(bucket): constant(4, 1, 1.0)})
        monkeypatch.setattr(tuning, "measured", lambda steps: one)
        trainer = toy.trainer(4, data=data, schedule="ranked:zb-v", max_in_flight=2)
        trainer.start()
        optimizers = trainer._engine.optimizers
        start = jax.device_get([(own.stages[0].leaves, own.state) for own in optimizers])
        found = []
        for names in (("ranked:zb-v",), ("ranked:zb-v", "ranked:v-min")):
            for own, values in zip(optimizers, start, strict=True):
                own.stages[0].leaves, own.state = jax.device_put(values, own.stage_mesh.device)
            trainer.schedule, trainer._stepper.steps_done = auto(*names), 0
            losses = [report.loss for report in trainer.steps(4)]
            found.append((losses, jax.device_get(trainer.stage_params), name_of(trainer.schedule)))
        (losses, params, stayed), (other_losses, other_params, taken) = found
        assert (stayed, taken) == ("ranked:zb-v", "ranked:v-min")
        assert losses == other_losses
        jax.tree.map(np.testing.assert_array_equal, params, other_params)
        assert capfd.readouterr().out.count("schedule auto: from step 0 on ranked:v-min") == 1

    @pytest.mark.parametrize("rank", [0, 1])
    def test_all_processes_ask_alike_what_programs_need(self, monkeypatch, rank):
        """There are none yet for the schedule that was set just before, so budgets are not known."""
        trainer = toy.trainer(2, data=data, activation_budget=10**8)
        trainer.start()
        list(trainer.steps(1))
        trainer.schedule = "bfw"
        trainer.schedule = auto("bfw", "fb")
        asked, exchange = [], HintExchange.chosen

        def gather(what, value, *_):
            asked.append(what)
            return [value or ["bfw", ""]]

        def chosen(*arguments):
            *others, engine = arguments
            world = SimpleNamespace(rank=rank, gather=gather)
            world.decide = partial(World.decide, world)
            own = SimpleNamespace(world=world, memory=engine.memory, prepare=engine.prepare)
            with monkeypatch.context() as patched:
                patched.setattr(engine.world, "gather", gather)
                return exchange(*others, own)

        monkeypatch.setattr(HintExchange, "chosen", chosen)
        list(trainer.steps(1))
        assert asked == ["the ledgers of all stages", "the schedule from step 1 on"]
        (programs,) = trainer._engine.library.all_programs("train")
        assert WEIGHT in programs[1][0].tasks

    def test_set_between_steps(self):
        trainer = toy.trainer(2, data=data, schedule="bfw")
        trainer.schedule = "auto"
        assert name_of(trainer.schedule) == "bfw"
        trainer.schedule = "bf"
        assert trainer._stepper.exchange is None
        with pytest.raises(rrfp.UsageError, match="is chosen when a Trainer is made"):
            trainer.schedule = rrfp.schedules.Auto(exchange=False)
        several = toy.trainer(data=data, mesh=rrfp.Mesh(pp=1, dp=2))
        with pytest.raises(rrfp.UsageError, match="between steps with dp=2"):
            several.schedule = "auto"
