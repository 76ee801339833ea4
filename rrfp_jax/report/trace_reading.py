"""Trace files read again: the form in which `trace_file` writes them, as schemas."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec

from rrfp_jax.core.events import WaitCause
from rrfp_jax.core.tasks import KINDS, Kind, Placement, Task
from rrfp_jax.fields import printable
from rrfp_jax.json_files import Seconds, Unreadable, as_kind, load_json
from rrfp_jax.report.perfetto import DELAY, RulesText
from rrfp_jax.trace.records import Part, RecordedStep, StepTrace, TaskRecord

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""Of a stage, a task or a step, as records have it."""

Microseconds: TypeAlias = Seconds
Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""In microseconds; what a step begins with may have been ready before it."""

if TYPE_CHECKING:
    Letter: TypeAlias = str
else:
    Letter = Literal[tuple(row.letter for row in KINDS)]

BESIDE = ("idle", DELAY, "process_name", "thread_name")
"""Names of events that say nothing which others do not say."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema whose keys are all that there may be."""


class _Name(msgspec.Struct, frozen=True, kw_only=True, tag_field="ph", tag="M"):
    """The name of a group of steps, or of a stage; or what a step was decided by."""

    name: Literal["process_name", "thread_name", "step_rules"]
    pid: Number
    args: dict[str, Any]


class _Group(_Strict, frozen=True, kw_only=True):
    """What a group's name comes with; no placement if it has no steps."""

    name: str
    placement: dict[str, Any] | None

    @property
    def placed(self) -> Placement | None:
        """Where its virtual stages are."""
        return None if self.placement is None else as_kind(self.placement, Placement)


class _Replicas(_Strict, frozen=True, kw_only=True):
    """Which replica the tasks are of, and how long the stages of each were busy; absent if there is one."""

    shown: Number
    busy: list[list[Microseconds]]

    def of(self, trace: StepTrace) -> StepTrace:
        """The trace with that."""
        if self.shown >= len(self.busy) or {len(row) for row in self.busy} != {trace.stages}:
            raise ValueError(f"step {trace.step} lacks the busy times of its replica's {trace.stages} stages")
        seconds = [[own * 1e-6 for own in row] for row in self.busy]
        return replace(trace, replica=self.shown, busy_by_replica=seconds)


class _Rules(_Strict, frozen=True, kw_only=True):
    """What a step was decided by; None for the same as the step before it."""

    step: Number
    rules: RulesText | None
    replicas: _Replicas | None = None

    def recorded(self, trace: StepTrace) -> RecordedStep:
        """The step of this trace; its rules are known."""
        assert self.rules is not None
        return self.rules.step(trace if self.replicas is None else self.replicas.of(trace))


class _Slice(msgspec.Struct, frozen=True, kw_only=True, tag_field="ph", tag="X"):
    """A task, or a time in which nothing was done."""

    name: str
    cat: Literal["task"]
    pid: Number
    tid: Number
    ts: Moment
    dur: Microseconds
    args: dict[str, Any]


class _Task(_Strict, frozen=True, kw_only=True):
    """What a task's slice comes with."""

    kind: Letter
    stage: Number
    chunk: Number
    microbatch: Number
    bucket: Number
    step: Number
    ready: Moment
    dispatched: Moment
    delayed: Microseconds = 0.0
    late: Microseconds = 0.0
    held: WaitCause | None = None


class _Leaves(msgspec.Struct, frozen=True, tag_field="ph", tag="s"):
    """Where an arrow begins: a transfer, of which tasks say all."""


class _Comes(msgspec.Struct, frozen=True, tag_field="ph", tag="f"):
    """Where an arrow ends."""


class _Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file."""

    events: list[_Name | _Slice | _Leaves | _Comes] = msgspec.field(name="traceEvents")


def read_trace(path: Path) -> dict[str, list[RecordedStep]]:
    """The groups of steps that `write_trace` wrote there, in seconds, each from 0, to the nanosecond.

    Raises:
        Unreadable: not such a file.
    """
    try:
        return _groups(as_kind(load_json(path), _Trace).events)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        said = printable(str(error))
        raise Unreadable(f"{path} is not a trace.json of rrfp-train or rrfp-sim: {said}") from None


def _groups(events: Sequence[Any]) -> dict[str, list[RecordedStep]]:
    named = [event for event in events if isinstance(event, _Name) and event.name == "process_name"]
    groups = {event.pid: as_kind(event.args, _Group) for event in named}
    placements = {pid: group.placed for pid, group in groups.items()}
    steps: dict[int, dict[int, list[TaskRecord]]] = {pid: {} for pid in groups}
    rules: dict[int, dict[int, _Rules]] = {pid: {} for pid in groups}
    for event in events:
        if isinstance(event, _Leaves | _Comes) or event.name in BESIDE:
            continue
        if event.pid not in groups:
            raise ValueError(f"{event.name} is of process {event.pid}, which has no name")
        if isinstance(event, _Name):
            _add_rules(rules[event.pid], as_kind(event.args, _Rules))
        else:
            args = as_kind(event.args, _Task)
            record = _record(event, args, placements[event.pid])
            steps[event.pid].setdefault(args.step, []).append(record)
    found = {group.name: _steps(placements[pid], steps[pid], rules[pid]) for pid, group in groups.items()}
    if len(found) < len(named):
        raise ValueError("two groups of steps have the same name or number")
    return found


def _add_rules(rules: dict[int, _Rules], of: _Rules) -> None:
    """Note a step's rules, after those of the steps before it."""
    last = next(reversed(rules.values()), of)
    given = last.rules if of.rules is None else of.rules
    if given is None or of.step in rules:
        raise ValueError(f"step {of.step} has no rules, or has them twice")
    rules[of.step] = _Rules(step=of.step, rules=given, replicas=of.replicas)


def _steps(
    placement: Placement | None, steps: Mapping[int, Sequence[TaskRecord]], rules: Mapping[int, _Rules]
) -> list[RecordedStep]:
    if steps.keys() != rules.keys() or (steps and placement is None):
        raise ValueError("the steps with tasks are not those with rules")
    found = []
    for number, records in steps.items():
        assert placement is not None
        if len({record[:2] for record in records}) < max(len(records), placement.last + 1):
            raise ValueError(f"step {number} has a task twice, or a virtual stage without tasks")
        found.append(rules[number].recorded(StepTrace(number, placement, [Part.of(records)])))
    return found


def _record(event: _Slice, args: _Task, placement: Placement | None) -> TaskRecord:
    task = Task(Kind.of(args.kind), args.chunk, args.microbatch)
    if placement is None or args.stage >= placement.stages or args.chunk >= placement.chunks:
        raise ValueError(f"{event.name} is of stage {args.stage}, chunk {args.chunk}; there is no such place")
    if (event.name, event.tid) != (str(task), args.stage):
        raise ValueError(f"{event.name} on track {event.tid} says that it is {task} on stage {args.stage}")
    if args.delayed > event.dur:
        raise ValueError(f"{event.name} took {event.dur:g} us, of which {args.delayed:g} us were injected")
    times = (args.ready, args.dispatched, event.ts, event.ts + event.dur, args.delayed, args.late)
    seconds: list[Any] = [time * 1e-6 for time in times]
    return TaskRecord(args.stage, task, args.bucket, *seconds)._replace(held=args.held)
