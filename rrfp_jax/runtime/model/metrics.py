"""Metrics of a loss: how each is added up over microbatches, replicas, layers and validation steps.

On the devices a metric is one or two numbers in the vector of statistics that a forward gives. On the host
they are brought together in microbatch order, in float64 (`Reduced`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from rrfp_jax.errors import UsageError

Kind: TypeAlias = Literal["per weight", "sum", "max", "mean"]
"""How a metric is reduced; "per weight" is a plain number's."""

Name: TypeAlias = tuple[str, Kind]
"""A metric's name and kind."""


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclass(frozen=True)
class Sum:
    """A metric that is added up: `Loss(..., metrics={"clipped": rrfp.Sum(mask.sum())})`.

    Attributes:
        value: scalar, the microbatch's share.
    """

    value: Any


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclass(frozen=True)
class Max:
    """A metric of which the largest is reported: `{"largest_logit": rrfp.Max(logits.max())}`.

    Attributes:
        value: scalar, the largest of the microbatch. If one is not a number, neither is the metric.
    """

    value: Any


@partial(jax.tree_util.register_dataclass, data_fields=["total", "weight"], meta_fields=[])
@dataclass(frozen=True)
class Mean:
    """A metric with a weight of its own: `{"answer_accuracy": rrfp.Mean(right.sum(), answers.sum())}`.

    It is the sum of all totals over the sum of all weights; not a number where that is 0.

    Attributes:
        total: scalar, the sum over whatever is counted.
        weight: scalar, how much was counted.
    """

    total: Any
    weight: Any


_KINDS: Mapping[type, Kind] = {Sum: "sum", Max: "max", Mean: "mean"}


def numbers_of(metric: Any) -> dict[str, Any]:
    """The numbers of a metric by field; a plain number's field has no name."""
    if type(metric) not in _KINDS:
        return {"": metric}
    return {item.name: getattr(metric, item.name) for item in fields(metric)}


def joined(
    metrics: Sequence[Any], add: Callable[[Sequence[Any]], Any], largest: Callable[[Sequence[Any]], Any]
) -> Any:
    """Several metrics of one kind as one; `add` and `largest` reduce numbers."""
    reduce = largest if isinstance(metrics[0], Max) else add
    numbers = [numbers_of(metric) for metric in metrics]
    found = {name: reduce([own[name] for own in numbers]) for name in numbers[0]}
    return type(metrics[0])(**found) if type(metrics[0]) in _KINDS else found[""]


def kinds_of(losses: Iterable[Mapping[str, Any]]) -> dict[str, Kind]:
    """The kinds of the metrics of several losses by name, sorted; refuses a name with two."""
    kinds: dict[str, Kind] = {}
    for metrics in losses:
        for name, metric in metrics.items():
            kind = _KINDS.get(type(metric), "per weight")
            if kinds.setdefault(name, kind) != kind:
                raise UsageError(
                    f"Loss metric {name!r} is reduced as {kinds[name]!r} by one part of the model and as "
                    f"{kind!r} by another: give one of them another name"
                )
    return dict(sorted(kinds.items()))


@dataclass(frozen=True)
class Reduced:
    """What has been found of a metric so far, in float64; of a mean its total and weight."""

    kind: Kind
    numbers: Sequence[float]

    def __add__(self, other: Reduced) -> Reduced:
        """Of both; numbers are added in the order in which this is called."""
        pairs = zip(self.numbers, other.numbers, strict=True)
        return Reduced(
            self.kind, [float(np.maximum(a, b)) if self.kind == "max" else a + b for a, b in pairs]
        )

    def figure(self, weight: float) -> float:
        """What is reported, where the loss has this weight."""
        if self.kind in ("sum", "max"):
            return self.numbers[0]
        total, by = self.numbers if self.kind == "mean" else (self.numbers[0], weight)
        return total / by if by else math.nan


def add_to(metrics: dict[str, Reduced], names: Iterable[Name], numbers: Sequence[float]) -> None:
    """Add what a vector of statistics holds of metrics to what was found before."""
    rest = iter(numbers)
    for name, kind in names:
        own = Reduced(kind, [*islice(rest, 1 + (kind == "mean"))])
        metrics[name] = metrics[name] + own if name in metrics else own


def figures(metrics: Mapping[str, Reduced], weight: float) -> dict[str, float]:
    """What is reported of all metrics, in the order of their names."""
    return {name: metrics[name].figure(weight) for name in sorted(metrics)}
