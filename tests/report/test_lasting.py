"""What lasts, as plain lines and as a line that is written over."""

import os
import sys
import time
from contextlib import closing

import pytest

from rrfp_jax import printing
from rrfp_jax.progress import Doing, during
from rrfp_jax.report import progress_line
from rrfp_jax.report.progress_line import Lasting, text_of
from rrfp_jax.runs.display import Display


def shown_of(told, after, every, monkeypatch):
    """What is shown of (time, doing) pairs."""
    shown, clock = [], [0.0]
    monkeypatch.setattr(progress_line, "monotonic", lambda: clock[0])
    listener = Lasting(shown.append, shown.append, after, every)
    for clock[0], doing in told:
        listener(doing)
    listener.close()
    return shown


def test_its_text():
    assert text_of(Doing("saving", 0, 1)) == "saving"
    doing = Doing("compiling", 5, 7, "bucket 2 of 3", "kinds (64 layers)")
    assert text_of(doing) == "compiling 5/7 kinds (64 layers), bucket 2 of 3"


def test_not_more_often_than_is_useful(monkeypatch):
    told = [(float(second), Doing("compiling", second, 25)) for second in range(26)]
    assert shown_of(told, 60.0, 10.0, monkeypatch) == []
    assert shown_of(told, 1.5, 10.0, monkeypatch) == [
        "compiling 2/25",
        "compiling 12/25",
        "compiling 22/25",
        "compiling 25/25: done after 25.0 s",
    ]


def test_two_things_at_once_are_told_apart(monkeypatch):
    told = [(0, Doing("a", 0, 2)), (1, Doing("b", 0, 2)), (3, Doing("a", 1, 2)), (4, Doing("b", 2, 2))]
    assert shown_of([*told, (5, Doing("a", 2, 2))], 2.5, 1.0, monkeypatch) == [
        "a 1/2",
        "a 2/2: done after 5.0 s",
    ]


def test_what_tells_nothing_meanwhile_is_shown_by_a_timer():
    shown = []
    listener = Lasting(shown.append, lambda text: shown.append("end"), 0.01, 1.0)
    with during(listener, "restoring", "runs/a"):
        deadline = time.monotonic() + 10
        while not shown and time.monotonic() < deadline:
            time.sleep(0.001)
    assert shown == ["restoring, runs/a", "end"]


def test_where_there_is_no_terminal_lines_are_plain(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(progress_line, "monotonic", lambda: now)
    listener = progress_line.shown_progress()
    for now in range(3):
        listener(Doing("validating", now, 2, "" if now == 2 else f"{now / 2:.0%}"))
    assert capsys.readouterr().out == "validating 1/2, 50%\nvalidating 2/2: done after 2.0 s\n"


def on_a_display(leave):
    with closing(Display(2)) as display:
        leave()
        display.tell(Doing("saving", 0, 2))
        display.say("text")


def in_a_script(leave):
    listener = progress_line.shown_progress()
    listener(Doing("saving", 0, 3))
    leave()
    for done in (1, 2, 3):
        listener(Doing("saving", done, 3))


@pytest.mark.parametrize("show", [on_a_display, in_a_script])
def test_a_terminal_that_goes_away_ends_no_run(show, monkeypatch):
    monkeypatch.setattr(progress_line, "LIVE_AFTER", 0.0)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich still believes in it
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        show(lambda: os.close(ours))
        printing.settle_streams()
