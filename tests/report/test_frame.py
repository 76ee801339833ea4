"""Frames from what was seen: a golden one, and none that does not fit its terminal."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from rrfp_jax.core.tasks import Kind, Task
from rrfp_jax.report.look import State
from rrfp_jax.report.watch import (
    ASCII,
    BLOCKS,
    DELAYED,
    MARKS,
    Window,
    cells_of,
    frame,
    ranks_text,
    rows_of,
    shown,
    size_text,
    slowest_of,
    summarised,
)
from rrfp_jax.runtime.run.recorder import PHASES, RecordedDispatch, Recording, RunPhase
from rrfp_jax.trace.idleness import Cause
from rrfp_jax.trace.records import Part
from tests.support.spoilt import spoilt
from tests.support.watched import NOW, latest, line, seen, step_of, told

GIB = 2**30
PEAKS = {"peak_bytes": [GIB, GIB // 2, int(1.7 * GIB), GIB // 4], "budget_bytes": [2 * GIB] * 4}

GOLDEN = """\
mine  running  step 7 of 20  schedule bf
loss 1.625  lr 3.00e-04  norm 0.75
tasks 250.0 ms  whole step 300.0 ms  waiting for data 400 us  12,345 tokens/s
steps ▁▁▁▁▁▁▁▁ 300.0 ms to 300.0 ms     loss █▇▆▅▄▃▂▁ 1.625 to 2.5
slowest: rank 2 (stage 2) is busy 1.60 times as long as others

stage  rank  step 0                                 busy  memory of its limit
    0  0     █████████████████████sssssmmmmmmmmmmm   56%  ███░░░ 1.00/2.00 GiB
    1  1     █████████████████████ssssssssssssssl>   56%  ██░░░░ 0.50/2.00 GiB
    2  2     █████████████████████████████████<<>>   90%  █████░ 1.70/2.00 GiB
    3  3     █████████████████████<<sssssssssl>>>>   56%  █░░░░░ 0.25/2.00 GiB
█ computes  < filling  s other stages  l transfers  m memory  > draining

from a task's end to the next stage, median and worst
0>1 1.00 ms, 1.00 ms      1>0 1.00 ms, 1.00 ms      1>2 1.00 ms, 1.00 ms
2>1 1.00 ms, 1.00 ms      2>3 1.00 ms, 1.00 ms      3>2 1.00 ms, 1.00 ms
"""


def text_of(lines):
    return "".join(f"{line.plain}\n" for line in lines)


@pytest.fixture
def slow(tmp_path):
    """A look at a run whose stage 2 is slow."""
    lines = [line(n, hyperparams={"learning_rate": 3e-4}, **PEAKS) for n in range(8)]
    return seen(latest(tmp_path, told(spoilt("stage")[0])), lines=lines)


def test_a_frame(slow):
    assert text_of(frame(slow, Window(80, 24, BLOCKS))) == GOLDEN


@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (60, 12), (80, None)])
@pytest.mark.parametrize(
    ("stages", "replicas", "wide"), [(2, 1, 1), (64, 1, 1), (8, 2, 4), (64, 3, 8), (1, 1, 1)]
)
def test_every_frame_fits(tmp_path, glyphs, width, height, stages, replicas, wide):
    report = told(step_of(stages), replicas, wide)
    peaks = {"peak_bytes": [300 * GIB + n for n in range(stages)], "budget_bytes": [4096 * GIB] * stages}
    lines = frame(seen(latest(tmp_path, report), lines=[line(1, **peaks)]), Window(width, height, glyphs))
    assert max(line.cell_len for line in lines) <= width
    assert height is None or len(lines) <= height
    assert glyphs is BLOCKS or text_of(lines).isascii()
    if height is None:
        assert text_of(lines).count("GiB") == stages


def test_what_does_not_fit_is_summarised_and_the_slowest_are_shown(tmp_path):
    found = latest(tmp_path, told(step_of(64)))
    rows = rows_of(found, None)
    few = summarised(rows, 6)
    slowest = sorted(rows, key=lambda row: row.seconds)[-5:]
    assert {row.name for row in few[:-1]} == {row.name for row in slowest}
    assert [int(row.name) for row in few[:-1]] == sorted(int(row.name) for row in few[:-1])
    assert few[-1].name == "59 more" and sum(few[-1].shares.values()) == pytest.approx(1.0)
    text = text_of(frame(seen(found), Window(80, 24, BLOCKS)))
    assert f"(stage {slowest[-1].name})" in text and " more " in text and "more are faster" in text


def test_the_slowest_is_named_with_its_replica_and_ranks(tmp_path):
    report = told(spoilt("stage")[0], replicas=2, wide=2)
    text = text_of(frame(seen(latest(tmp_path, report)), Window(80, 24, BLOCKS)))
    assert "slowest: ranks 12-13 (stage 2 of replica 1) are busy 1.6" in text
    assert ", 1.10 times as long as its like elsewhere" in text.replace("\n", " ")
    assert "bars: replica 1, which ended last of 2" in text


def test_who_is_slow_in_a_single_step_is_not_the_slowest(tmp_path):
    report = told(spoilt("link")[0])
    own = report.trace.busy_seconds[0]
    busy = [[[*own[:3], 1.04 * own[3]]]] * 3 + [[[2.0 * own[0], *own[1:]]]] + [[[1.0] * 5]]
    found = latest(tmp_path, report)
    assert "(stage 0)" in slowest_of(found, busy[3:4]) and slowest_of(found, busy[:1]) == ""
    said = slowest_of(found, busy)
    assert said.startswith("slowest: rank 0 (stage 0) is busy ") and said.endswith(" as others in 4 steps")
    busy = [[[*own[:3], 1.4 * own[3]]]] * 9 + [[[2.0 * own[0], *own[1:]]]]
    text = text_of(frame(seen(found, busy=busy), Window(80, 24, BLOCKS)))
    assert "slowest: rank 3 (stage 3) is busy 1.36 times as long as others in 10 steps" in text


def test_nobody_is_slowest_where_all_are_alike(tmp_path):
    report = told(spoilt("link")[0])
    assert slowest_of(latest(tmp_path, report), [report.trace.busy_seconds]) == ""
    text = text_of(frame(seen(latest(tmp_path, report)), Window(80, 24, BLOCKS)))
    assert "slowest" not in text and "\n1>2 40.0 ms, 40.0 ms" in text


def test_shares_are_those_of_the_step(tmp_path):
    recorded = spoilt("lengths")[0]
    found = latest(tmp_path, told(recorded))
    rows = rows_of(found, line(0, **PEAKS))
    for stage, row in enumerate(rows):
        assert sum(row.shares.values()) == pytest.approx(1.0)
        assert row.shares["compute"] == pytest.approx(1.0 - recorded.trace.bubble()[stage])
        assert sum(cells for _, cells in cells_of(row.shares, 37)) == 37
    assert [row.peak for row in rows] == PEAKS["peak_bytes"]
    assert rows_of(found, line(0, peak_bytes=[1]))[0].peak is None, "of another number of stages"


def test_everything_that_a_stage_can_do_has_its_letter():
    assert MARKS.keys() == {*Cause, DELAYED}
    assert len({letter for letter, _, _ in MARKS.values()} - {BLOCKS.full, ASCII.full}) == len(MARKS)


def test_a_stage_that_is_kept_busy_does_not_compute(tmp_path):
    recorded = spoilt("stage")[0]
    trace = recorded.trace
    records = [
        r._replace(delayed=0.6 / 1.6 * (r.end - r.start)) if r.stage == 2 else r for r in trace.records
    ]
    found = replace(recorded, trace=replace(trace, parts=[Part.of(records)]))
    text = text_of(frame(seen(latest(tmp_path, told(found))), Window(80, 24, BLOCKS)))
    (row,) = (line for line in text.splitlines() if line.startswith("    2  2 "))
    assert row.count("+") == pytest.approx(0.6 * row.count("█"), abs=1) and row.endswith(" 90%")


def test_edges_are_the_ways_of_messages_between_stages(tmp_path):
    edges = latest(tmp_path, told(spoilt("link")[0])).edges
    found = {(edge.source, edge.target): edge for edge in edges}
    assert found.keys() == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    assert found[1, 2].median == pytest.approx(40e-3) and found[2, 1].worst == pytest.approx(1e-3)


def recording(rank, phase, since, beat):
    last = (RecordedDispatch(1, 3, rank, Task(Kind.FORWARD, 0, 0), NOW - since),)
    name, _, number = phase.partition(" ")
    assert name in PHASES
    phase = RunPhase(name, int(number) if number else None)
    return Recording(rank, 100 + rank, f"stage {rank}", phase, NOW - since, NOW - beat, last)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"state": State.ABSENT, "lines": ()}, "runs/mine has not begun: waiting for it (Ctrl-C ends)"),
        ({"state": State.ENDED}, "mine  ended  step 7 of 20"),
        ({"state": State.ENDED, "steps": 8}, "mine  ended  all 8 steps"),
        ({"state": State.ENDED, "failed": True}, "it failed: runs/mine/diagnosis.txt says how"),
        ({"told_at": NOW - 42}, "no step has ended for 42 s, usually one takes 300.0 ms: `rrfp why"),
        (
            {"lines": [line(3, loss=None, applied=False, skipped=2)]},
            "step 3 was not finite and is left out (2 so",
        ),
        ({"lines": [line(3, loss=None, applied=False, skipped=2)]}, "loss not finite"),
        ({"lines": [line(3, validation_loss=1.5), line(4)]}, "loss 2  validation 1.5 (step 3)  norm"),
        ({"lines": ()}, "no step has ended yet"),
        (
            {
                "state": State.STARTING,
                "lines": (),
                "recorders": [recording(r, "compiling", 9, 0) for r in range(4)],
            },
            "ranks 0-3: compiling for 9 s",
        ),
        (
            {"recorders": [recording(0, "step 8", 1, 0), recording(1, "step 8", 30, 30)]},
            "no sign of life from rank 1 (stage 1) for 30 s",
        ),
    ],
)
def test_what_is_said(given, said):
    assert said in text_of(frame(seen(**given), Window(80, 24, BLOCKS)))


def test_nothing_is_said_of_a_run_that_does_well(slow):
    slow = replace(slow, recorders=[recording(rank, "step 8", 0.2, 0.2) for rank in range(4)])
    assert text_of(frame(slow, Window(80, 24, BLOCKS))) == GOLDEN
    ended = [recording(rank, "ended", 30, 30) for rank in range(4)]
    text = text_of(
        frame(replace(slow, state=State.ENDED, recorders=ended, told_at=0.0), Window(80, 24, BLOCKS))
    )
    assert text == GOLDEN.replace("running", "ended")


@pytest.mark.parametrize(
    ("losses", "drawn"),
    [
        ([1.0, 1.5, 2.0], "_=#"),
        ([1.7e308, 0.0, -1.7e308], "#=_"),
        ([3.0, 3.0, 3.0], "___"),
        ([0.0, 0.0, 1e-320], "__#"),
    ],
)
def test_a_curve_runs_from_the_lowest_to_the_highest(losses, drawn):
    lines = [line(n, loss=loss) for n, loss in enumerate(losses)]
    text = text_of(frame(seen(lines=lines), Window(80, 24, ASCII)))
    assert f"  loss {drawn} {min(losses):.4g} to " in text


def test_names_from_files_command_no_terminal():
    text = text_of(frame(seen(lines=[line(0, schedule="\x1b[31mred")]), Window(80, 24, BLOCKS)))
    assert "\x1b" not in text and "schedule \\x1b[31mred" in text


def test_only_letters_and_bars_have_colours(slow):
    lines = frame(slow, Window(80, 24, BLOCKS))
    coloured = [line.plain[span.start : span.end] for line in lines for span in line.spans]
    assert {name.strip(" ") for name in coloured if len(set(name)) > 1} == {"mine"}
    assert all(not line.style or line.style in ("bold", "bold red") for line in lines)
    assert "█" * 3 in coloured and "m" in coloured


@pytest.mark.parametrize(("colour", "styled"), [("truecolor", True), (None, False)])
def test_colours_only_add_to_it(slow, colour, styled):
    console = Console(file=io.StringIO(), force_terminal=styled, color_system=colour, width=80, height=24)
    console.print(shown(slow, console, endless=False))
    text = console.file.getvalue()
    assert ("\x1b[" in text) == styled
    assert styled or text == GOLDEN


def test_a_terminal_without_blocks(slow):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=stream, width=80, height=24)
    console.print(shown(slow, console, endless=False))
    stream.flush()
    assert b"    2  2     ##########" in stream.buffer.getvalue()


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "3"), ([0, 1, 2, 3], "0-3"), ([4, 0, 1, 6], "0-1,4,6"), ([], "")]
)
def test_ranks(ranks, text):
    assert ranks_text(ranks) == text


@pytest.mark.parametrize(
    ("size", "limit", "text"),
    [
        (512, None, "0.50 KiB"),
        (3 * 2**20, 2**31, "0.00/2.00 GiB"),
        (1.5 * GIB, None, "1.50 GiB"),
        (300 * GIB, 4096 * GIB, "300/4096 GiB"),
    ],
)
def test_sizes(size, limit, text):
    assert size_text(size, limit) == text
