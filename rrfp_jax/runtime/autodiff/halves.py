"""What it means to split a program in two: where its inputs are at hand, and what the halves are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from jax.extend.core import ClosedJaxpr, Var


class Where(Enum):
    """Where an input of a program to be split is at hand."""

    BOTH = "both"
    FIRST = "first"  # a loop's carry: the second half gets it only if the first gives it out
    SECOND = "second"


@dataclass(frozen=True)
class Source:
    """An input of a program to be split.

    Attributes:
        where: who has it.
        held: bytes that it costs if the second half reads it.
        cotangent: whether it comes from a cotangent.
    """

    where: Where
    held: int
    cotangent: bool


@dataclass(frozen=True)
class Halves:
    """A program as two.

    first   the inputs            -> the wanted outputs, crossing
    second  the inputs, crossing  -> the other outputs

    `crossing` are the first program's variables of those values; each is in `first`'s outputs.
    """

    first: ClosedJaxpr
    second: ClosedJaxpr
    crossing: Sequence[Var]
