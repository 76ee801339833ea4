"""`rrfp.simulate`: what schedules would cost, in virtual time, as a table, a file, a trace and a picture."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from types import NoneType
from typing import Any, TypeAlias

from rrfp_jax.core.admission import Accumulation
from rrfp_jax.core.hints import Hint
from rrfp_jax.core.orders import FixedOrder
from rrfp_jax.core.schedules import Schedule, by_name, name_of
from rrfp_jax.core.step_rules import default_max_in_flight
from rrfp_jax.errors import UsageError, refusing
from rrfp_jax.fields import output_of, path_of, printable, shown
from rrfp_jax.json_files import Unreadable, load_json
from rrfp_jax.report.perfetto import write_trace
from rrfp_jax.report.store import A_TRACE, read_steps, steps_in
from rrfp_jax.report.timeline import Panel, Timeline
from rrfp_jax.sim.choice import Auto
from rrfp_jax.sim.engine import Links
from rrfp_jax.sim.planned import EVALUATIONS, Planned
from rrfp_jax.studies.compare import COLUMNS, Conditions, Outcome, compare, outcome_of
from rrfp_jax.studies.families import FAMILIES, Step
from rrfp_jax.studies.families import by_name as family_by_name
from rrfp_jax.trace.costs import CostTable, Workload, workload_of
from rrfp_jax.trace.jitter import by_name as jitter_by_name
from rrfp_jax.train.named import AUTO, schedule_of

MICROBATCHES = 32
"""Of a step, unless somebody says otherwise, or a file does."""

Source: TypeAlias = Workload | Mapping[str, Any] | str | Path
"""A workload, as an object, as what `json.load` makes of one, or as a file; a run's folder, its
steps.msgpack or its costs.json; or the name of a family."""


def simulation_inputs(
    source: Source, stages: int, microbatches: int | None, seeds: int, times: int
) -> Sequence[Step]:
    """The steps of a source."""
    count = MICROBATCHES if microbatches is None else microbatches
    is_file = isinstance(source, str) and (source.endswith((".json", ".msgpack")) or os.path.isdir(source))
    if isinstance(source, str) and (source in FAMILIES or not is_file):
        family = family_by_name(source)
        return [family(stages, count, seed) for seed in range(seeds)]
    if isinstance(source, str | Path):
        return _of_file(path_of("file", source), microbatches, seeds, times)
    if not isinstance(source, Workload):
        source = Workload.from_json_object(dict(source) if isinstance(source, Mapping) else source)
    return [Step(source, source)] * times


def _of_file(path: Path, microbatches: int | None, seeds: int, times: int) -> Sequence[Step]:
    try:
        if path.is_dir() or path.suffix == ".msgpack":
            return _of_run(steps_in(path) if path.is_dir() else path, microbatches, seeds)
        content = load_json(path)
        if isinstance(content, dict) and "traceEvents" in content:
            raise Unreadable(f"{path} is {A_TRACE}")
        if isinstance(content, dict) and content and all(isinstance(own, dict) for own in content.values()):
            buckets = CostTable.from_json_object(content)
            count = MICROBATCHES if microbatches is None else microbatches
            workload = buckets.workload(list(islice(cycle(buckets.buckets), count)))
        else:
            workload = Workload.from_json_object(content)
            _refuse(path, microbatches)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (UsageError, Unreadable) as error:
        raise UsageError(str(error)) from None
    except ValueError as error:
        raise UsageError(f"{path}: no workload: {printable(str(error))}") from None
    return [Step(workload, workload)] * times


def _of_run(path: Path, microbatches: int | None, seeds: int) -> Sequence[Step]:
    """The latest steps that trained, of whatever was recorded last."""
    _refuse(path, microbatches)
    groups = [[step for step in steps if not step.rules.forward_only] for steps in read_steps(path).values()]
    groups = [steps for steps in groups if steps]
    if not groups:
        raise UsageError(f"{path}: it has no step that trained: give the steps of a run that has")
    if len(groups) > 1:
        raise UsageError(f"{path}: it has steps of {len(groups)} schedules; give the steps of one run")
    ran = groups[0][-seeds:]
    if len(ran) < seeds:
        raise UsageError(f"{path}: it has {len(ran)} steps that trained; give --seeds={len(ran)} or less")
    return [Step(own, own, step) for own, step in zip(map(workload_of, ran), ran, strict=True)]


def _refuse(path: Path, microbatches: int | None) -> None:
    if microbatches is not None:
        raise UsageError(f"microbatches={microbatches} is for a family or a costs.json: {path} has its own")


PLANNED, AS_IT_RAN = "planned", "as it ran"
BASELINE = "1f1b"
SCHEDULES = (BASELINE, "bf")

MOST_FORWARDS, MOST_SEEDS = 1_000_000, 10_000
"""Stages x microbatches x chunks of one simulated step, and how many of them."""


class Comparison(dict[str, Outcome]):
    """What each schedule did, by name. Printed it is a table, as it is in a notebook.

    Args:
        outcomes: by name.
        baseline: of 1F1B on the same steps, for the speedups.
    """

    def __init__(self, outcomes: Mapping[str, Outcome], baseline: Outcome) -> None:
        super().__init__(outcomes)
        self._baseline = baseline

    def speedup(self, name: str) -> float:
        """How many times as long 1F1B takes; median over the steps."""
        return self[name].speedup_over(self._baseline)

    def as_json_object(self) -> dict[str, Any]:
        """Per schedule its makespan (s) and, by stage, its order, and the other figures of the table."""
        return {name: _figures(outcome, self.speedup(name)) for name, outcome in self.items()}

    def write_trace(self, path: str | Path) -> None:
        """The first step of each schedule, for ui.perfetto.dev.

        Raises:
            UsageError: no way to write there.
        """
        steps = {name: [outcome.recorded] for name, outcome in self.items()}
        write_trace(output_of("path", path), steps, clock="virtual")

    def timeline(self) -> Timeline:
        """The first step of each schedule, as a picture that notebooks show; `.save("a.png")` writes it."""
        return Timeline([_panel(name, outcome) for name, outcome in self.items()])

    def __str__(self) -> str:
        from rrfp_jax.report.explanation import as_text  # as long to import as a small simulation takes

        shares = {name: _mean_shares(outcome) for name, outcome in self.items()}
        kinds = [kind for kind in COLUMNS if kind in SHOWN or any(own[kind] for own in shares.values())]
        rows = [["schedule", "makespan", f"vs {BASELINE}", "idle", *kinds, "in flight", "MiB", "above bound"]]
        for name, outcome in self.items():
            idle = [shares[name][kind] for kind in kinds]
            rows.append([name, *_cells(outcome, self.speedup(name), idle)])
            for chosen, times in Counter(outcome.chosen).most_common():
                rows.append([f"  {chosen}" + (f", {times} x" if len(outcome.chosen) > 1 else "")])
        return as_text(120, rows)

    def __repr__(self) -> str:
        return f"Comparison of {', '.join(self)}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _panel(name: str, outcome: Outcome) -> Panel:
    chosen = f" ({outcome.chosen[0]})" if outcome.chosen else ""
    how = "measured" if name == AS_IT_RAN else "simulated"
    return Panel(f"{name}{chosen}, {how}", outcome.recorded)


def _mean_shares(outcome: Outcome) -> dict[str, float]:
    """Of each kind of idleness, over the steps; parts that would be shown as zero are zero."""
    means = {kind: fmean(step[kind] for step in outcome.idle) for kind in COLUMNS}
    return {kind: share if share >= LEAST_SHOWN else 0.0 for kind, share in means.items()}


def _cells(outcome: Outcome, speedup: float, shares: Sequence[float]) -> list[str]:
    return [
        f"{outcome.makespan:.4f} s",
        f"{speedup:.3f} x",
        f"{outcome.bubble:.1%}",
        *(f"{share:.1%}" for share in shares),
        str(outcome.in_flight),
        "-" if outcome.bytes is None else f"{outcome.bytes / 2**20:,.0f}",
        f"{max(outcome.above_bound, 0.0):.1%}",  # it may be rounded below
    ]


SHOWN = ("stall", "blocked", "held")
"""Columns that every table has. A step's host has a share in measured steps only."""

LEAST_SHOWN = 0.0005
"""Of a share: 0.1 % in a table."""


def _figures(outcome: Outcome, speedup: float) -> dict[str, Any]:
    trace = outcome.trace
    chosen = {"chosen": list(outcome.chosen)} if outcome.chosen else {}
    return {
        "makespan": outcome.makespan,
        "order": [[str(task) for task in trace.order(stage)] for stage in range(trace.stages)],
        "makespans": list(outcome.makespans),
        "lower_bounds": list(outcome.bounds),
        "speedup_over_1f1b": speedup,
        "bubble": outcome.bubble,
        "idle": [dict(shares) for shares in outcome.idle],
        "peak_in_flight": outcome.in_flight,
        "peak_bytes": outcome.bytes,
        **chosen,
    }


def simulate(
    workload: Source,
    schedules: Sequence[str | Schedule | Auto] = SCHEDULES,
    *,
    stages: int = 8,
    microbatches: int | None = None,
    seeds: int = 1,
    limit: int | None = None,
    byte_limit: int | None = None,
    chunks: int = 1,
    links: Links = "parallel",
    accumulation: Accumulation | None = None,
    spare_gradients: int | None = None,
    jitter: str = "J0",
    evaluations: int = EVALUATIONS,
) -> Comparison:
    """What schedules would cost on a workload, by the same scheduling core that runs the training.

    Args:
        workload: tables of seconds (`benchmarks/paced.md`): as a file, or as what `json.load` makes of one; a
            run's steps.msgpack, whose latest steps are taken, or its costs.json; or the name of a family of
            workloads (`rrfp_jax/studies/families.py`).
        schedules: names of schedules, "ranked:ORDER", "auto", "planned", "csv:FILE", or schedules.
        stages: of a family's steps.
        microbatches: of a family's steps, and of a costs.json, whose buckets take turns; None for 32.
        seeds: how many steps are drawn, or taken of a run; all schedules get the same.
        limit: most microbatches in flight on a stage under a hint or a plan, each counted until its last
            releasing task; None for what a `Trainer` takes: twice the number of stages, or as many as fit if
            there is a `byte_limit`; of a run, for its own limits, if it had some and there is no
            `byte_limit`. 0 for no limit. Fixed orders hold what they hold.
        byte_limit: the same in bytes, for workloads that say what microbatches hold.
        chunks: a stage, for schedules that are defined for several; with 1 a run's own keeps its placement.
        links: "parallel", "serial" or "synchronous" transfers (`rrfp_jax/sim/engine.py`).
        accumulation, spare_gradients: as for a `Trainer`; None for its defaults, of a run for its own.
        jitter: delays injected as in the paper, J0 (none) to J3, paired by seed; a run as it ran, which had
            none, is left out then.
        evaluations: simulations that a planner may spend on each step.

    Raises:
        UsageError: what cannot be simulated, with the reason.
    """
    count = MICROBATCHES if microbatches is None else microbatches
    _check_counts(1, stages=stages, microbatches=count, seeds=seeds, chunks=chunks, evaluations=evaluations)
    _check_counts(1, or_none=True, byte_limit=byte_limit)
    _check_counts(0, or_none=True, spare_gradients=spare_gradients, limit=limit)
    if stages * count * chunks > MOST_FORWARDS:
        sizes = f"stages={shown(stages)}, microbatches={shown(count)}, chunks={shown(chunks)}"
        raise UsageError(f"{sizes}: a simulated step has at most {MOST_FORWARDS:,} forwards")
    if seeds > MOST_SEEDS:
        raise UsageError(f"seeds={shown(seeds)}: give at most {MOST_SEEDS}")
    schedules = _schedules(schedules)
    with refusing():
        times = seeds if jitter != "J0" else 1  # of a workload, whose steps differ by jitter only
        steps = simulation_inputs(workload, stages, microbatches, seeds, times)
        usual = default_max_in_flight(steps[0].actual.stages) if byte_limit is None else None
        given = Conditions(
            limit=usual if limit is None else limit or None,
            byte_limit=byte_limit,
            as_ran=limit is None and byte_limit is None,
            chunks=chunks,
            links=links,
            accumulation=accumulation,
            spare_gradients=spare_gradients,
            evaluations=evaluations,
            jitter=None if jitter == "J0" else jitter_by_name(jitter),
        )
        outcomes = compare(dict(map(_named, schedules)), steps, given)
        baseline = outcomes.get(BASELINE) or compare({BASELINE: by_name(BASELINE)}, steps, given)[BASELINE]
    ran = [step.ran for step in steps if step.ran is not None]
    as_it_ran = {AS_IT_RAN: outcome_of(ran)} if ran and jitter == "J0" else {}  # no jitter was injected then
    return Comparison(as_it_ran | outcomes, baseline)


def _schedules(schedules: Any) -> Sequence[str | Schedule | Auto]:
    if isinstance(schedules, str | Hint | FixedOrder | Planned | Auto):
        schedules = [schedules]
    if not isinstance(schedules, Sequence | NoneType):
        raise UsageError(f"schedules={shown(schedules)}: give a list of schedules, such as {list(SCHEDULES)}")
    if not schedules:
        raise UsageError(f"no schedules given: name some, such as {', '.join(SCHEDULES)}")
    return schedules


def _check_counts(least: int, or_none: bool = False, **counts: int | None) -> None:
    for name, value in counts.items():
        if not (or_none and value is None) and (type(value) is not int or value < least):
            raise UsageError(f"{name}={shown(value)}: give a whole number, at least {least}")


def _named(schedule: str | Schedule | Auto) -> tuple[str, Schedule | Auto | None]:
    """A schedule's name, and the schedule: None for an order that is planned."""
    if isinstance(schedule, Auto) or schedule == AUTO:
        return AUTO, schedule if isinstance(schedule, Auto) else Auto()
    if schedule == PLANNED:
        return PLANNED, None
    made = schedule_of(schedule, (AUTO, PLANNED))
    return schedule if isinstance(schedule, str) else name_of(made), made
