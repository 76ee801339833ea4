"""Pictures of steps: what they show and what hovering tells, by every format, and what cannot be drawn."""

import re
import sys
from itertools import pairwise
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import rrfp_jax as rrfp
from rrfp_jax.core.hints import BF
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, KINDS, Placement, Task
from rrfp_jax.report import charts
from rrfp_jax.report.legend import CAUSES, DRAWN
from rrfp_jax.report.timeline import Panel, Timeline, compare, gaps_of, of_gap, of_task, reason, told
from rrfp_jax.trace.idleness import Cause, Idle
from rrfp_jax.trace.records import Part, RecordedStep, StepTrace, TaskRecord
from tests.report.test_store import delayed, step

IDLE = [name for name, _ in DRAWN.values()]
SVG = "http://www.w3.org/2000/svg"


def drawn(schedule):
    return Timeline([Panel(schedule, step(schedule))])


def tips(panel):
    tasks = [of_task(panel, record) for record in panel.trace.records]
    return [*tasks, *(of_gap(panel, parts) for parts in gaps_of(panel))]


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{{{SVG}}}text")]


@pytest.mark.parametrize(
    ("schedule", "kinds", "idle"),
    [
        ("1f1b", "FB", ["nothing is ready", "what is ready is held back"]),
        ("zb-v", "FIW", ["nothing is ready", "what is ready is held back"]),
        ("bfw", "FBIW", ["nothing is ready"]),
    ],
)
def test_the_legend_names_every_kind_of_task_and_of_idleness_and_no_other(schedule, kinds, idle):
    shown = texts(drawn(schedule).svg())
    names = [f"{row.letter}: {row.title}" for row in KINDS]
    legend = [name for name in names if name[0] in kinds]
    assert [text for text in shown if text in names] == legend
    assert [text.removeprefix("idle: ") for text in shown if text in IDLE] == idle
    assert ("paler: later chunks" in shown) == (step(schedule).trace.placement.chunks > 1)


def test_injected_delays_are_in_the_legend_and_told():
    panel = Panel("late", delayed(step("bf"), delayed=2e-3, late=40e-3))
    shown = texts(Timeline([panel]).svg())
    assert "injected delay" in shown and "idle: an injected delay" in shown
    assert any(re.fullmatch(r"stage 0, \d+% idle, \d+% delayed", text) for text in shown)
    assert any("before it was ready\n40 ms of that was injected" in tip for tip in tips(panel))
    told = [tip for tip in tips(panel) if "the last 2 ms of it are an injected delay" in tip]
    assert len(told) == 12 and any("an injected delay holds what" in tip for tip in tips(panel))


def test_a_panel_has_its_title_and_ticks():
    shown = texts(drawn("1f1b").svg())
    trace = step("1f1b").trace
    assert f"1f1b: {trace.makespan * 1e3:.4g} ms, {sum(trace.bubble()) / 3:.0%} idle" in shown
    assert [f"stage {stage}, {share:.0%} idle" for stage, share in enumerate(trace.bubble())] == [
        text for text in shown if text.startswith("stage")
    ]
    (causes,) = [text for text in shown if text.startswith("idle: ") and text not in IDLE]
    parts = [part.rsplit(" ", 1) for part in causes.removeprefix("idle: ").split(", ")]
    assert {name for name, _ in parts} <= {row.title for row in CAUSES.values()}
    found = [int(share.removesuffix("%")) for _, share in parts]
    assert found == sorted(found, reverse=True)
    assert sum(found) == pytest.approx(100 * sum(trace.bubble()) / 3, abs=4)
    ticks = [float(text) for text in shown if re.fullmatch(r"[\d.]+", text)]
    assert {0.0, 50.0} <= set(ticks)
    assert "time (ms); the number in a box is its microbatch" in shown


def test_steps_are_compared_on_one_scale():
    made = compare(drawn("1f1b"), SimpleNamespace(timeline=lambda: drawn("gpipe")))
    assert [panel.title for panel in made.panels] == ["1f1b", "gpipe"]
    root = ElementTree.fromstring(made.svg())
    one, other = boxes_of(root, "F0 on stage 0")
    assert one[:2] == other[:2] and other[2] > one[2]  # the same task, as wide, below


def boxes_of(element, begins, top=0.0):
    """Left edge, width and top of all boxes of which hovering tells what begins so."""
    found = []
    if moved := re.match(r"translate\(.*,(.*)\)", element.get("transform", "")):
        top += float(moved[1])
    for child in element:
        if child.tag == f"{{{SVG}}}title" and child.text.startswith(begins):
            left, above, width = map(float, re.match(r"M(.*),(.*)h(.*)v", element.get("d")).groups())
            found.append((left, width, top + above))
        found += boxes_of(child, begins, top)
    return found


@pytest.mark.parametrize(("given", "reason"), [((), "nothing is given"), ((3,), "int is no step")])
def test_what_has_no_picture_cannot_be_compared(given, reason):
    with pytest.raises(rrfp.UsageError, match=reason):
        rrfp.compare(*given)


def test_hovering_covers_every_second_of_every_stage():
    (panel,) = drawn("bfw").panels
    gaps = [part for parts in gaps_of(panel) for part in parts]
    for stage in range(3):
        own = sorted((box.start, box.end) for box in [*panel.trace.records, *gaps] if box.stage == stage)
        assert own[0][0] == panel.trace.start and own[-1][1] == panel.trace.end
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(own))
    tasks = {tip.split(":")[0] for tip in tips(panel) if " idle for " not in tip}
    assert tasks == {f"{record.task} on stage {record.stage}" for record in panel.trace.records}


F, B = (lambda j: Task(FORWARD, 0, j)), (lambda j: Task(BACKWARD, 0, j))
TWO = StepTrace(  # the backward of microbatch 0 leaves stage 1 at 4 ms, arrives at 5 and begins at 7
    0,
    Placement(2),
    [
        Part.of(
            [
                TaskRecord(0, F(0), 0, 0.0, 0.0, 0.0, 0.001),
                TaskRecord(1, F(0), 0, 0.0015, 0.0015, 0.002, 0.003),
                TaskRecord(1, B(0), 0, 0.003, 0.003, 0.003, 0.004),
                TaskRecord(0, B(0), 0, 0.005, 0.006, 0.007, 0.008),
            ]
        )
    ],
)


def test_hovering_tells_why_a_gap_is_idle():
    rules = StepRules(placement=TWO.placement, microbatches=1, schedule=BF())
    panel = Panel("two", RecordedStep(trace=TWO, rules=rules, buckets=["a"]))
    told = [tip for tip in tips(panel) if " idle for " in tip]
    assert told == [
        "stage 0 idle for 6 ms from 1 ms on\n"
        "3 ms: nothing is ready; B0 waits for B0 of stage 1\n"
        "1 ms: nothing is ready; what B0 needs of B0 of stage 1 is on its way\n"
        "2 ms: B0 is ready, but the host has not started it yet",
        "stage 1 idle for 2 ms from 0 ms on\n"
        "1 ms: nothing has reached the stage yet; F0 waits for F0 of stage 0\n"
        "500 us: nothing has reached the stage yet; F0 waits for F0 of stage 0\n"
        "500 us: F0 is ready, but the host has not started it yet",
        "stage 1 idle for 4 ms from 4 ms on\n4 ms: nothing is left to do in this step",
    ]


def test_only_what_a_step_spent_time_on_is_in_the_legend():
    rules = StepRules(placement=TWO.placement, microbatches=1, schedule=BF())
    chart = charts.stages(RecordedStep(trace=TWO, rules=rules, buckets=["a"])).readable()
    (rows,) = chart["datasets"].values()
    legend = chart["encoding"]["color"]["scale"]["domain"]
    assert {row["n"] for row in rows} == set(legend) and len(legend) < len(Cause)


def test_every_cause_has_its_words():
    said = {reason(Idle(0, 0.0, 1.0, cause, F(1), (1, F(1)))) for cause in Cause}
    assert len(said) == len(Cause)
    assert "the order has F1 next, which waits for F1 of stage 1" in "".join(said)
    assert reason(Idle(0, 0.0, 1.0, Cause.STAGE, F(1))).endswith("though it needs no other stage")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (75.25, "75.25 s"), (1.0, "1 s"), (0.2, "200 ms"), (3.5e-5, "35 us"), (2e-8, "0.02 us")],
)
def test_durations_have_a_unit_that_suits_them(seconds, text):
    assert told(seconds) == text


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("step.png", b"\x89PNG"),
        ("step.pdf", b"%PDF"),
        ("step.svg", b"<svg"),
        ("step.SVG", b"<svg"),
        ("step.html", b"<!doctype html>"),
    ],
)
def test_a_picture_is_saved_in_the_format_that_its_name_says(tmp_path, name, begins):
    path = drawn("bfw").save(tmp_path / name)
    assert path.read_bytes().startswith(begins)


def test_a_page_is_called_as_its_file(tmp_path):
    assert b"<title>a&lt;b</title>" in drawn("bfw").save(tmp_path / "a<b.html").read_bytes()


@pytest.mark.parametrize("name", ["step", "step.jpg", "nowhere/step.svg", "nowhere/step.png"])
def test_what_cannot_be_saved_is_refused(tmp_path, name):
    with pytest.raises(rrfp.UsageError, match=name):
        drawn("bfw").save(tmp_path / name)


def test_without_what_draws_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(rrfp.UsageError, match=r'pip install "PATH-TO-CHECKOUT\[pictures\]"'):
        drawn("bfw").save(tmp_path / "step.svg")
