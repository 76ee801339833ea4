"""What the parts of a step's time are called in words."""

from __future__ import annotations

from collections.abc import Mapping

from rrfp_jax.trace.idleness import CAUSES

MEANING: Mapping[str, str] = {
    "compute": "computing",
    "delayed": "injected delays: a device is kept busy",
    **{cause: row.share for cause, row in CAUSES.items()},
    "data": "waiting for data",
    "planning": "planning the order",
    "between": "between steps: the update, and what else is not a task",
}
"""The names of shares in words."""
