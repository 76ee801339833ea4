"""Pictures of a step: what they show, by every format, and what cannot be drawn."""

import re
from xml.etree import ElementTree

import pytest

import rrfp_jax as rrfp
from rrfp_jax.views.picture import SVG
from rrfp_jax.views.timeline import Timeline
from tests.views import test_trace_file


def step(schedule):
    return test_trace_file.step(schedule).trace


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{{{SVG}}}text")]


NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


@pytest.mark.parametrize(("schedule", "kinds"), [("1f1b", "FB"), ("zb-h1", "FIW"), ("bfw", "FBIW")])
def test_the_legend_names_every_kind_of_task_and_no_other(schedule, kinds):
    shown = texts(Timeline(step(schedule)).svg())
    assert [text for text in shown if text in NAMES.values()] == [NAMES[kind] for kind in kinds]
    assert shown.count("idle") == 1


def test_hovering_tells_every_task_and_its_times():
    trace = step("bfw")
    tips = re.findall(r"<title>(.*?)</title>", Timeline(trace).svg())
    assert sorted(tip.split(":")[0] for tip in tips) == sorted(
        f"{record.task} on stage {record.stage}" for record in trace.records
    )
    first = min(trace.records, key=lambda record: record.start)
    (tip,) = [tip for tip in tips if tip.startswith(f"{first.task} on stage {first.stage}:")]
    assert f"{(first.end - first.start) * 1e3:.2f} ms from 0.00 ms on" in tip


@pytest.mark.parametrize(
    ("name", "begins"),
    [("step.png", b"\x89PNG"), ("step.pdf", b"%PDF"), ("step.svg", b"<svg"), ("step.SVG", b"<svg")],
)
def test_a_picture_is_saved_in_the_format_that_its_name_says(tmp_path, name, begins):
    path = Timeline(step("bfw")).save(tmp_path / name)
    assert path.read_bytes().startswith(begins)


@pytest.mark.parametrize("name", ["step", "step.jpg", "nowhere/step.svg", "nowhere/step.png"])
def test_what_cannot_be_saved_is_refused(tmp_path, name):
    with pytest.raises(rrfp.UsageError, match=name):
        Timeline(step("bfw")).save(tmp_path / name)
