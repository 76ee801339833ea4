"""Bad documents: refused or skipped, counted and named by what is wrong with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from rrfp_jax.errors import UsageError

Bad: TypeAlias = Literal["refuse", "skip"]
"""What is done with documents that are bad."""

NAMED = 10
"""Bad documents of one kind that a message names; it counts the others."""


def check_bad(bad: Bad) -> None:
    """Refuse anything else; raises UsageError."""
    if bad not in ("refuse", "skip"):
        raise UsageError(f"bad={bad!r}: bad documents are 'refuse'd or 'skip'ped")


def judge(names: Sequence[str], reasons: Mapping[int, str], bad: Bad) -> None:
    """Refuse bad documents, or warn that they are skipped.

    Args:
        names: of all documents.
        reasons: what is wrong with those that are bad, by index; at least one.
        bad: what is done with them.

    Raises:
        UsageError: they are refused.
    """
    kinds = sorted(set(reasons.values()))
    by_kind = {kind: [names[d] for d in sorted(reasons) if reasons[d] == kind] for kind in kinds}
    text = "; ".join(f"{len(found)} {kind}: {_listed(found)}" for kind, found in by_kind.items())
    if bad == "refuse":
        raise UsageError(f"{len(reasons)} bad documents: {text}. Mend them, or skip them with bad='skip'")
    warnings.warn(f"{len(reasons)} of {len(names)} documents skipped: {text}", stacklevel=2)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
