"""Initial parameters from tensors in files, leaf by leaf: only what a stage owns is ever read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import jax
import numpy as np

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.programs.initial import InitFunction


@dataclass(frozen=True)
class Tensor:
    """A stored tensor, and what makes a parameter of it.

    Attributes:
        name: in the file.
        transform: such as `np.transpose`, or `lambda w: w.T.reshape(d, heads, -1)`.
    """

    name: str
    transform: Callable[[np.ndarray], np.ndarray] = np.asarray


Stored: TypeAlias = Tensor | str | None
"""The stored tensor of a parameter, by name if it is stored as it is; None to keep the layer's own value."""

NameMap: TypeAlias = Mapping[str, Stored] | Callable[[str], Stored]
"""By the name of a parameter such as "3.attention.query". A mapping must have them all."""


def check_names(names: Any) -> None:
    """Refuse what is no map of names.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(names, Mapping) and not callable(names):
        raise UsageError(f"names={names!r}: give a dict or a function of a parameter's name")


def from_tensors(
    names: NameMap, known: Collection[str], where: str, read: Callable[[str], np.ndarray]
) -> InitFunction:
    """The `init` of a `Trainer` that takes parameters from stored tensors.

    Args:
        names: the stored tensor of each parameter.
        known: names of all tensors.
        where: they are, for messages.
        read: gives one.

    Returns:
        A function that raises `UsageError` where the map has no stored tensor of a parameter, or one that is
        not there or does not fit.
    """

    def init(path: str, spec: jax.ShapeDtypeStruct) -> Any:
        if isinstance(names, Mapping) and path not in names:
            raise UsageError(f"{path}: not in the map of names; None there keeps the layer's own values")
        chosen = names[path] if isinstance(names, Mapping) else names(path)
        if chosen is None:
            return None
        tensor = Tensor(chosen) if isinstance(chosen, str) else chosen
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"{path}: {chosen!r} in the map of names is no stored tensor; give its name, "
                f"rrfp_jax.weights.Tensor(name, transform), or None to keep the layer's own values"
            )
        if tensor.name not in known:
            near = get_close_matches(tensor.name, known, n=1, cutoff=0.4)
            hint = f", but there is {near[0]!r}" if near else ""
            raise UsageError(f"{path}: no tensor {tensor.name!r} in {where}{hint}; correct the map of names")
        return _fitted(path, spec, tensor, read(tensor.name))

    return init


def _fitted(path: str, spec: jax.ShapeDtypeStruct, tensor: Tensor, stored: np.ndarray) -> np.ndarray:
    try:
        value = np.asarray(tensor.transform(stored))
    except Exception as error:
        raise UsageError(
            f"{path}: the transform of tensor {tensor.name!r} {list(stored.shape)} failed: {error}"
        ) from error
    if value.shape != spec.shape:
        raise UsageError(
            f"{path} has the shape {list(spec.shape)}, tensor {tensor.name!r} {list(stored.shape)} as stored "
            f"and {list(value.shape)} as transformed; give Tensor(name, transform)"
        )
    floating = all(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in (value.dtype, spec.dtype))
    if value.dtype != spec.dtype and not floating:
        raise UsageError(
            f"{path} is {spec.dtype}, tensor {tensor.name!r} {value.dtype}; convert it in a transform"
        )
    return _converted(path, spec.dtype, tensor, value) if floating else value


def _converted(path: str, dtype: Any, tensor: Tensor, value: np.ndarray) -> np.ndarray:
    """Floating-point values in another dtype."""
    with np.errstate(over="ignore"):  # which is told below
        converted = value.astype(dtype)
    lost = np.isinf(converted) & np.isfinite(value)
    if lost.any():
        raise UsageError(
            f"{path} is {dtype}, too small for {lost.sum()} values of tensor {tensor.name!r} "
            f"({value.dtype}), such as {float(value[lost][0]):g}; give the parameter another dtype, or "
            f"a transform that scales"
        )
    return converted
