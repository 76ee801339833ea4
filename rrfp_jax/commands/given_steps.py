"""Which steps `rrfp sim` simulates: a family's, a workload's, or those that a run left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import path_of, printable
from rrfp_jax.json_files import Unreadable, load_json
from rrfp_jax.report.store import STEPS, read_steps
from rrfp_jax.sim.families import Step
from rrfp_jax.sim.families import by_name as family_by_name
from rrfp_jax.trace.costs import CostTable, Workload, workload_of

MICROBATCHES = 32
"""Of a step, unless somebody says otherwise, or a file does."""

Source: TypeAlias = Workload | Mapping[str, Any] | str | Path
"""A workload, as an object, as what `json.load` makes of one, or as a file; a run's folder, its
steps.msgpack or its costs.json; or the name of a family."""


def given_steps(
    source: Source, *, stages: int, microbatches: int | None, seeds: int, times: int
) -> Sequence[Step]:
    """The steps of a source.

    Args:
        source: see there.
        stages: of a family's steps.
        microbatches: of a family's steps, and of a cost table's, whose buckets take turns; None for 32.
        seeds: how many of a family's steps, or of the latest of a run.
        times: how often a step is taken of which there is but one.

    Raises:
        UsageError: a file that cannot be read, or that is none of these; a number that its file settles.
        ValueError: an unknown family, or a mapping that is no workload.
    """
    count = MICROBATCHES if microbatches is None else microbatches
    if isinstance(source, str) and not source.endswith((".json", ".msgpack")):
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
            return _of_run(path / STEPS if path.is_dir() else path, microbatches, seeds)
        content = load_json(path)
        if isinstance(content, dict) and "traceEvents" in content:
            read_steps(path)  # says why it is not
        if isinstance(content, dict) and content and all(isinstance(own, dict) for own in content.values()):
            buckets = CostTable.from_json_object(content)
            count = MICROBATCHES if microbatches is None else microbatches
            workload = buckets.workload(list(islice(cycle(buckets.buckets), count)))
        else:
            workload = Workload.from_json_object(content)
            _refuse(path, microbatches)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except Unreadable as error:
        raise UsageError(str(error)) from None
    except ValueError as error:
        raise UsageError(f"{path}: no workload: {printable(str(error))}") from None
    return [Step(workload, workload)] * times


def _of_run(path: Path, microbatches: int | None, seeds: int) -> Sequence[Step]:
    """The latest steps that trained, of whatever was recorded last."""
    _refuse(path, microbatches)
    groups = [
        [step.recorded for step in steps if not step.recorded.rules.forward_only]
        for steps in read_steps(path).values()
    ]
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
