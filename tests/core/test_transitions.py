"""The rules as tables: that they are shown, and that the code follows them, one by one."""

import re
from pathlib import Path

import pytest

import rrfp_jax.core
from rrfp_jax.core.events import ROOM, Arrived, Chosen, IllegalEvent
from rrfp_jax.core.hints import BF, BFW
from rrfp_jax.core.orders import OneFOneB
from rrfp_jax.core.progress import Progress, all_tasks
from rrfp_jax.core.scheduler import StageScheduler
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import (
    BACKWARD,
    FLOW,
    FORWARD,
    INPUT,
    WEIGHT,
    Direction,
    Input,
    Kind,
    Placement,
    Task,
)
from rrfp_jax.core.transitions import FUSED, RULES, SPLIT, TRANSITIONS, Cause, Refusal, cause, in_markdown

README = Path(rrfp_jax.core.__file__).with_name("README.md")


def test_the_readme_shows_them():
    shown = README.read_text().split("<!-- tables -->")[1].split("<!-- end of tables -->")[0]
    assert shown.strip() == in_markdown(), "put what rrfp_jax.core.transitions.in_markdown() gives there"


def test_the_readme_names_every_file():
    named = set(re.findall(r"`([a-z_]+(?:\.py|/))`", README.read_text()))
    here = {path.name + "/" * path.is_dir() for path in README.parent.iterdir() if path.name[0] not in "_R"}
    assert here == {name for name in named if (README.parent / name).exists()}


def test_the_example_of_the_readme_holds():
    exec(re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1], {})


@pytest.mark.parametrize("kinds", [FUSED, SPLIT])
def test_each_predecessor_is_of_the_same_virtual_stage_and_comes_before(kinds):
    for kind in kinds:
        assert RULES[kind].predecessor in (None, *kinds[: kinds.index(kind)])
    assert sum(RULES[kind].adds for kind in kinds) == sum(RULES[kind].admitted for kind in kinds) == 1


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
                    progress = Progress(stage, placement, all_tasks(placement.chunks, 1), splits, False)
                    task = Task(kind, chunk, 0)
                    why = cause(kind, placement.needs_arrival(stage, task))
                    before, after = (("waiting", "ready", "dispatched")[state] for state in TRANSITIONS[why])
                    seen = [progress.state(task)]
                    for step in needed(placement, stage, task):
                        step(progress)
                        seen.append(progress.state(task))
                    names = [("waiting", "ready", "dispatched")[state] for state in seen]
                    expected = [before] * (len(seen) - 1) + [after]
                    assert names == (expected if why is not Cause.BEGINNING else [after]), (stage, task)


def needed(placement, stage, task):
    """What must happen on a stage for a task to be ready, in order."""
    kind, chunk, _ = task
    found = []
    if (before := RULES[kind].predecessor) is not None:
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
            if FLOW[kind] and 0 <= v + FLOW[kind] <= placement.last:
                to, wanted = destination
                assert (to, wanted.chunk) == placement.place(v + FLOW[kind])
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
        (Refusal.ELSEWHERE, 0, [Arrived(Input(Direction.FORWARD, 0, 0))], False),
        (Refusal.ELSEWHERE, 1, [Arrived(Input(Direction.WEIGHT, 0, 0))], False),
        (Refusal.ONCE, 1, [Arrived(Input(Direction.FORWARD, 0, 0))] * 2, False),
        (Refusal.EARLY, 0, [Arrived(Input(Direction.BACKWARD, 0, 0))], False),
        (Refusal.NO_BACKWARD, 0, [ROOM, Arrived(Input(Direction.BACKWARD, 0, 0))], True),
    ],
)
def test_each_refusal(refusal, stage, events, forward_only):
    rules = StepRules(placement=Placement(2), microbatches=1, schedule=BF(), forward_only=forward_only)
    scheduler = StageScheduler(stage, rules)
    for event in events[:-1]:
        scheduler.handle(event)
    before = scheduler.key(), list(scheduler.log)
    with pytest.raises(IllegalEvent, match=f"expected {refusal.value};"):
        scheduler.handle(events[-1])
    assert (scheduler.key(), list(scheduler.log)) == before


def test_a_fixed_order_is_told_no_choice():
    rules = StepRules(placement=Placement(1), microbatches=2, schedule=OneFOneB())
    scheduler = StageScheduler(0, rules)
    with pytest.raises(IllegalEvent, match="expected arrivals and room, as the order is fixed;"):
        scheduler.handle(Chosen(Task(FORWARD, 0, 0)))
    assert str(scheduler.handle(ROOM).task) == "F0"
