"""The table of mutants: the rows of tests/verification/bugs.md, each with the function that makes it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

PAGE = Path(__file__).parents[1] / "bugs.md"
ROW = re.compile(r"^\| (.*\.) \| (?:\[(\S+)\]\(\S+\)|-) \| (.*\.) \| (.*) \| `(\w+)` \|$", re.MULTILINE)

Make: TypeAlias = Callable[[Any], Callable[..., Any]]
"""From a function of ours, the wrong one in its place."""


@dataclass(frozen=True)
class Mutant:
    """A bug put into this code; `source` is the issue that published it, `target` "module:Class.method"."""

    bug: str
    source: str
    here: str
    tests: Sequence[str]
    id: str
    target: str
    make: Make

    @property
    def module(self) -> str:
        """The module that is changed."""
        return self.target.partition(":")[0]

    @property
    def attributes(self) -> Sequence[str]:
        """The way from the module to what is replaced."""
        return self.target.partition(":")[2].split(".")


MAKERS: dict[str, tuple[str, Make]] = {}
"""By the mutant's name: what it replaces, and what makes it."""


def changes(target: str, name: str = "") -> Callable[[Make], Make]:
    """Note a function as the maker of the mutant of its name, or of another name."""

    def noted(make: Make) -> Make:
        assert (name or make.__name__) not in MAKERS, "another mutant has this name"
        MAKERS[name or make.__name__] = f"rrfp_jax.{target}", make
        return make

    return noted


def mutants() -> Sequence[Mutant]:
    """Those of the page, in its order."""
    for part in ("gradients", "lengths", "order", "promises"):
        importlib.import_module(f"tests.verification.mutation.{part}")
    return [
        Mutant(bug, source, here, re.findall("`(.*?)`", tests), name, *MAKERS[name])
        for bug, source, here, tests, name in ROW.findall(PAGE.read_text(encoding="utf-8"))
    ]
