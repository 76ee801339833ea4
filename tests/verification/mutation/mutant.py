"""A row of the table of mutants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Make: TypeAlias = Callable[[Any], Callable[..., Any]]
"""From a function of ours, the wrong one in its place."""

OURS = "a promise of ours"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A bug put into this code."""

    id: str
    bug: str
    source: str
    target: str
    make: Make
    here: str
    tests: Sequence[str]

    @property
    def module(self) -> str:
        """The module that is changed."""
        return self.target.partition(":")[0]

    @property
    def attributes(self) -> Sequence[str]:
        """The way from the module to what is replaced."""
        return self.target.partition(":")[2].split(".")


def row(rows: list[Mutant], **told: Any) -> Callable[[Make], Make]:
    """Appends a row whose id is the name of the function that makes the mutant."""

    def append(make: Make) -> Make:
        rows.append(Mutant(id=make.__name__, make=make, **told))
        return make

    return append
