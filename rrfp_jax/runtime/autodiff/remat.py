"""Rematerialisation by name: what the forward of a layer saves, and what its backward computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.autodiff.purity import CALLBACKS

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
    check_remat(remat)
    return jax.checkpoint(layer, policy=_saving_callbacks(remat))  # type: ignore[no-any-return]


def _saving_callbacks(remat: str) -> Callable[..., Any]:
    """The policy of a name, except that what a function on the host gives is always saved.

    Such a function may be slow, and if it is not as pure as it should be, a second call gives something else.
    """
    name = "nothing_saveable" if remat == FULL else remat
    policy = getattr(jax.checkpoint_policies, name)

    def saved(primitive: Any, *args: Any, **params: Any) -> Any:
        return primitive.name in CALLBACKS or policy(primitive, *args, **params)

    return saved
