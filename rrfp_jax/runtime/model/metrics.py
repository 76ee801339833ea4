"""A microbatch's loss and its metrics: how each is added up over layers, microbatches, replicas and steps.

On the devices a metric is one or two numbers in the vector of statistics that a forward gives. On the host
they are brought together in microbatch order, in float64 (`Reduced`, in `stages/step.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import says_its_arguments, shown
from rrfp_jax.runtime.model.user_errors import NUMBERS

Kind: TypeAlias = Literal["per weight", "sum", "max", "mean"]
"""How a metric is reduced; "per weight" is a plain number's."""

Name: TypeAlias = tuple[str, Kind]
"""A metric's name and kind."""


@partial(jax.tree_util.register_dataclass, data_fields=["total", "weight", "metrics"], meta_fields=[])
@says_its_arguments({name: f"write metrics={{'{name}': ...}}" for name in ("acc", "accuracy", "aux", "logs")})
@dataclass(frozen=True)
class Loss:
    """A microbatch's share of the objective: sums, never means.

    The objective of a step is the sum of all totals over the sum of all weights, so gradients are those of
    the whole batch however it is cut. An auxiliary term returned by a layer usually has weight 0: it adds to
    the numerator only.

    Attributes:
        total: scalar, the sum of the loss over whatever is counted.
        weight: scalar, how much was counted (tokens, rows).
        metrics: named scalar sums, reported divided by the step's weight. `rrfp.Sum`, `rrfp.Max` and
            `rrfp.Mean` around one have it reduced otherwise.
    """

    total: Any
    weight: Any = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)


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


def kinds_of(losses: Iterable[Mapping[str, Any]]) -> dict[str, Kind]:
    """The kinds of the metrics of several losses by name, sorted; refuses a name with two."""
    metrics = ((name, metric) for own in losses for name, metric in own.items())
    return _one_of_each((name, _KINDS.get(type(metric), "per weight")) for name, metric in metrics)


def _one_of_each(names: Iterable[Name]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for name, kind in names:
        if kinds.setdefault(name, kind) != kind:
            raise UsageError(
                f"Loss metric {name!r} is reduced as {kinds[name]!r} by one part of the model and as "
                f"{kind!r} by another: give one of them another name"
            )
    return dict(sorted(kinds.items()))


def check_sums(loss: Loss) -> None:
    """Refuse a `Loss` whose numbers are no scalar sums, or whose total has no gradient, naming the number."""
    numbers = {"total": loss.total, "weight": loss.weight}
    for name, metric in loss.metrics.items():
        numbers |= {f"{name}.{of}" if of else name: value for of, value in numbers_of(metric).items()}
    for name, value in numbers.items():
        if not isinstance(value, NUMBERS):
            raise UsageError(f"Loss {name} is {shown(value)}; it must be a number, a scalar sum")
        if jnp.shape(value) != ():
            raise UsageError(f"Loss {name} has shape {jnp.shape(value)}; it must be a scalar sum: add .sum()")
        if jnp.iscomplexobj(value):
            raise UsageError(f"Loss {name} is complex; it must be real: take its .real, or jnp.abs of it")
    if isinstance(loss.total, jax.Array) and not jnp.issubdtype(loss.total.dtype, jnp.floating):
        raise UsageError(
            f"Loss total is {loss.total.dtype}, which has no gradient; sum floating point numbers, and give "
            f"counts as metrics"
        )


def add_losses(losses: Sequence[Loss]) -> Loss:
    """The sum of several terms."""
    total, weight = sum_of([loss.total for loss in losses]), sum_of([loss.weight for loss in losses])
    metrics = {}
    for name, kind in kinds_of(loss.metrics for loss in losses).items():
        given = [loss.metrics[name] for loss in losses if name in loss.metrics]
        parts = [numbers_of(metric) for metric in given]
        join = _largest if kind == "max" else sum_of
        joined = {of: join([own[of] for own in parts]) for of in parts[0]}
        metrics[name] = joined[""] if kind == "per weight" else type(given[0])(**joined)
    return Loss(total, weight, metrics)


def in_one_vector(loss: Loss) -> tuple[list[Name], Any]:
    """Names and kinds of a loss's metrics; a vector of total, weight and numbers of metrics in that order."""
    names, numbers = list(kinds_of([loss.metrics]).items()), [loss.total, loss.weight]
    for name, _ in names:
        numbers += numbers_of(loss.metrics[name]).values()
    real = real_of(numbers)
    return names, jnp.stack([jnp.asarray(n, real) for n in numbers])


def of_vector(names: Sequence[Name], vector: Any) -> Loss:
    """The loss of which `in_one_vector` gave this."""
    total, weight, *rest = vector
    numbers, types, metrics = iter(rest), {kind: metric for metric, kind in _KINDS.items()}, dict[str, Any]()
    for name, kind in names:
        given = [next(numbers) for _ in range(1 + (kind == "mean"))]
        metrics[name] = types[kind](*given) if kind in types else given[0]
    return Loss(total, weight, metrics)


def joined_vectors(names: Sequence[Sequence[Name]]) -> tuple[list[Name], Callable[..., Any]]:
    """The metrics of several such vectors together, and how to add the vectors up."""

    def add_up(*vectors: Any) -> Any:
        losses = [of_vector(own, vector) for own, vector in zip(names, vectors, strict=True)]
        return in_one_vector(add_losses(losses))[1]

    return list(_one_of_each(name for own in names for name in own).items()), add_up


def real_of(values: Sequence[Any]) -> Any:
    """What numbers are added up in: float32, or float64 if one has it, also where JAX is to promote none."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(jnp.float32, *values)


def sum_of(values: Sequence[Any]) -> Any:
    """The sum of numbers, in what `real_of` says."""
    real = real_of(values)
    return sum(jnp.asarray(value).astype(real) for value in values)


def _largest(values: Sequence[Any]) -> Any:
    real = real_of(values)
    return reduce(jnp.maximum, (jnp.asarray(value).astype(real) for value in values))
