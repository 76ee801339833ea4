"""What microbatches take, budgets that hold whatever the delays, and the ledger against what is live."""

import dataclasses
import random

import jax
import msgspec
import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.footprint import (
    MOST_EARLY,
    arrival,
    costs,
    early_bytes,
    least_room,
    order_peaks,
    step_budgets,
)
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement
from rrfp_jax.runtime.engine.pacing import ArrivalDelays
from rrfp_jax.runtime.stages.memory import (
    MARGIN,
    BucketLedger,
    Memory,
    StageLedger,
    memory_of_step,
    parse_setting,
)
from tests.support import toy
from tests.verification import budget_runs
from tests.verification.exploration.cases import Memory as Counted
from tests.verification.exploration.cases import drawn, footprints_of
from tests.verification.exploration.space import Case, explore
from tests.verification.exploration.visits import Violation
from tests.verification.memory import Inspection, InTurns

SLICE, RUNS = 80, 100
EARLY = [seed for seed in range(SLICE) if drawn(seed).early]


@pytest.fixture(scope="module")
def cases():
    return [case for seed in range(SLICE) if not (case := drawn(seed)).early]


def without_base(microbatches):
    """What they cost, by chunk, with the arrival at the first chunk."""
    charged = [list(own) for own in zip(*map(costs, microbatches), strict=True)]
    charged[0] = [cost + arrival(chunks) for cost, chunks in zip(charged[0], microbatches, strict=True)]
    return charged


class Most:
    """Notes the most that each stage holds in any state."""

    def __init__(self, memory):
        self.memory, self.most = memory, [0] * len(memory.rooms)

    def check(self, seen, early):
        self.memory.check(seen, early)
        self.most = [max(most, self.memory.held(seen, s, early)) for s, most in enumerate(self.most)]


class TestEveryState:
    """Small random steps, all interleavings; bytes are counted by the exploration, not by the core."""

    def test_no_stage_holds_more_than_it_has_room_for(self, cases):
        full = 0
        for case in cases:
            most = Most(case.memory)
            assert explore(dataclasses.replace(case, memory=most)).whole
            full += any(m == room for m, room in zip(most.most, case.memory.rooms, strict=True))
        assert full > SLICE / 10  # the argument gives nothing away

    @pytest.mark.slow(reason="the test above has what holds")
    def test_what_comes_early_must_be_reserved(self, cases):
        """Costs in full, but nothing for messages of microbatches that are not admitted."""
        broken = 0
        for case in cases[:60]:
            memory = case.memory
            budgets = tuple(
                Budget(without_base([own[b] for b in memory.buckets]), room)
                for own, room in zip(memory.footprints, memory.rooms, strict=True)
            )
            try:
                explore(dataclasses.replace(case, budgets=budgets))
            except Violation as violation:
                assert "where there is room for" in str(violation)
                broken += 1
        assert broken > 0

    @pytest.mark.parametrize(
        "seeds",
        [EARLY[:3], pytest.param(EARLY[3:], marks=pytest.mark.slow(reason="15 s: many more states"))],
        ids=["few states", "many"],
    )
    def test_early_tasks_have_room_and_need_it(self, seeds):
        broken = 0
        for case in map(drawn, seeds):
            assert explore(case).whole
            memory = case.memory
            used = [[own[b] for b in set(memory.buckets)] for own in memory.footprints]
            rooms = [room - early_bytes(own) for room, own in zip(memory.rooms, used, strict=True)]
            try:
                explore(dataclasses.replace(case, memory=dataclasses.replace(memory, rooms=rooms)))
            except Violation as violation:
                assert "where there is room for" in str(violation)
                broken += 1
        assert broken > 0

    @pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "dualpipe-v"])
    def test_fixed_orders_stay_within_their_peaks(self, name):
        schedule, full = by_name(name), 0
        for seed in range(6):
            draw = random.Random(seed)
            placement = schedule.placement_for(2, 2)
            buckets = [draw.randrange(2) for _ in range(2 if placement.chunks > 1 else 3)]
            footprints = list(footprints_of(draw, placement))
            orders = [schedule.order(stage, placement, len(buckets)) for stage in range(2)]
            peaks = order_peaks(orders, footprints, buckets)
            rules = StepRules(placement=placement, microbatches=len(buckets), schedule=schedule)
            most = Most(Counted(placement, footprints, buckets, peaks))
            assert explore(Case(rules=rules, memory=most)).whole
            full += any(m == peak for m, peak in zip(most.most, peaks, strict=True))
            if seed == 0:
                used = [[own[bucket] for bucket in set(buckets)] for own in footprints]
                rooms = [peak + early_bytes(own) for peak, own in zip(peaks, used, strict=True)]
                counted = Counted(placement, footprints, buckets, rooms)
                assert explore(Case(rules=rules, memory=counted, early=MOST_EARLY)).whole
        assert full or placement.chunks > 1  # with several chunks the peak is an upper bound


@pytest.mark.slow(reason="hundreds of random steps")
def test_random_steps_of_the_driver_keep_their_budgets():
    """A slice of `python -m tests.verification.budget_runs`."""
    full = 0
    for seed in range(RUNS):
        step = budget_runs.drawn(seed)
        peaks = step.run().peaks
        assert all(peak <= total for peak, total in zip(peaks, step.totals, strict=True)), seed
        full += any(peak == total for peak, total in zip(peaks, step.totals, strict=True))
    assert full > 0


class TestStepBudgets:
    def test_any_room_is_enough_that_is_enough_for_one(self):
        for seed in range(100):
            draw = random.Random(seed)
            placement = Placement(draw.randint(1, 4), draw.randint(1, 2))
            footprints = list(footprints_of(draw, placement))
            buckets = [draw.randrange(2) for _ in range(draw.randint(1, 20))]
            rooms = [least_room([own[b] for b in set(buckets)]) for own in footprints]
            roomy = [room + draw.randint(0, 30) for room in rooms]
            for budget in step_budgets(roomy, footprints, buckets):
                assert max(map(sum, zip(*budget.costs, strict=True))) <= budget.limit
                assert budget.most is None or budget.most >= 1
            short = draw.randrange(len(rooms))
            rooms[short] -= 1
            if placement.stages > 1 or rooms[0] >= 0:
                with pytest.raises(ValueError, match="one microbatch at a time needs"):
                    step_budgets(rooms, footprints, buckets)

    def test_no_limit_no_budget(self):
        footprints = list(footprints_of(random.Random(0), Placement(3)))
        assert step_budgets([None] * 3, footprints, [0, 1, 0]) == [None] * 3


def ledger(stage, device="a", limit=None, held=100, message=10):
    """A stage's of two: each microbatch holds 100 bytes and sends messages of 10."""
    first = stage == 0
    (footprint,) = next(footprints_of(random.Random(0), Placement(1)))[0]
    own = dataclasses.replace(
        footprint,
        activation_in_bytes=0 if first else message,
        activation_out_bytes=message if first else 0,
        gradient_in_bytes=message if first else 0,
        gradient_out_bytes=0 if first else message,
        held_after_forward_bytes=held,
        held_after_input_bytes=0,
        dropped_bytes={"F": 7, "B": 50},
    )
    return StageLedger(
        device=device,
        rank=0,
        layers=[(0, 1)],
        parameters=1,
        weight_bytes=1000,
        optimizer_bytes=2000,
        accumulator_bytes=1000,
        parked_gradient_bytes=4000,
        slot_bytes=0,
        device_limit_bytes=limit,
        compile_seconds=0.0,
        buckets={"x": BucketLedger(data_bytes=5, prepared_bytes=40, chunks=[own])},
    )


def rules_of(name="bf", microbatches=8):
    return StepRules(placement=Placement(2), microbatches=microbatches, schedule=by_name(name))


class TestBudgetsOfSteps:
    def test_the_smallest_that_works_is_named(self):
        ledgers = [ledger(0), ledger(1, "b")]
        with pytest.raises(
            rrfp.UsageError, match=r"stage 0 has 100 bytes.*needs 160.*50 bytes of them"
        ) as said:
            memory_of_step(100, ledgers, rules_of(), ["x"] * 8)
        least = int(str(said.value).split("activation_budget=")[2].split(",")[0])
        memory = memory_of_step(least, ledgers, rules_of(), ["x"] * 8)
        assert all(sum(budget.costs[0][:2]) > budget.limit for budget in memory.budgets)  # one at a time
        with pytest.raises(rrfp.UsageError):
            memory_of_step(least - 1, ledgers, rules_of(), ["x"] * 8)

    def test_stages_that_share_a_device_share_its_bytes(self):
        apart = memory_of_step(1050, [ledger(0), ledger(1, "b")], rules_of(), ["x"] * 8)
        shared = memory_of_step(1050, [ledger(0), ledger(1)], rules_of(), ["x"] * 8)
        assert (apart.totals, shared.totals) == ([1050, 1050], [550, 550])  # 50 for programs, once

    def test_replicas_that_share_devices_share_their_bytes(self):
        ledgers = [ledger(0), ledger(1, "b"), ledger(0, "c"), ledger(1, "a")]
        found = [memory_of_step(1050, ledgers, rules_of(), ["x"] * 16, replica=d).totals for d in range(2)]
        assert found == [[550, 1050], [1050, 550]]

    @pytest.mark.parametrize("schedule", ["bf", "gpipe"])
    def test_tasks_are_early_where_there_is_room_and_inputs_can_be_foreseen(self, schedule):
        ledgers, rules = [ledger(0), ledger(1, "b")], rules_of(schedule)
        beside = max(early_bytes([own.buckets["x"].chunks]) for own in ledgers)
        usual = 50 + beside + (8 if schedule == "gpipe" else 4) * (100 + 10)
        assert beside == MOST_EARLY * (10 + 10)  # two inputs, and two messages of either way
        for total, early in ((usual, MOST_EARLY), (usual - 1, 0)):
            assert memory_of_step(total, ledgers, rules, ["x"] * 8).early == early
        apart = [ledgers[0], dataclasses.replace(ledgers[1], rank=1)]
        memory = memory_of_step(usual, apart, rules, ["x"] * 8)
        assert memory.early == 0 and all(b is None or b.limit >= usual - 50 - 40 for b in memory.budgets)

    def test_auto_is_what_the_device_has_left(self):
        limit = 20_000
        memory = memory_of_step("auto", [ledger(0, limit=limit), ledger(1, "b")], rules_of(), ["x"] * 8)
        assert memory.totals == [int(limit * (1 - MARGIN)) - 8000 - 40 - 8 * 5, None]
        assert memory.budgets[1] is None
        with pytest.raises(rrfp.UsageError, match=r"activation_budget=auto: stage 0 has .* another device"):
            memory_of_step("auto", [ledger(0, limit=8000), ledger(1, "b")], rules_of(), ["x"] * 8)

    def test_a_fixed_order_that_holds_more_is_refused(self):
        ledgers = [ledger(0), ledger(1, "b")]
        peak = 8 * (100 + 10) + 50  # GPipe holds all of them on stage 0
        assert memory_of_step(peak, ledgers, rules_of("gpipe"), ["x"] * 8).budgets == [None, None]
        with pytest.raises(rrfp.UsageError, match=rf"GPipe holds up to {peak} .*stage 0.* bf, which keeps"):
            memory_of_step(peak - 1, ledgers, rules_of("gpipe"), ["x"] * 8)
        assert memory_of_step(2 * 110 + 50, ledgers, rules_of("1f1b"), ["x"] * 8).totals == [270, 270]

    def test_ledgers_are_plain_data(self):
        assert msgspec.convert(ledger(0).plain(), StageLedger) == ledger(0)


@pytest.mark.parametrize(
    ("given", "bytes"),
    [
        ("2GiB", 2**31),
        ("512 MiB", 2**29),
        ("1.5kB", 1500),
        ("77", 77),
        (77, 77),
        ("auto", "auto"),
        (None, None),
    ],
)
def test_sizes_as_users_write_them(given, bytes):
    assert parse_setting(given) == bytes


@pytest.mark.parametrize("given", ["lots", "2 GiBs", "-1GiB", 0, True, 1.5, "nan", ""])
def test_sizes_that_are_none(given):
    with pytest.raises(rrfp.UsageError, match=r"activation_budget=.*'2GiB'"):
        parse_setting(given)


@pytest.fixture(scope="module")
def compiled():
    trainer = toy.trainer(2, data=toy.microbatches(1), schedule="bf", max_in_flight=8)
    trainer.start()
    return trainer


@pytest.fixture
def trainer(compiled):
    """Two stages; its driver and its budget may be tampered with."""
    engine, driver = compiled._engine, compiled._engine.driver
    before = engine.memory, driver.local
    yield compiled
    engine.memory, driver.local = before
    engine._known = driver.delays = None
    driver.scheduler = StageScheduler
    vars(driver).pop("run", None)


def budgeted_by(trainer, setting):
    """A trainer from now on within a budget."""
    engine = trainer._engine
    engine.memory, engine._known = Memory(setting, engine.layout, engine.library), None
    rules = trainer._stepper.rules(1, "train")
    engine.memory.start(list(engine.stages.values()), engine.optimizers, rules, dict)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_the_count_is_what_is_live(trainer, split):
    """To the byte, at rest; and with what a program takes and gives, or a message, it comes to the peak."""
    trainer.schedule = InTurns(split)
    trainer.step(toy.microbatches(1))  # compiles
    step = Inspection(trainer, trainer.start(), 4)
    moments = step.at_rest
    assert {moment.stage for moment in moments} == {0, 1}
    assert max(moment.of_microbatches for moment in moments) > 4000
    for moment in moments:
        assert moment.found == moment.of_microbatches, moment
    for stage, peak in enumerate(step.report.peak_bytes):
        most = max(moment.found for moment in step.under_way if moment.stage == stage)
        assert most == peak


@pytest.mark.parametrize("schedule", ["bf", "bfw"])
def test_training_keeps_its_budget(trainer, schedule):
    """With arrivals out of order, and microbatches of two sizes."""
    trainer.schedule = schedule
    batch = [mb for length in (8, 4) for mb in toy.microbatches(4, length=length)]
    batch = batch[::2] + batch[1::2]
    trainer.step(batch)
    budgeted_by(trainer, 1)
    with pytest.raises(rrfp.UsageError, match="activation_budget=1: stage") as said:
        trainer.step(batch)
    least = int(str(said.value).split("at least activation_budget=")[1].split(",")[0])
    draw = random.Random(0)
    trainer._engine.driver.delays = ArrivalDelays(lambda _, now: (now + draw.uniform(0, 3e-3), 0.0))
    for extra in (1.0, 1.7):
        budgeted_by(trainer, int(extra * least))
        report = trainer.step(batch)
        pairs = list(zip(report.peak_bytes, report.budget_bytes, strict=True))
        assert all(0 < peak <= total == int(extra * least) for peak, total in pairs)
        assert report.as_dict()["peak_bytes"] == list(report.peak_bytes)


def test_a_trainer_refuses_what_cannot_be_at_start(trainer):
    small = toy.trainer(2, data=toy.microbatches(1), activation_budget="1kB")
    with pytest.raises(rrfp.UsageError, match=r"activation_budget=1000: stage .* has 1,000 bytes"):
        small.start()
    with pytest.raises(rrfp.UsageError, match="activation_budget='much'"):
        toy.trainer(2, activation_budget="much")


def test_ledgers_are_of_all_replicas():
    """Stage 1 of replica 1 is where stage 0 of both is."""
    mesh = rrfp.Mesh(pp=2, tp=(1, 2), dp=2, share_devices=True)
    trainer = toy.trainer(mesh=mesh, data=toy.microbatches(2))
    assert len(trainer.start()) == 2
    places = [row.device for row in trainer._engine.memory.ledgers()]
    assert places == [str(jax.devices()[number]) for number in (0, 2, 0, 0)]
