"""Initial parameters from tensors in files, leaf by leaf: only what a stage owns is ever read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import jax
import numpy as np

from rrfp_jax.errors import UsageError

MOST_TOLD = 5
"""Parameters, or tensors, that a message names."""


@dataclass(frozen=True)
class Tensor:
    """A stored tensor, or several, and what makes a parameter of it.

    Attributes:
        name: in the file; a tuple of several.
        transform: such as `np.transpose`, or `lambda w: w.T.reshape(d, heads, -1)`; it is called with all of
            them, `lambda k, v: np.concatenate([k, v]).T`.
    """

    name: str | tuple[str, ...]
    transform: Callable[..., np.ndarray] = np.asarray

    @property
    def names(self) -> tuple[str, ...]:
        """Of all its tensors."""
        return (self.name,) if isinstance(self.name, str) else self.name

    def __str__(self) -> str:
        return f"tensor {self.name!r}" if isinstance(self.name, str) else f"tensors {list(self.name)}"


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


@dataclass(frozen=True)
class FromTensors:
    """The `init` of a `Trainer` that takes parameters from stored tensors.

    Attributes:
        names: the stored tensor of each parameter.
        known: names of all tensors.
        where: they are, for messages.
        read: gives one.
    """

    names: NameMap
    known: Collection[str]
    where: str
    read: Callable[[str], np.ndarray]

    def __call__(self, path: str, spec: jax.ShapeDtypeStruct) -> Any:
        """A parameter, or None for the layer's own.

        Raises:
            UsageError: the map has no stored tensor of it, or one that is not there or does not fit.
        """
        tensor = self._tensor(path)
        if tensor is None:
            return None
        if (name := self._absent(tensor)) is not None:
            raise UsageError(f"{self._why_absent(path, name)}; correct the map of names")
        return _fitted(path, spec, tensor, [self.read(name) for name in tensor.names])

    def check_model(self, params: Collection[str], owners: Mapping[str, str]) -> None:
        """Refuse, before anything is compiled, a model with parameters whose tensors are not there.

        Args:
            params: paths of all its parameters.
            owners: by path of each tied alias its owner's, which is the one that is asked for.

        Raises:
            UsageError: names them.
        """
        asked = {path: self._tensor(path) for path in params if path not in owners}
        named = {path: self._absent(tensor) for path, tensor in asked.items() if tensor is not None}
        absent = {path: name for path, name in named.items() if name is not None}
        if absent:
            wrong = [self._why_absent(path, name) for path, name in [*absent.items()][:MOST_TOLD]]
            raise UsageError(f"{some(wrong, len(absent))}; correct the map of names")

    def _tensor(self, path: str) -> Tensor | None:
        names = self.names
        if isinstance(names, Mapping) and path not in names:
            raise UsageError(f"{path}: not in the map of names; None there keeps the layer's own values")
        chosen = names[path] if isinstance(names, Mapping) else names(path)
        tensor = Tensor(chosen) if isinstance(chosen, str) else chosen
        if tensor is not None and not isinstance(tensor, Tensor):
            raise UsageError(
                f"{path}: {chosen!r} in the map of names is no stored tensor; give its name, "
                f"rrfp_jax.weights.Tensor(name, transform), or None to keep the layer's own values"
            )
        return tensor

    def _absent(self, tensor: Tensor) -> str | None:
        """The first of a parameter's tensors that is not there."""
        return next((name for name in tensor.names if name not in self.known), None)

    def _why_absent(self, path: str, name: str) -> str:
        near = get_close_matches(name, self.known, n=1, cutoff=0.4)
        return f"{path}: no tensor {name!r} in {self.where}" + (f", but there is {near[0]!r}" if near else "")


def some(told: Sequence[str], count: int) -> str:
    """The first of so many sentences or names, and how many more there are."""
    more = count - len(told)
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")


def _fitted(
    path: str, spec: jax.ShapeDtypeStruct, tensor: Tensor, stored: Sequence[np.ndarray]
) -> np.ndarray:
    shapes = " and ".join(str(list(array.shape)) for array in stored)
    try:
        value = np.asarray(tensor.transform(*stored))
    except Exception as error:
        raise UsageError(f"{path}: the transform of {tensor} {shapes} failed: {error}") from error
    if value.shape != spec.shape:
        raise UsageError(
            f"{path} has the shape {list(spec.shape)}, {tensor} {shapes} as stored "
            f"and {list(value.shape)} as transformed; give Tensor(name, transform)"
        )
    if value.dtype == spec.dtype:
        return value
    if not all(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in (value.dtype, spec.dtype)):
        raise UsageError(f"{path} is {spec.dtype}, {tensor} {value.dtype}; convert it in a transform")
    return _converted(path, spec.dtype, tensor, value)


def _converted(path: str, dtype: Any, tensor: Tensor, value: np.ndarray) -> np.ndarray:
    """Floating-point values in another dtype."""
    try:
        return converted(value, dtype)
    except ValueError as error:
        raise UsageError(
            f"{path} is {dtype}, too small for {error} of {tensor} ({value.dtype}); give the parameter "
            f"another dtype, or a transform that scales"
        ) from None


def converted(value: np.ndarray, dtype: Any) -> np.ndarray:
    """Floating-point values in another dtype.

    Raises:
        ValueError: some are too large for it; says how many, and one of them.
    """
    with np.errstate(over="ignore"):  # which is told below
        found = value.astype(dtype)
    lost = np.isinf(found) & np.isfinite(value)
    if lost.any():
        raise ValueError(f"{lost.sum()} values such as {float(value[lost][0]):g}")
    return found
