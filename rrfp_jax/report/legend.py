"""How causes of idleness, and all else that the time of steps goes to, are told and shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rrfp_jax.trace.idleness import Cause


class CauseRow(NamedTuple):
    """How one cause of idleness is told and shown, wherever it is."""

    title: str  # in a picture's title, and beside the letter of a live bar
    share: str  # of a step's time, in a report, after "idle: "
    letter: str  # in a live bar
    style: str  # of that letter
    drawn: str  # in a picture: a key of `DRAWN`
    gap: str  # of one gap; {waits} and {after} say what its task waits for
    colour: str  # in a report's charts, none of a pass's (`KINDS`); pictures have that of `drawn`


CAUSES: Mapping[Cause, CauseRow] = {
    Cause.BEGIN: CauseRow(
        *("filling", "the pipeline fills", "<", "dim", "nothing"),
        *("nothing has reached the stage yet; {waits}", "#e5e5e5"),
    ),
    Cause.STAGE: CauseRow(
        *("other stages", "waiting for another stage's task", "s", "yellow", "nothing"),
        *("nothing is ready; {waits}", "#ddcc77"),
    ),
    Cause.LINK: CauseRow(
        *("transfers", "waiting for a transfer", "l", "red", "nothing"),
        *("nothing is ready; what {task} needs of {source} is on its way", "#999933"),
    ),
    Cause.INJECTED: CauseRow(
        *("injected delays", "an injected delay holds a transfer", "i", "bright_black", "injected"),
        *("nothing is ready; an injected delay holds what {task} needs of {source}", "#ffc0dc"),
    ),
    Cause.ORDER: CauseRow(
        *("fixed order", "the fixed order waits for another task", "o", "blue", "held back"),
        *("another task is ready, but the order has {task} next{after}", "#332288"),
    ),
    Cause.MEMORY: CauseRow(
        *("memory", "a limit on memory holds forwards back", "m", "magenta", "held back"),
        *("{task} is ready, but the limit on what is in flight holds it back", "#882255"),
    ),
    Cause.TURN: CauseRow(
        *("gradients' turn", "gradients wait for their turn", "t", "cyan", "held back"),
        *("{task} is ready, but its gradient's turn to be added has not come", "#44aa99"),
    ),
    Cause.ESTIMATE: CauseRow(
        *("wrong estimates", "an input came later than estimated", "e", "bright_magenta", "not started"),
        "another task is ready, but {task} was queued first, as its input was expected earlier{after}",
        "#661100",
    ),
    Cause.GROUP: CauseRow(
        *("agreement", "the processes of the stage agree", "g", "bright_blue", "not started"),
        *("{task} is ready, but the stage's processes have not agreed on it yet", "#88ccee"),
    ),
    Cause.HOST: CauseRow(
        *("host", "the host", "h", "bright_red", "not started"),
        *("{task} is ready, but the host has not started it yet", "#aa4499"),
    ),
    Cause.END: CauseRow(
        *("draining", "the pipeline drains", ">", "dim", "nothing"),
        *("nothing is left to do in this step", "#c8c8c8"),
    ),
}

DRAWN: Mapping[str, tuple[str, str]] = {
    "nothing": ("idle: nothing is ready", "#eeeeee"),
    "held back": ("idle: what is ready is held back", "#c8c8c8"),
    "not started": ("idle: ready, not started yet", "#8c8c8c"),
    "injected": ("idle: an injected delay", "#ffd9ec"),
}
"""What pictures show of idleness (`CauseRow.drawn`): its name and colour; hovering tells each cause."""

DELAY = "injected delay"
"""The name of the end of a task in which its device was only kept busy."""


class ShareRow(NamedTuple):
    """A share of the time in words, and its colour."""

    words: str
    colour: str


SHARES: Mapping[str, ShareRow] = {
    "compute": ShareRow("computing", "#41505e"),
    "delayed": ShareRow("injected delays: a device is kept busy", "#ff69b4"),
    **{cause: ShareRow(f"idle: {row.share}", row.colour) for cause, row in CAUSES.items()},
    "data": ShareRow("waiting for data", "#000000"),
    "planning": ShareRow("planning the order", "#999999"),
    "between": ShareRow("between steps: the update, and what else is not a task", "#b8b8a0"),
}
"""All that the time of a run's steps goes to."""
