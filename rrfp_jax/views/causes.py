"""How pictures show why a device is idle: drawn in few kinds, told in few words."""

from __future__ import annotations

from collections.abc import Mapping

from rrfp_jax.trace.idleness import Cause

IDLE = {
    "idle: nothing is ready": ("#eeeeee", ""),
    "idle: what is ready is held back": ("#c8c8c8", "////"),
    "idle: ready, not started yet": ("#8c8c8c", ""),
    "idle: an injected delay": ("#ffd9ec", ""),
}
"""What is drawn of idleness: its name, colour and hatching. Hovering tells each cause."""

NOTHING, HELD_BACK, NOT_STARTED, INJECTED = IDLE

DRAWN_AS: Mapping[Cause, str] = {
    **dict.fromkeys((Cause.BEGIN, Cause.STAGE, Cause.LINK, Cause.END), NOTHING),
    **dict.fromkeys((Cause.ORDER, Cause.MEMORY, Cause.TURN), HELD_BACK),
    **dict.fromkeys((Cause.GROUP, Cause.HOST), NOT_STARTED),
    Cause.INJECTED: INJECTED,
}

WAITS: Mapping[Cause, str] = {
    Cause.BEGIN: "filling",
    Cause.STAGE: "other stages",
    Cause.LINK: "transfers",
    Cause.INJECTED: "injected delays",
    Cause.ORDER: "fixed order",
    Cause.MEMORY: "memory",
    Cause.TURN: "gradients' turn",
    Cause.GROUP: "agreement",
    Cause.HOST: "host",
    Cause.END: "draining",
}
"""What is waited for, as short as a title needs it."""
