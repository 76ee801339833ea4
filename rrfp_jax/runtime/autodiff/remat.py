"""Rematerialisation by name: what the forward of a layer saves, and what its backward computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from rrfp_jax.errors import UsageError

NONE, FULL = "none", "full"

POLICIES = (
    *("everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"),
    *("checkpoint_dots", "checkpoint_dots_with_no_batch_dims"),
)
"""The policies of `jax.checkpoint_policies` that need no arguments."""


def check_remat(remat: str) -> None:
    """Refuse an unknown name.

    Raises:
        UsageError: with the names that there are.
    """
    known = (NONE, FULL, *POLICIES)
    if remat not in known:
        raise UsageError(f"remat={remat!r}: unknown; give one of: {', '.join(known)}")


def rematerialised(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """The function as it is ("none"), saving its arguments only ("full"), or by a policy's name.

    Raises:
        UsageError: another name.
    """
    if remat == NONE:
        return layer
    if remat == FULL:
        return jax.checkpoint(layer)  # type: ignore[no-any-return]
    check_remat(remat)
    policy = getattr(jax.checkpoint_policies, remat)
    return jax.checkpoint(layer, policy=policy)  # type: ignore[no-any-return]
