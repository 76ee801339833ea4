"""Copies of state machines, made many times a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from types import FunctionType, NoneType
from typing import Any, TypeVar

T = TypeVar("T")


def fork(value: T) -> T:
    """A copy that shares only what never changes: numbers, text, tuples, enums, frozen dataclasses."""
    copier = COPIERS[type(value)]
    return value if copier is None else copier(value)  # type: ignore[no-any-return]


def _fork_object(value: Any) -> Any:
    copy = object.__new__(type(value))
    fields = copy.__dict__ = value.__dict__.copy()
    for name, each in fields.items():
        if (copier := COPIERS[type(each)]) is not None:
            fields[name] = copier(each)
    return copy


def _fork_list(value: list[Any]) -> list[Any]:
    """Everything in a list is of one type."""
    copier = COPIERS[type(value[0])] if value else None
    return value.copy() if copier is None else [copier(each) for each in value]


def _fork_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    return {key: fork(each) for key, each in value.items()}


class Copiers(dict[type, Callable[[Any], Any] | None]):
    """How to copy a value of a type; None where the value itself will do."""

    def __missing__(self, kind: type) -> Callable[[Any], Any] | None:
        """Found out once: an object that is not known to be immutable is copied field by field."""
        constants = (int, str, tuple, frozenset, range, NoneType, Enum, FunctionType)
        frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
        self[kind] = None if frozen or issubclass(kind, constants) else _fork_object
        return self[kind]


COPIERS = Copiers(
    {
        list: _fork_list,
        dict: _fork_dict,
        set: set.copy,
        deque: deque.copy,
        bytearray: bytearray.copy,
    }
)
