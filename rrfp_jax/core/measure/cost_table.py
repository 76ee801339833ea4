"""How long tasks and transfers take, by shape bucket. The durations of any step of a run follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from statistics import median

from rrfp_jax.core.measure.costs import link_row
from rrfp_jax.core.measure.recorded_step import RecordedStep
from rrfp_jax.core.measure.workload import Table, Workload
from rrfp_jax.core.tasks import BACKWARD, FORWARD, INPUT, WEIGHT, Kind

BACKWARDS = ("backward_input", "backward_weight")

PARTS: Mapping[Kind, tuple[str, ...]] = {
    FORWARD: ("forward",),
    BACKWARD: BACKWARDS,
    INPUT: BACKWARDS[:1],
    WEIGHT: BACKWARDS[1:],
}
"""The tables of a workload that have a share in a task of each kind."""

TRANSFERS = {FORWARD: "transfer_forward", BACKWARD: "transfer_backward", INPUT: "transfer_backward"}


@dataclass(frozen=True, repr=False)
class CostTable:
    """By the name of each bucket, a workload of one microbatch of it (s).

    Raises:
        ValueError: no bucket, one with several microbatches, or unequal numbers of stages.
    """

    buckets: Mapping[str, Workload]

    def __post_init__(self) -> None:
        if not self.buckets:
            raise ValueError("the cost table is empty: give a workload of one microbatch for each bucket")
        stages = next(iter(self.buckets.values())).stages
        for name, workload in self.buckets.items():
            if (workload.stages, workload.microbatches) != (stages, 1):
                raise ValueError(
                    f"bucket {name!r} has {workload.stages} stages and {workload.microbatches} microbatches: "
                    f"give one microbatch on the same number of stages as the others, {stages}"
                )

    def __repr__(self) -> str:
        """Short, and another for another table."""
        digest = sha256(repr(sorted(self.buckets.items())).encode()).hexdigest()[:8]
        return f"CostTable({len(self.buckets)} buckets, {digest})"

    def workload(self, names: Sequence[str]) -> Workload:
        """Of a step whose microbatches are of these buckets.

        Raises:
            ValueError: the table lacks one.
        """
        for name in names:
            if name not in self.buckets:
                raise ValueError(
                    f"the cost table lacks the bucket {name}; it has {'; '.join(self.buckets)}: take the "
                    f"costs.json of a run with such microbatches, or leave the costs out"
                )

        def table(part: str) -> Table:
            tables: list[Table] = [getattr(self.buckets[name], part) for name in names]
            return tuple(tuple(chain(*rows)) for rows in zip(*tables, strict=True))

        return Workload(**{part: table(part) for part in ("forward", *BACKWARDS, *_LINKS)})

    @classmethod
    def from_json_object(cls, data: object) -> CostTable:
        """The table of a file, from what `json.load` made of it.

        Raises:
            ValueError: it is none; what the class itself refuses.
        """
        if not isinstance(data, dict):
            raise ValueError(
                f"a cost table is a {type(data).__name__}: give an object with a workload a bucket"
            )
        found = {}
        for name, workload in data.items():
            try:
                found[name] = Workload.from_json_object(workload)
            except ValueError as error:
                raise ValueError(f"bucket {name!r}: {error}") from None
        return cls(found)

    def as_json_object(self) -> dict[str, dict[str, list[list[float]]]]:
        """As `json.dump` takes it; `from_json_object` gives back an equal table."""
        return {name: workload.as_json_object() for name, workload in self.buckets.items()}


def measured(steps: Iterable[RecordedStep]) -> CostTable | None:
    """The medians of what steps took that have run; None without any.

    A transfer is from a task's end to the moment that the receiver knew. Of a fused backward each half counts
    as half; the chunks of a stage add up.

    Args:
        steps: each with a backward.
    """
    samples: dict[str, dict[str, list[list[float]]]] = {}  # by bucket and part of a workload, of each stage
    for step in steps:
        trace, names = step.trace, step.buckets
        sums: dict[tuple[str, int, int], float] = {}
        links: list[tuple[str, int, int, float]] = []
        for record in trace.records:
            kind, _, j = record.task
            parts = PARTS[kind]
            for part in parts:
                place = part, record.stage, j
                sums[place] = sums.get(place, 0.0) + (record.end - record.start) / len(parts)
            receiver = trace.receiver(record)
            if receiver is not None and receiver.stage != record.stage:
                row = link_row(trace.placement, record.stage, receiver.stage, kind)
                links.append((TRANSFERS[kind], row, j, max(0.0, receiver.ready - record.end)))
        for part, stage, j, seconds in chain(((*place, found) for place, found in sums.items()), links):
            parts_of = samples.setdefault(names[j], {})
            parts_of.setdefault(part, [[] for _ in range(trace.stages)])[stage].append(seconds)
    if not samples:
        return None
    return CostTable({name: _medians(samples[name]) for name in sorted(samples)})


def workload_of(step: RecordedStep) -> Workload:
    """What each microbatch of a step took, chunks of a stage together; with what it was charged in bytes.

    Args:
        step: with a backward.
    """
    names = [str(j) for j in range(step.rules.microbatches)]
    table = measured([replace(step, buckets=names)])
    assert table is not None, "a step has microbatches"
    workload = table.workload(names)
    budgets = [budget for budget in step.budgets or () if budget is not None]
    if len(budgets) < workload.stages:
        return workload
    charges = tuple(tuple(map(float, map(sum, zip(*budget.costs, strict=True)))) for budget in budgets)
    return replace(workload, activation_bytes=charges)


_LINKS = ("transfer_forward", "transfer_backward")


def _medians(parts: Mapping[str, Sequence[Sequence[float]]]) -> Workload:
    none: Sequence[Sequence[float]] = [()] * len(parts["forward"])
    return Workload(
        **{
            part: tuple((median(found) if found else 0.0,) for found in parts.get(part, none))
            for part in ("forward", *BACKWARDS, *_LINKS)
        }
    )
