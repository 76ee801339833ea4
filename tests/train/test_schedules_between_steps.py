"""Schedules by name, from files, and set between steps."""

import re

import numpy as np
import pytest

import rrfp_jax as rrfp
from benchmarks.orders import write_csv
from rrfp_jax.core.hints import Ranked
from rrfp_jax.core.orders import GPipe, OneFOneB
from rrfp_jax.core.schedules import name_of
from rrfp_jax.core.tasks import Placement
from rrfp_jax.core.v_orders import ZBV
from rrfp_jax.runtime.programs import segments
from rrfp_jax.runtime.programs.compiler import Compiler
from rrfp_jax.runtime.programs.stage_programs import StagePrograms
from rrfp_jax.train.named import read_schedule, schedule_of
from tests.support import toy


def test_the_schedule_may_be_set_by_name_between_steps(trainer):
    trainer.schedule = "gpipe"
    assert trainer.schedule == GPipe()
    assert np.isfinite(next(trainer.steps(1)).loss)
    with pytest.raises(rrfp.UsageError, match="no such schedule"):
        trainer.schedule = "zb"
    trainer.schedule = "bf"


def test_the_schedule_may_change_between_steps_to_one_that_splits():
    trainer = toy.trainer(2)
    trainer.step(toy.microbatches())
    for schedule in ("bfw", "zb-h1", rrfp.schedules.Ranked(OneFOneB())):
        trainer.schedule = schedule
        trainer.step(toy.microbatches())
    assert trainer.steps_done == 4


@pytest.mark.slow(reason="a Trainer of its own")
def test_a_schedule_for_another_placement_is_refused_also_between_steps():
    trainer = toy.trainer(2)
    trainer.step(toy.microbatches())
    trainer.schedule = "zb-v"
    with pytest.raises(rrfp.UsageError, match="2 chunks a stage"):
        trainer.step(toy.microbatches())


def test_nothing_is_compiled_again_after_a_step_of_another_kind(monkeypatch):
    trainer, batch = toy.trainer(2, schedule="bfw"), toy.microbatches(4)
    trainer.step(batch)
    trainer.evaluate(batch)
    monkeypatch.setattr(Compiler, "__call__", lambda *args, **kwargs: pytest.fail("compiled"))
    monkeypatch.setattr(segments, "differentiate", lambda *args: pytest.fail("traced"))
    monkeypatch.setattr(StagePrograms, "of", lambda *args, **kwargs: pytest.fail("put in a row"))
    trainer.step(batch[:3])
    trainer.evaluate(batch)


@pytest.mark.slow(reason="a Trainer of its own")
def test_a_schedule_that_does_not_split_holds_no_more_after_one_that_does():
    trainer = toy.trainer(2, schedule="bf")
    kinds = []
    for schedule in ("bf", "bfw", "bf"):
        trainer.schedule = schedule
        trainer.step(toy.microbatches())
        (programs,) = trainer._engine.library.all_programs("train")
        kinds.append([set(part.tasks) for stage in programs.values() for part in stage])
    assert kinds[0] == kinds[2] != kinds[1]


GOOD = ["0F0,0F1,0B0,0B1", "1F0,,1B0,1F1,1B1"]


@pytest.fixture
def file(tmp_path):
    def write(rows):
        (tmp_path / "order.csv").write_text("\n".join(rows), encoding="utf-8")
        return f"csv:{tmp_path}/order.csv"

    return write


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([GOOD[0], "1F0,1B0,1F1"], "stage 1: B1 is missing"),
        ([GOOD[0], "1F0,1B0,1F1,1B1,1F1"], "stage 1: F1 is there twice"),
        ([GOOD[0], "1B0,1F0,1F1,1B1"], "stage 1: B0 stands before F0, which it needs"),
        ([GOOD[0], "1F0,1I0,1F1,1B1"], "stage 1: W0 is missing"),
        ([GOOD[0], "1F0,1W0,1I0,1F1,1B1"], "stage 1: W0 stands before I0"),
        ([GOOD[0], "1F0,1B0,1I0,1W0,1F1,1B1"], "stage 1: B0 does not belong there"),
        (["0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"], "must deadlock: stage 0 waits for B0"),
        ([GOOD[0], "1F0,1B0,1X1"], "line 2, cell 3: '1X1' is no task"),
        ([GOOD[0], "0F0"], "line 2, cell 1: 0F0"),
        ([], "holds no tasks"),
    ],
)
def test_a_bad_file_is_refused_by_its_name_and_place(file, rows, said):
    name = file(rows)
    with pytest.raises(rrfp.UsageError) as error:
        schedule_of(name)
    assert str(error.value).startswith(f"{name}: ") and said in str(error.value)


def test_a_file_that_is_not_there():
    with pytest.raises(rrfp.UsageError, match=r"csv:no\.csv: cannot be read: No such file"):
        schedule_of("csv:no.csv")


def test_orders_that_differ_differ_in_text(file):
    texts = {repr(schedule_of(file(rows))) for rows in (GOOD, [GOOD[0], "1F0,1F1,1B0,1B1"], GOOD)}
    assert len(texts) == 2


def test_a_trainer_follows_it(file):
    name = file(write_csv(OneFOneB(), Placement(2), 5).splitlines())
    report = toy.trainer(2, schedule=name).step(toy.microbatches())
    planned = [[str(task) for task in OneFOneB().order(stage, Placement(2), 5)] for stage in range(2)]
    records = sorted(report.trace.records, key=lambda record: record.dispatched)
    assert [[str(r.task) for r in records if r.stage == stage] for stage in range(2)] == planned


def test_a_trainer_refuses_what_is_for_other_sizes_and_what_must_deadlock(file):
    with pytest.raises(rrfp.UsageError, match=r"and 2 microbatches, not for .* and 5"):
        toy.trainer(2, schedule=file(GOOD))

    class Backwards(GPipe):
        def order(self, stage, placement, microbatches):
            order = super().order(stage, placement, microbatches)
            return [*order[4::-1], *order[5:]] if stage else [order[0], order[5], *order[1:5], *order[6:]]

    with pytest.raises(rrfp.UsageError, match="Backwards must deadlock: stage 0 waits for B0"):
        toy.trainer(2, schedule=Backwards())


def test_planned_without_the_file_that_its_colon_promises():
    with pytest.raises(rrfp.UsageError, match="schedule='planned:': no file of costs is named"):
        read_schedule("planned:")


class TestRankings:
    def test_by_name(self, file):
        name = file(GOOD)
        assert schedule_of("ranked:zb-v") == Ranked(ZBV())
        assert schedule_of(f"ranked:{name}") == Ranked(schedule_of(name))
        assert name_of(Ranked(ZBV())) == "ranked:zb-v"

    @pytest.mark.parametrize(
        ("name", "said"),
        [("ranked:bf", "bf ranks what is ready already"), ("ranked:bv", "no such schedule or hint")],
    )
    def test_refused(self, name, said):
        with pytest.raises(rrfp.UsageError, match=said):
            schedule_of(name)

    @pytest.mark.slow(reason="5 s: a Trainer of its own")
    @pytest.mark.parametrize("bounds", [{}, {"max_in_flight": 1}, {"activation_budget": "least"}], ids=str)
    def test_the_bits_are_those_of_the_order(self, bounds):
        """Also where the order does not fit the limit."""
        if "activation_budget" in bounds:
            with pytest.raises(rrfp.UsageError) as error:
                toy.trainer(2, schedule="ranked:zb-v", activation_budget=1).step(toy.microbatches())
            least = re.search(r"at least activation_budget=(\d+)", str(error.value))
            bounds = {"activation_budget": int(least.group(1))}
        followed = toy.trainer(2, schedule="zb-v")
        ranked = toy.trainer(2, schedule="ranked:zb-v", **bounds)
        for _ in range(2):
            reports = [trainer.step(toy.microbatches()) for trainer in (followed, ranked)]
            assert reports[0].loss == reports[1].loss and reports[0].gradient_norm == reports[1].gradient_norm
