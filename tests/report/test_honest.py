"""What a report says of where it ran, what its colours mean, and what its what-ifs leave out."""

import pytest

from rrfp_jax.core.tasks import KINDS
from rrfp_jax.report import charts
from rrfp_jax.report.legend import SHARES
from rrfp_jax.report.run_folder import Run, _origin_line, shared_by
from rrfp_jax.report.what_if import SPLIT, what_ifs
from rrfp_jax.runs.files import hardware_of, origin_of
from tests.support.watched import step_of


def on_cpus(cores):
    """Processes of a device each, with these cores."""
    return [("a", own, "cpu", [f"{rank}.0"]) for rank, own in enumerate(cores)]


def on_gpus(names):
    return [("a", range(2), "H100", name) for name in names]


SHARED = "4 processes on 2 cores: idle shares include waiting for a core"


@pytest.mark.parametrize(
    ("processes", "on_cpu", "words", "shared"),
    [
        (on_cpus([range(2)] * 4), True, "4 x cpu in 4 processes on 1 machine, 2 cores", SHARED),
        (on_cpus([range(4)] * 4), True, "4 x cpu in 4 processes on 1 machine, 4 cores", ""),
        (on_gpus("0123"), False, "4 x H100 in 4 processes on 1 machine, 2 cores", ""),
        (
            on_gpus("0000"),
            False,
            "1 x H100 in 4 processes on 1 machine, 2 cores",
            "4 processes on 1 GPU: idle shares include waiting for one",
        ),
        (
            on_gpus("0011"),
            False,
            "2 x H100 in 4 processes on 1 machine, 2 cores",
            "4 processes on 2 GPUs: idle shares include waiting for one",
        ),
        ([("a", range(2), "H100", "01")], False, "2 x H100 on 1 machine, 2 cores", ""),
        (
            [("a", range(8), "cpu", ["0.0", "0.1"]), ("b", range(8), "cpu", ["1.0", "1.1"])],
            True,
            "4 x cpu in 2 processes on 2 machines, 8 cores each",
            "",
        ),
        (
            on_cpus([range(at, at + 2) for at in (0, 2, 4, 6)]),  # bound to cores of their own
            True,
            "4 x cpu in 4 processes on 1 machine, 8 cores",
            "",
        ),
        (
            [("a", range(1), "cpu", ["0.0", "0.1", "0.2", "0.3"])],
            True,
            "4 x cpu on 1 machine, 1 cores",
            "4 virtual devices on 1 core: idle shares include waiting for a core",
        ),
    ],
)
def test_processes_that_share_cores_or_gpus_are_told(processes, on_cpu, words, shared):
    found = hardware_of(processes, on_cpu)
    assert found == {"words": words, "shared": shared} and shared_by({"hardware": found}) == shared


def test_a_report_says_when_where_and_by_which_schedule():
    origin = dict(origin_of(None, hardware_of(on_cpus([range(2)] * 4), True)))
    line = _origin_line(origin | {"git": {"commit": "0123456789abc", "dirty": True}}, "bf")
    assert line == (
        f"{origin['started']}, commit 012345678 with changes, schedule bf, "
        f"4 x cpu in 4 processes on 1 machine, 2 cores"
    )
    run = Run(name="a", steps=(), settings={}, origin=line, shared=SHARED)
    assert run.head == f"{line}\n{SHARED}\n"


@pytest.mark.parametrize(
    "origin", [None, 3, {}, {"hardware": None}, {"hardware": {"shared": 3}}, {"git": []}]
)
def test_earlier_runs_and_odd_files_say_less(origin):
    assert shared_by(origin) == ""
    assert _origin_line(origin if isinstance(origin, dict) else {}, "bf") == "schedule bf"


def test_no_colour_means_a_pass_and_something_else():
    passes = {row.colour for row in KINDS}
    others = [row.colour for row in SHARES.values()]
    assert len(set(others)) == len(others) and passes.isdisjoint(others)
    assert passes.isdisjoint(charts.FIGURES.values()) and passes.isdisjoint(charts.CURVES)


def test_letters_of_a_page_are_large_enough():
    config = charts.stages(step_of(2)).readable()["config"]
    sizes = [
        size for part in ("axis", "legend", "header") for name, size in config[part].items() if "Size" in name
    ]
    assert len(sizes) == 6 and min(sizes) >= 12


def test_a_schedule_that_splits_backwards_says_that_this_costs():
    changes = [found.change for found in what_ifs(step_of(2), ["bf", "1f1b", "bfw", "zb-h1"]).changes]
    schedules = [change for change in changes if change.startswith("schedule ")]
    assert {own for own in schedules if own.endswith(SPLIT)} == {
        own for own in schedules if own.startswith(("schedule bfw", "schedule zb"))
    } and any(own.endswith(SPLIT) for own in schedules)
