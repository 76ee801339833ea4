"""What objects say of themselves, in one line each, and steps in theirs."""

import re
from dataclasses import replace

import numpy as np
import pytest

from rrfp_jax.train.reference import in_units
from tests.support import toy
from tests.support.refusals import BATCH


@pytest.fixture(scope="module")
def ran():
    trainer = toy.trainer(2, data=BATCH)
    return trainer, next(trainer.steps(1))


def test_a_trainer(ran):
    assert repr(toy.trainer(2)) == "Trainer(8 layers as 4 + 4 on 2 stages, schedule bf, 0 steps done)"
    assert repr(ran[0]).endswith("schedule bf, 1 steps done)")


def test_a_report_is_one_line_with_short_numbers(ran):
    said = repr(ran[1])
    assert re.fullmatch(r"Report\(step +0  loss [\d.]{6} .* idle +\d+% +\d+%\)", said)
    assert len(said) < 120


def test_rate_and_duration_of_a_step_are_of_the_same_time(ran):
    report = replace(ran[1], wall_seconds=2.0, step_seconds=0.1, weight=100.0)
    assert "50 tokens/s   2000.0 ms  idle" in str(report)


def test_programs_that_a_step_compiles_are_told(ran):
    trainer, first = ran
    assert first.compiled == 0 and "compiled" not in str(first)
    shorter = [{name: array[:, :-1] for name, array in mb.items()} for mb in BATCH]
    report = trainer.step(shorter)
    assert report.compiled > 0 and f"  compiled {report.compiled} programs" in str(report)
    assert trainer.step(shorter).compiled == 0


def test_a_check_prints_its_table_once(ran, capsys):
    report = ran[0].check()
    assert capsys.readouterr().out.count("agrees with unpipelined JAX") == 1
    print(report)
    said = capsys.readouterr().out
    assert re.fullmatch(r"CheckReport\(agrees with unpipelined JAX, loss=[\d.]+, worst=[\d.e+-]+\)\n", said)
    assert "KiB" in report.text and "0.0 MiB" not in report.text


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0"),
        (1, "0.0 KiB"),
        (2048, "2.0 KiB"),
        (60_000, "0.1 MiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**31, "6144.0 MiB"),
    ],
)
def test_bytes(size, said):
    assert in_units(np.int64(size)) == said
