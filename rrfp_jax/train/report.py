"""What a step gives back: its numbers, where its time went, and a picture of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rrfp_jax.errors import UsageError
from rrfp_jax.report.explanation import Explanation, TimedStep, explain
from rrfp_jax.report.timeline import Panel, Timeline
from rrfp_jax.runtime.stages.step import Reduced, Sums, figures
from rrfp_jax.trace.records import RecordedStep, StepTrace

LINE = (
    *("step", "schedule", "loss", "tokens_per_second", "step_seconds", "wall_seconds", "load_seconds"),
    *("bubble", "gradient_norm", "parameter_norm", "loss_scale", "applied", "skipped", "peak_bytes", "plan"),
)
"""Of a report, what every line of `metrics.jsonl` has."""

SAME = ("weight", "hyperparams", "load_seconds", "peak_bytes", "budget_bytes", "recorded")
"""Of a report, what is so called in the sums of its step, too."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """One training step.

    Attributes:
        step: its number, from 0.
        schedule: its name, of the one that the step ran by.
        loss: summed loss over summed weight, before the update.
        weight: summed weight (tokens, for a language model).
        metrics: the loss function's named metrics, each divided by the weight or reduced as it asks.
        hyperparams: those of the step's update that `optax.inject_hyperparams` keeps in the optimizer's
            state, such as "learning_rate"; empty without.
        step_seconds: from the first task's dispatch to the end of the last task, over all stages.
        wall_seconds: the whole step: data, planning, tasks, waiting for the update before.
        load_seconds: how long it waited for its data, in the process where that took longest.
        planning_seconds: how long its order was planned before it (`schedules.Planned`); None if it was not.
        predicted_seconds: how long `step_seconds` would be by the costs that the plan went by.
        bubble: per stage, the share of `step_seconds` in which it did not compute.
        ranks: per replica and stage, one after the other, the ranks of its processes.
        gradient_norm: of the whole gradient before clipping; tied parameters count once, frozen ones do not.
        parameter_norm: of the same parameters, before the update.
        loss_scale: that the loss was multiplied by.
        applied: whether the update was made; it is not if the loss or the gradient is not finite.
        skipped: steps so far whose update was left out.
        peak_bytes: per stage, the most that was there for microbatches: inputs that arrive or wait, what is
            held between programs, outputs until delivered, and what a program needs while it runs.
        budget_bytes: per stage, how much that may be; None without a limit in bytes.
        plan: hash of the step's data plan.
        compiled: programs that this process compiled in the step, for shapes that were not there before.
        recorded: the tasks with their times, and the rules that they were chosen by.
    """

    step: int
    schedule: str
    loss: float
    weight: float
    metrics: Mapping[str, float]
    hyperparams: Mapping[str, float]
    step_seconds: float
    wall_seconds: float
    load_seconds: float
    planning_seconds: float | None = None
    predicted_seconds: float | None = None
    bubble: Sequence[float]
    ranks: Sequence[Sequence[int]]
    gradient_norm: float
    parameter_norm: float
    loss_scale: float
    applied: bool
    skipped: int
    peak_bytes: Sequence[int]
    budget_bytes: Sequence[int | None]
    plan: str
    compiled: int = 0
    recorded: RecordedStep

    @classmethod
    def of(cls, sums: Sums, **known: Any) -> Report:
        """What the sums of a step say, and the fields that they do not say."""
        trace = sums.recorded.trace
        return cls(
            step=trace.step,
            loss=sums.total / sums.weight,
            metrics=figures(sums.metrics, sums.weight),
            step_seconds=trace.makespan,
            bubble=trace.bubble(),
            parameter_norm=math.sqrt(sums.norms.squared_of_parameters),
            **{name: getattr(sums, name) for name in SAME},
            **known,
        )

    @property
    def trace(self) -> StepTrace:
        """The tasks with their times."""
        return self.recorded.trace

    @property
    def tokens_per_second(self) -> float:
        """Summed weight per second of the whole step."""
        return self.weight / self.wall_seconds

    def timeline(self) -> Timeline:
        """A picture, stage by time, that notebooks show; `.save("step.png")` writes it to a file."""
        return Timeline([Panel(f"{self.schedule}, step {self.step}", self.recorded)])

    def explain(self) -> Explanation:
        """Why the step took as long as it did: a sentence, where its time went, what changes would save.

        It simulates the step some twenty times, which takes up to some seconds.
        """
        wall = max(self.wall_seconds, self.step_seconds)
        return explain([TimedStep(self.recorded, wall, self.load_seconds, self.planning_seconds or 0.0)])

    def as_dict(self) -> dict[str, Any]:
        """The step's line of `metrics.jsonl`; None for numbers that are not finite, which JSON lacks."""
        line = {name: getattr(self, name) for name in LINE}
        if self.hyperparams:
            line["hyperparams"] = _finite(self.hyperparams)
        if set(self.budget_bytes) != {None}:
            line["budget_bytes"] = self.budget_bytes
        if self.planning_seconds is not None:
            line |= {name: getattr(self, name) for name in ("planning_seconds", "predicted_seconds")}
        return _finite({**line, **self.metrics})

    def __repr__(self) -> str:
        return f"Report({self})"

    def __str__(self) -> str:
        metrics = "".join(f"  {name} {value:.4f}" for name, value in self.metrics.items())
        rates = [value for name, value in self.hyperparams.items() if name.endswith("learning_rate")]
        rate = f"  lr {' '.join(f'{value:.2e}' for value in rates)}" if rates else ""
        planned = "" if self.planning_seconds is None else f"  planned in {self.planning_seconds:.1f} s"
        made = f"  compiled {self.compiled} program{'s' * (self.compiled > 1)}" if self.compiled else ""
        left_out = "" if self.applied else f"  not finite, skipped ({self.skipped} so far)"
        return (
            f"step {self.step:5d}  loss {self.loss:.4f}{metrics}{rate}  norm {self.gradient_norm:.3f}  "
            f"{self.tokens_per_second:9,.0f} tokens/s  {self.wall_seconds * 1e3:7.1f} ms  "
            f"idle {summary_of_idleness(self.bubble)}{planned}{made}{left_out}"
        )


def _finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """The same with None for numbers that are not finite."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}


VALIDATION = "validation_"
"""How the names of a validation's figures begin in `metrics.jsonl`; those of metrics must not."""

REPORTED = frozenset(item.name for item in fields(Report)) - {"metrics", "recorded"} | {
    *("total", "tokens_per_second", "resumed")
}
"""Names of a report's own figures, and of what stands beside them in `metrics.jsonl`: taken for metrics."""


def summary_of_idleness(bubble: Sequence[float]) -> str:
    """Idle shares of all stages as percentages."""
    return " ".join(f"{share:3.0%}" for share in bubble)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A forward-only pass over data: its loss and metrics, reduced over all its steps as over one."""

    loss: float
    weight: float
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        figures = {"loss": self.loss, **self.metrics}
        said = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        return f"{said}  over a weight of {self.weight:,.0f}"

    def as_dict(self) -> dict[str, Any]:
        """What the line of the step before it has of it in `metrics.jsonl`."""
        figures = {"loss": self.loss, **self.metrics}
        return _finite({f"{VALIDATION}{name}": value for name, value in figures.items()})

    @classmethod
    def of(cls, found: Sequence[Sums]) -> Evaluation:
        """What the steps of a pass add up to.

        Raises:
            UsageError: nothing is counted.
        """
        weight = sum(sums.weight for sums in found)
        if not weight > 0:
            raise UsageError(
                f"the summed loss weight of the evaluation is {weight}: nothing is counted; give data whose "
                f"loss has a weight above 0, such as a mask with ones"
            )
        metrics: dict[str, Reduced] = {}
        for sums in found:
            metrics |= {n: metrics[n] + own if n in metrics else own for n, own in sums.metrics.items()}
        loss = sum(sums.total for sums in found) / weight
        return cls(loss=loss, weight=weight, metrics=figures(metrics, weight))
