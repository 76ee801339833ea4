"""The table of kinds: that core/README.md shows it, and that the code follows it, one by one."""

import re
from pathlib import Path

import pytest

import rrfp_jax.core
from rrfp_jax.core.events import ROOM, Arrived, Chosen, IllegalEvent
from rrfp_jax.core.hints import BF, BFW
from rrfp_jax.core.orders import OneFOneB
from rrfp_jax.core.progress import ArrivalError, Progress, ReadyBy, StageTasks, all_tasks, ready_by
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    WEIGHT,
    Direction,
    Input,
    Kind,
    Placement,
    Task,
)
from tests.verification.exploration.keys import key_of

README = Path(rrfp_jax.core.__file__).with_name("README.md")
FUSED, SPLIT = (FORWARD, BACKWARD), (FORWARD, INPUT, WEIGHT)


def test_the_readme_shows_them():
    shown = README.read_text().split("<!-- tables -->")[1].split("<!-- end of tables -->")[0]
    assert shown.strip() == in_markdown(), "put what in_markdown() gives there"


def test_the_readme_names_every_file():
    named = set(re.findall(r"`([a-z_]+(?:\.py|/))`", README.read_text()))
    here = {path.name + "/" * path.is_dir() for path in README.parent.iterdir() if path.name[0] not in "_R"}
    assert here == {name for name in named if (README.parent / name).exists()}


def test_the_example_of_the_readme_holds():
    exec(re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1], {})


@pytest.mark.parametrize("kinds", [FUSED, SPLIT])
def test_each_predecessor_is_of_the_same_virtual_stage_and_comes_before(kinds):
    for kind in kinds:
        assert KINDS[kind].after in (None, *kinds[: kinds.index(kind)])
    assert sorted(KINDS[kind].charge for kind in kinds if KINDS[kind].charge) == [-1, 1]


def test_parts_and_wholes():
    assert [KINDS[kind].parts for kind in Kind] == [(FORWARD,), (INPUT, WEIGHT), (INPUT,), (WEIGHT,)]
    assert [kind.whole for kind in Kind] == [FORWARD, BACKWARD, BACKWARD, BACKWARD]


@pytest.mark.parametrize(
    "placement", [Placement(3), Placement(3, 2), Placement(3, 2, "v"), Placement(1)], ids=str
)
def test_what_makes_each_task_ready(placement):
    """Every stage and kind, by telling a new stage one thing at a time, against the table."""
    for stage in range(placement.stages):
        for split in (False, True):
            splits = [(c, 0) for c in range(placement.chunks)] if split else []
            for kind in SPLIT if split else FUSED:
                for chunk in range(placement.chunks):
                    names = all_tasks(placement.chunks, 1)
                    progress = Progress(StageTasks(stage, placement, names, splits, False))
                    task = Task(kind, chunk, 0)
                    why = ready_by(kind, placement.needs_arrival(stage, task))
                    seen = [progress.state(task)]
                    for step in needed(placement, stage, task):
                        step(progress)
                        seen.append(progress.state(task))
                    names = [("waiting", "ready", "dispatched")[state] for state in seen]
                    expected = ["waiting"] * (len(seen) - 1) + ["ready"]
                    assert names == (expected if why is not ReadyBy.BEGINNING else ["ready"]), (stage, task)


def needed(placement, stage, task):
    """What must happen on a stage for a task to be ready, in order."""
    kind, chunk, _ = task
    found = []
    if (before := KINDS[kind].after) is not None:
        own = Task(before, chunk, 0)
        found += needed(placement, stage, own)
        found.append(lambda progress: progress.dispatch(*own))
    if placement.needs_arrival(stage, task):
        found.append(lambda progress: progress.arrive(task.input))
    return found


def test_outputs_and_inputs_flow_by_the_table():
    placement = Placement(3, 2, "v")
    for v in range(placement.last + 1):
        stage, chunk = placement.place(v)
        for kind in Kind:
            destination = placement.destination(stage, Task(kind, chunk, 5))
            flow = KINDS[kind].flow
            if flow and 0 <= v + flow <= placement.last:
                to, wanted = destination
                assert (to, wanted.chunk) == placement.place(v + flow)
                assert placement.source(to, wanted) == (stage, (kind.direction, chunk, 5))
            else:
                assert destination is None


def test_directions_are_not_kinds():
    assert [kind.direction.name for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)] == [
        "FORWARD", "BACKWARD", "BACKWARD", "WEIGHT"
    ]  # fmt: skip
    rules = StepRules(placement=Placement(2), microbatches=1, schedule=BFW())
    assert StageScheduler(0, rules).task_for(Direction.BACKWARD, 0, 0) == Task(BACKWARD, 0, 0)
    assert StageScheduler(1, rules).task_for(Direction.BACKWARD, 0, 0) == Task(INPUT, 0, 0)
    assert Task(INPUT, 0, 0).input == Task(BACKWARD, 0, 0).input == Input(Direction.BACKWARD, 0, 0)


@pytest.mark.parametrize(
    ("refusal", "stage", "events", "forward_only"),
    [
        (ArrivalError.ELSEWHERE, 0, [Arrived(Input(Direction.FORWARD, 0, 0))], False),
        (ArrivalError.ELSEWHERE, 1, [Arrived(Input(Direction.WEIGHT, 0, 0))], False),
        (ArrivalError.ONCE, 1, [Arrived(Input(Direction.FORWARD, 0, 0))] * 2, False),
        (ArrivalError.EARLY, 0, [Arrived(Input(Direction.BACKWARD, 0, 0))], False),
        (ArrivalError.NO_BACKWARD, 0, [ROOM, Arrived(Input(Direction.BACKWARD, 0, 0))], True),
    ],
)
def test_each_refusal(refusal, stage, events, forward_only):
    rules = StepRules(placement=Placement(2), microbatches=1, schedule=BF(), forward_only=forward_only)
    scheduler = StageScheduler(stage, rules)
    for event in events[:-1]:
        scheduler.handle(event)
    before = key_of(scheduler), list(scheduler.log)
    with pytest.raises(IllegalEvent, match=f"expected {refusal.value};"):
        scheduler.handle(events[-1])
    assert (key_of(scheduler), list(scheduler.log)) == before


def test_a_fixed_order_is_told_no_choice():
    rules = StepRules(placement=Placement(1), microbatches=2, schedule=OneFOneB())
    scheduler = StageScheduler(0, rules)
    with pytest.raises(IllegalEvent, match="expected arrivals and room, as the order is fixed;"):
        scheduler.handle(Chosen(Task(FORWARD, 0, 0)))
    assert str(scheduler.handle(ROOM).task) == "F0"


def in_markdown():
    """The tables of core/README.md, and a drawing of the states."""
    drawing = (
        "waiting    --> ready       " + ", or ".join(why.value for why in ReadyBy),
        "ready      --> dispatched  the schedule chooses it",
    )
    refused = table(
        ("an arrival is illegal unless it keeps to",), [(expected.value,) for expected in ArrivalError]
    )
    text = "\n".join(("```text", *drawing, "```"))
    return "\n\n".join((text, by_kind(), readiness(), refused))


def by_kind():
    places = {1: "v + 1", -1: "v - 1", 0: "nobody"}
    allowed = {1: "it is admitted", 0: "always", -1: "there is a place for its gradient"}
    rows = [
        (
            row.letter,
            "nothing" if row.after is None else row.after.letter,
            places[-row.flow],
            places[row.flow],
            allowed[row.charge],
            "yes" if row.charge < 0 else "no",
        )
        for row in KINDS
    ]
    charge = "ends its chunk's charge (charged whole: the microbatch's, if the last)"
    return table(("task of v", "after", "input from", "output to", "once ready, may run if", charge), rows)


def readiness():
    rows = []
    for kind, row in zip(Kind, KINDS, strict=True):
        why = ready_by(kind, arrives=False).value
        why = why if row.after is None else f"its own {row.after.letter} is dispatched"
        end = {1: "on the first virtual stage", -1: "on the last virtual stage", 0: "everywhere"}[row.flow]
        rows.append((row.letter, end, why))
        if row.flow:
            rows.append((row.letter, "elsewhere", ready_by(kind, arrives=True).value))
    return table(("task", "where", "is ready when"), rows)


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
