"""What a sentence says of steps that were spoilt in one known way, and shares that add up."""

from dataclasses import replace

import pytest

from rrfp_jax.report.causes import Saving, main_cause
from rrfp_jax.report.explanation import TimedStep, as_text, explain
from rrfp_jax.report.legend import SHARES
from rrfp_jax.sim.splits import Layers, Recut
from rrfp_jax.studies.disturbances import Disturbed
from rrfp_jax.trace.costs import WorkloadCosts
from rrfp_jax.trace.layers import LayerWork, Work
from rrfp_jax.trace.records import Part
from tests.support.spoilt import EVEN, MICROBATCHES, STAGES, Straggler, ran, rows, rules, spoilt


class JitteryStage(Disturbed):
    """One stage's tasks are delayed now and then."""

    def duration(self, stage, task):
        own = self.inner.duration(stage, task)
        return own * 3 if stage == 1 and task.microbatch % 4 == 3 else own


class TwoSlow(Disturbed):
    """Two stages are slow."""

    def duration(self, stage, task):
        return self.inner.duration(stage, task) * (1.8 if stage in (0, 2) else 1.0)


COSTS = WorkloadCosts(EVEN, rules().placement)
LATE = WorkloadCosts(
    replace(EVEN, transfer_forward=rows([15e-3] * STAGES), transfer_backward=rows([15e-3] * STAGES)),
    rules().placement,
)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (spoilt("stage")[0], "Stage 2 computes 1.60 times as long as the others: "),
        (spoilt("link")[0], "The link from stage 1 to 2 is slow (40.0 ms a message, the others 1.0 ms): "),
        (spoilt("lengths")[0], "Microbatches have unequal lengths: "),
        (spoilt("jitter")[0], "Tasks of equal lengths take unequal times on all stages: "),
        (ran(JitteryStage(COSTS)), "Tasks of equal lengths take unequal times on stage 1: "),
        (ran(LATE, limit=None), "Transfers take long on all links: "),
        (ran(TwoSlow(COSTS)), "Stages compute unequally long: "),
        (ran(LATE, limit=2), "The limit of 2 microbatches in flight holds forwards back: "),
        (ran(COSTS, limit=8), "No single cause stands out: stages compute "),
    ],
    ids=["stage", "link", "lengths", "jitter", "one stage's jitter", "links", "stages", "limit", "nothing"],
)
def test_the_first_sentence_names_the_cause(step, said):
    found = explain([TimedStep(recorded=step, wall_seconds=1.02 * step.trace.makespan)] * 2)
    assert found.sentence.startswith(said)
    largest = found.savings[0]
    told = f" Of all changes tried, the largest saving is {largest.share:.0%}: {largest.change}."
    assert found.sentence.endswith(told) == (largest.share > found.finding.share + 0.005)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.shares["between"] == pytest.approx(0.02 / 1.02)
    assert set(found.shares) == set(SHARES) and found.error < 1e-9
    shown = str(found)
    assert found.sentence in " ".join(shown.split()) and "computing" in shown and "saves" in shown


def test_injected_delays_are_not_computing():
    step = ran(COSTS)
    records = [record._replace(delayed=record.end - record.start) for record in step.trace.records]
    delayed = replace(step, trace=replace(step.trace, parts=[Part.of(records)]))
    (plain, late) = (
        explain([TimedStep(recorded=own, wall_seconds=own.trace.makespan)]) for own in (step, delayed)
    )
    assert late.shares["delayed"] == pytest.approx(plain.shares["compute"]) and late.shares["compute"] < 1e-9
    assert "injected delays: a device is kept busy" in str(late) and "injected" not in str(plain)


def with_work(step, *split):
    work = Work([LayerWork("Block", 1.0, 1)] * sum(split), split)
    return TimedStep(recorded=replace(step, work=lambda: work), wall_seconds=step.trace.makespan)


def test_a_slow_stage_is_told_from_one_with_more_to_do():
    slow = explain([with_work(ran(Straggler(COSTS, stage=2, factor=1.6)), 2, 2, 2, 2)])
    assert slow.sentence.startswith("Stage 2 takes 1.60 times as long as the others for the same work: ")
    assert (slow.finding.kind, slow.finding.subject) == ("stage", 2)
    factors = [[size / 2] * MICROBATCHES for size in (2, 2, 5, 1)]
    more = WorkloadCosts(EVEN.scaled(factors, factors), rules().placement)
    uneven = explain([with_work(ran(more), 2, 2, 5, 1)])
    assert uneven.sentence.startswith("Stage 2 has 2.50 times as much to do as the others (layers 4 to 8): ")
    assert "of the time would be saved with split " in uneven.sentence
    slow_too = explain([with_work(ran(Straggler(more, stage=2, factor=1.2)), 2, 2, 5, 1)])
    assert slow_too.sentence.startswith("Stage 2 has 2.50 times as much to do as the others ")
    coarse = explain([with_work(ran(Straggler(COSTS, stage=2, factor=1.6)), 1, 1, 1, 1)])
    assert "for the same work" in coarse.sentence


def test_a_stage_that_no_other_split_helps():
    work = Work([LayerWork(name, 1.0, 1) for name in ("Embed", "Block", "Block", "<lambda>")], (1, 1, 1, 1))
    step = replace(ran(Straggler(COSTS, stage=3, factor=1.6)), work=lambda: work)
    found = explain([TimedStep(recorded=step, wall_seconds=step.trace.makespan)])
    assert found.sentence.startswith("Stage 3 has 1.60 times as much to do as the others (layer 3): ")
    assert found.sentence.endswith("no other split of these 4 layers helps.")
    at = replace(found.finding, sentence="layer 3, <lambda>")
    assert "layer 3, &lt;lambda&gt;" in replace(found, finding=at)._repr_html_()
    shares = dict.fromkeys(SHARES, 0.0) | {"compute": 1.0}
    saved = [
        Saving("uneven", None, "", 0.3),
        Saving("split", Recut("split 1,1,2", None, (1, 1, 2)), "", 0.02),
    ]
    some = main_cause([step], shares, saved, Layers.of([step]))
    assert some.sentence.endswith("no other split of these 4 layers saves more than 2.0%.")


@pytest.mark.parametrize(
    ("kind", "much", "ends"),
    [
        ("in flight", 1, "holds forwards back: 5% of the time would be saved with one more."),
        ("in flight", None, "holds forwards back: 5% of the time would be saved without that."),
        ("bytes", 1.5, "holds forwards back: 5% of the time would be saved with 1.5 times as many."),
    ],
)
def test_a_limit_counts_only_where_it_held_something_back(kind, much, ends):
    shares = dict.fromkeys(SHARES, 0.0) | {"compute": 0.6, "memory": 0.4}
    found = main_cause([ran(COSTS)], shares, [Saving(kind, much, "", 0.05)], None)
    assert found.kind == kind and found.sentence.endswith(ends)
    shares |= {"memory": 0.01, "stage": 0.39}
    assert main_cause([ran(COSTS)], shares, [Saving(kind, much, "", 0.05)], None).kind == "nothing"


def test_a_link_that_is_slow_there_and_back():
    forward, backward = list(EVEN.transfer_forward), list(EVEN.transfer_backward)
    forward[1] = backward[2] = (50e-3,) * MICROBATCHES
    slow = replace(EVEN, transfer_forward=tuple(forward), transfer_backward=tuple(backward))
    step = ran(WorkloadCosts(slow, rules().placement), limit=8)
    found = explain([TimedStep(recorded=step, wall_seconds=step.trace.makespan)])
    assert found.sentence.startswith(
        "The link between stages 1 and 2 is slow (50.0 ms a message, the others "
    )


def test_delays_that_were_injected_are_no_jitter():
    step, _ = spoilt("jitter")
    fine = {(record.stage, record.task): record for record in ran(COSTS).trace.records}
    records = [
        record._replace(delayed=max(record.end - record.start - (own.end - own.start), 0.0))
        for record in step.trace.records
        for own in [fine[record.stage, record.task]]
    ]
    injected = replace(step, trace=replace(step.trace, parts=[Part.of(records)]))
    found = explain([TimedStep(recorded=injected, wall_seconds=step.trace.makespan)])
    assert found.sentence.startswith("Delays are injected into this run: ")
    without = next(saving for saving in found.savings if saving.kind == "injected")
    saved = 1 - ran(COSTS).trace.makespan / step.trace.makespan
    assert without.share == pytest.approx(saved, rel=0.02)


def test_late_data():
    step = ran(COSTS)
    span = step.trace.makespan
    found = explain([TimedStep(recorded=step, wall_seconds=1.5 * span, load_seconds=0.5 * span)])
    assert found.sentence == "Steps wait for their data: 33% of the time."


def test_loading_beside_other_stages_tasks_counts_once():
    step = ran(COSTS)
    span = step.trace.makespan
    found = explain([TimedStep(recorded=step, wall_seconds=1.5 * span, load_seconds=0.6 * span)])
    assert found.shares["data"] == pytest.approx(1 / 3) and found.shares["between"] == 0
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_all_shares_are_of_the_mean_step_with_everything():
    step, _ = spoilt("stage")
    span = step.trace.makespan
    found = explain([TimedStep(recorded=step, wall_seconds=own * span) for own in (1.0, 1.0, 2.5)])
    assert found.seconds == pytest.approx(1.5 * span)
    assert found.shares["between"] == pytest.approx(1 / 3)
    alone = explain([TimedStep(recorded=step, wall_seconds=span)])
    assert found.savings[0].share == pytest.approx(alone.savings[0].share / 1.5)


@pytest.mark.parametrize("limit", [8, 1], ids=["predicted", "not predicted"])
def test_time_between_steps_is_named(limit):
    step = ran(COSTS, limit=8)
    step = replace(step, rules=rules(limit=limit))
    found = explain([TimedStep(recorded=step, wall_seconds=3 * step.trace.makespan)])
    assert bool(found.savings) == (limit == 8)
    assert found.sentence == "Steps wait for what is between them, such as the update: 67% of the time."


@pytest.mark.parametrize("share", [name for name in SHARES if name != "compute"])
def test_the_largest_share_is_named_where_nothing_is_predicted(share):
    shares = dict.fromkeys(SHARES, 0.0) | {"compute": 0.4, share: 0.6}
    found = main_cause([ran(COSTS)], shares, [], None)
    assert found.share == 0.6 and (found.kind == share or (found.kind, found.subject) == ("idle", share))


def test_nothing_is_predicted_where_the_replay_is_off():
    step = ran(LATE)
    tighter = replace(step, rules=rules(limit=1))  # than it ran with
    found = explain([TimedStep(recorded=tighter, wall_seconds=step.trace.makespan)])
    assert found.error > 0.05 and not found.savings
    assert "No what-ifs: as the steps were, the simulator is " in str(found)
    assert "% off, and up to 5% would be trusted." in " ".join(str(found).split())
    exact = " ".join(str(replace(found, error=0.0)).split())
    assert "As the steps were, the simulator is 0.0% off. No change that was tried saves anything." in exact
    assert found.finding.kind == "idle" and found.sentence.startswith("Stages compute ")
    span = step.trace.makespan
    late = explain([TimedStep(recorded=tighter, wall_seconds=1.1 * span, load_seconds=0.1 * span)])
    assert late.finding.kind == "idle", "of two causes the larger one"
    later = explain([TimedStep(recorded=tighter, wall_seconds=4 * span, load_seconds=3 * span)])
    assert later.sentence == "Steps wait for their data: 75% of the time."


def test_what_is_in_square_brackets_or_colons_is_told_as_it_is(monkeypatch):
    text = "run[a] [/INST] :warning:"
    assert text in as_text(80, text) and text in as_text(80, [["setting", text], [text, "[None]"]])
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # which would show it, and return nothing
    monkeypatch.setenv("FORCE_COLOR", "1")  # as kernels do
    assert text in as_text(80, text) and "\x1b" not in as_text(80, [["setting", text]])
