"""What a run leaves of its steps: `metrics.jsonl`, a line for each, and recorded steps, task by task.

Recorded steps are MessagePack: groups of steps by name, the records of each step's tasks packed as in `Part`.
`steps.msgpack` has the latest 20, from the end of a run on. `latest-step` has one, and is replaced whole, at
most once a second, so a reader finds one step or the next: the run copies bytes, readers do the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from math import inf, isfinite
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from rrfp_jax.core.admission import Accumulation
from rrfp_jax.core.hints import Ranked
from rrfp_jax.core.orders import ListedOrder
from rrfp_jax.core.schedules import NAMED, RANKED, by_name
from rrfp_jax.core.step_rules import Budget, StepRules
from rrfp_jax.core.tasks import Placement, Shape
from rrfp_jax.fields import path_of, printable
from rrfp_jax.files import read_end, read_whole
from rrfp_jax.json_files import LARGEST_LINES, Count, Seconds, Unreadable, as_kind, parse_json, write_output
from rrfp_jax.trace.layers import LayerWork, Work
from rrfp_jax.trace.records import RECORD, Part, RecordedStep, StepTrace

METRICS, STEPS, LATEST = "metrics.jsonl", "steps.msgpack", "latest-step"
"""Files in a run's folder."""

TRACED_STEPS = 20
"""How many of the latest steps are kept to be written."""

OLDER = "Earlier versions wrote none: use the one that trained the run, or continue the run with this one"

BY_SCRIPTS = 'trainer.write_trace("FILE.msgpack")'

A_TRACE = f"a trace for ui.perfetto.dev; what is read is a run's {STEPS}, or what {BY_SCRIPTS} wrote"
"""What is said of a trace that is given for steps."""

EVERY_SECONDS = 1.0
"""Between two writes of `latest-step`."""

LARGEST = 2**28
"""Bytes of recorded steps that are read: some four million tasks."""

RECORDED = "recorded"
"""In the place of a schedule's name: one that has none, and is read as the order in which tasks ran; of a
hint as a preference. After `RANKED`: of one that keeps room, by chunk."""

Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class StepLine(msgspec.Struct, frozen=True):
    """A line of `metrics.jsonl`, as far as it is shown; see `Report`. Its other keys are figures of the step.

    `resumed` marks the first step after the run was started again. Paced runs have no loss.
    """

    step: Count
    wall_seconds: Seconds = 0.0
    step_seconds: Seconds = 0.0
    load_seconds: Seconds = 0.0
    planning_seconds: Seconds = 0.0
    schedule: str = ""
    applied: bool = True
    resumed: bool = False
    hyperparams: dict[str, Finite | None] = {}
    peak_bytes: list[Count] = []
    budget_bytes: list[Count | None] = []
    loss: Finite | None = None
    gradient_norm: Finite | None = None
    tokens_per_second: Seconds | None = None
    skipped: Count = 0
    validation_loss: Finite | None = None


Line = TypeVar("Line", bound=msgspec.Struct)


def read_lines(path: Path, latest: int | None = None) -> tuple[list[tuple[StepLine, bytes]], str]:
    """`lines_as` with all that is shown of a step."""
    return lines_as(StepLine, path, latest)


def lines_as(kind: type[Line], path: Path, latest: int | None = None) -> tuple[list[tuple[Line, bytes]], str]:
    """The steps of a `metrics.jsonl` with their lines, and what is wrong with the first of the others, or "".

    A last line that was cut short is not wrong: somebody was killed while it was written, or is writing it.

    Args:
        kind: what a line must have.
        path: of the file.
        latest: bytes that are read from its end; None for all.
    """
    try:
        if latest is None:
            content, is_all = read_whole(path, LARGEST_LINES), True
        else:
            content, is_all = read_end(path, latest)
    except OSError as error:
        return [], f"cannot be read: {error.strerror}"
    found, wrong = [], ""
    for number, line in enumerate(content.split(b"\n")[0 if is_all else 1 : -1], 1):
        try:
            found.append((as_kind(parse_json(line), kind), line))
        except ValueError as error:
            wrong = wrong or f"line {number} is no step's: {error}"
    return found, wrong


class _Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `Budget`."""

    costs: list[list[Count]]
    limit: Count
    most: Count | None


class StoredStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step on disk. Its first fields are those of `StepTrace`, the others those of `StepRules` and
    `RecordedStep`; `form` is that of a record.
    """

    form: str
    step: Count
    stages: int
    chunks: int
    shape: Shape
    replica: Count
    busy_by_replica: list[list[Seconds]]
    records: bytes
    ranks: list[list[Count]]
    schedule: str
    microbatches: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    limit: Count | None
    accumulation: Accumulation
    spare_gradients: Count
    forward_only: bool
    budgets: list[_Budget | None] | None
    buckets: list[str]
    fixed_order: bool
    grouped: bool
    lead: Seconds
    layers: list[tuple[str, Seconds, Count, Count]] | None
    split: list[Annotated[int, msgspec.Meta(ge=1)]]


RULES = ("microbatches", "limit", "accumulation", "spare_gradients", "forward_only")
PLACE = ("stages", "chunks", "shape")
TRACE = ("step", "replica", "busy_by_replica")
STEP = ("buckets", "grouped", "lead", "ranks")
"""Fields of `StepRules`, `Placement`, `StepTrace` and `RecordedStep` that are stored by their names."""


def _stored(step: RecordedStep, work: Work | None) -> dict[str, Any]:
    """A step as `StoredStep` reads it."""
    trace, rules = step.trace, step.rules
    unnamed = RANKED + RECORDED if rules.hint is not None and rules.hint.by_chunk else RECORDED
    return {
        "form": RECORD.format,
        **{name: getattr(trace, name) for name in TRACE},
        **{name: getattr(trace.placement, name) for name in PLACE},
        "records": b"".join(part.packed for part in trace.parts),
        "schedule": rules.name if rules.name.removeprefix(RANKED) in NAMED else unnamed,
        **{name: getattr(rules, name) for name in RULES},
        **{name: getattr(step, name) for name in (*STEP, "budgets", "fixed_order")},
        "layers": work and work.layers,
        "split": [] if work is None else work.split,
    }


def write_steps(path: str | Path, groups: Mapping[str, Iterable[RecordedStep]]) -> None:
    """Write groups of steps for `read_steps`; `UsageError` if the file cannot be written."""
    stored = {name: [_stored(step, step.work()) for step in steps] for name, steps in groups.items()}
    write_output(path, msgspec.msgpack.encode(stored))


class StepFile:
    """Writes `latest-step` into a run's folder, on rank 0."""

    def __init__(self, folder: Path) -> None:
        self._path, self._part = folder / LATEST, folder / f".{LATEST}.part"
        self._due = -inf
        self._left_out: RecordedStep | None = None

    def add(self, step: RecordedStep) -> None:
        """Write a step, unless one was written less than a second ago; OSError if it cannot be written."""
        self._left_out = step
        if (now := monotonic()) >= self._due:
            self._due = now + EVERY_SECONDS
            self.flush()

    def flush(self) -> None:
        """Write the latest step if it was left out; raises as `add` does."""
        if self._left_out is not None:
            self._part.write_bytes(msgspec.msgpack.encode({"run": [_stored(self._left_out, None)]}))
            os.replace(self._part, self._path)
            self._left_out = None


def steps_in(folder: Path) -> Path:
    """The file with the steps of a run, by its folder.

    Raises:
        Unreadable: there is none, and why.
        UsageError: this user may not search the folder.
    """
    file = path_of("RUN", folder / STEPS)
    if file.exists():
        return file
    if (folder / "rank-0.log").exists() and not (folder / "config.json").exists():
        raise Unreadable(f"{folder} has no {STEPS}: a script's run writes none, but {BY_SCRIPTS} in it does")
    if (folder / "trace.json").exists():
        raise Unreadable(f"{folder} has a trace.json, for ui.perfetto.dev, but no {STEPS}. {OLDER}")
    raise Unreadable(f"{folder} has no {STEPS}: give the folder of a run that has ended, as runs/NAME")


def read_steps(path: Path) -> dict[str, list[RecordedStep]]:
    """The groups of steps in a file that `write_steps` or `StepFile` wrote; `Unreadable` if it is another."""
    try:
        content = read_whole(path, LARGEST)
        found = msgspec.msgpack.decode(content, type=dict[str, list[StoredStep]])
        return {name: [_read(step) for step in steps] for name, steps in found.items()}
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        if b'"traceEvents"' in content[:100]:
            raise Unreadable(f"{path} is {A_TRACE}") from None
        said = "it is JSON" if content.lstrip()[:1] in (b"{", b"[") else printable(str(error))
        raise Unreadable(f"{path} has no steps of this version of rrfp_jax: {said}") from None


def _read(step: StoredStep) -> RecordedStep:
    """What is stored, once all of it belongs together; ValueError if not."""
    trace = _trace(step)
    stages, chunks, microbatches = trace.stages, trace.placement.chunks, step.microbatches
    if len(step.buckets) != microbatches:
        raise ValueError(f"{len(step.buckets)} buckets for {microbatches} microbatches")
    budgets = None
    if step.budgets is not None:
        shapes = [[*map(len, own.costs)] for own in step.budgets if own is not None]
        if len(step.budgets) != stages or any(own != [microbatches] * chunks for own in shapes):
            raise ValueError(f"budgets not of {stages} stages, {chunks} chunks, {microbatches} microbatches")
        budgets = [None if b is None else Budget(b.costs, b.limit, b.most) for b in step.budgets]
    work = None
    if step.layers is not None:
        if len(step.split) != trace.placement.last + 1 or sum(step.split) != len(step.layers):
            raise ValueError(f"{len(step.layers)} layers do not split into {step.split}")
        work = Work([LayerWork(*layer) for layer in step.layers], step.split)
    rows = tuple(tuple(trace.order(stage)) for stage in range(stages))
    ran = ListedOrder(trace.placement, microbatches, rows)
    as_it_ran = ran if step.fixed_order else Ranked(ran, reserve=False)
    unnamed = {RECORDED: as_it_ran, RANKED + RECORDED: Ranked(ran)}
    schedule = unnamed.get(step.schedule) or by_name(step.schedule)
    of_rules = {name: getattr(step, name) for name in RULES}
    same = {name: getattr(step, name) for name in STEP}
    rules = StepRules(placement=trace.placement, schedule=schedule, **of_rules)
    return RecordedStep(trace=trace, rules=rules, budgets=budgets, work=lambda: work, **same)


def _trace(step: StoredStep) -> StepTrace:
    placement = Placement(stages := step.stages, chunks := step.chunks, step.shape)
    if step.form != RECORD.format or len(step.records) % RECORD.size or not step.records:
        raise ValueError(f"{len(step.records)} bytes are no records of the form {step.form!r}")
    replicas = len(step.busy_by_replica) or 1
    if any(len(row) != stages for row in step.busy_by_replica) or step.replica >= replicas:
        raise ValueError(f"replica {step.replica} of {replicas}, or times of other than {stages} stages")
    if step.ranks and (len(step.ranks) != stages * replicas or not all(step.ranks)):
        raise ValueError(f"ranks of {len(step.ranks)} stages for {replicas} replicas")
    records = Part(0.0, 0.0, {}, step.records).records()
    for record in records:
        stage, (_, chunk, microbatch), _, *times, _ = record
        inside = 0 <= stage < stages and 0 <= chunk < chunks and 0 <= microbatch < step.microbatches
        sound = 0 <= record.delayed <= record.end - record.start + 1e-9 and record.late >= 0
        if not (inside and sound and all(map(isfinite, times))):
            raise ValueError(f"a record of stage {stage}, task {record.task}, times {times}")
    if len({record[:2] for record in records}) < max(len(records), placement.last + 1):
        raise ValueError(f"step {step.step} has a task twice, or a virtual stage without tasks")
    return StepTrace(step.step, placement, [Part.of(records)], step.replica, step.busy_by_replica)
