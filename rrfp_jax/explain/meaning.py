"""What the parts of a step's time are called in words."""

from __future__ import annotations

from collections.abc import Mapping

from rrfp_jax.trace.idleness import Cause

MEANING: Mapping[str, str] = {
    "compute": "computing",
    "delayed": "injected delays: a device is kept busy",
    Cause.BEGIN: "idle: the pipeline fills",
    Cause.STAGE: "idle: waiting for another stage's task",
    Cause.LINK: "idle: waiting for a transfer",
    Cause.INJECTED: "idle: an injected delay holds a transfer",
    Cause.ORDER: "idle: the fixed order waits for another task",
    Cause.MEMORY: "idle: a limit on memory holds forwards back",
    Cause.TURN: "idle: gradients wait for their turn",
    Cause.GROUP: "idle: the processes of the stage agree",
    Cause.HOST: "idle: the host",
    Cause.END: "idle: the pipeline drains",
    "data": "waiting for data",
    "planning": "planning the order",
    "between": "between steps: the update, and what else is not a task",
}
"""The names of shares in words."""
