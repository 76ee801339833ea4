"""How causes of idleness, and all else that the time of steps goes to, are told and shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rrfp_jax.trace.idleness import Cause


class CauseRow(NamedTuple):
    """How one cause of idleness is told and shown, wherever it is."""

    title: str  # in a picture's title
    share: str  # of a step's time, in a report
    legend: str  # of a live bar
    gap: str  # of one gap; {waits} and {after} say what its task waits for
    drawn: str  # in a picture: a key of `DRAWN`
    letter: str  # in a live bar
    style: str  # of that letter
    colour: str  # in a report's charts, none of a pass's (`KINDS`); pictures have that of `drawn`


CAUSES: Mapping[Cause, CauseRow] = {
    Cause.BEGIN: CauseRow(
        *("filling", "idle: the pipeline fills", "the pipeline fills"),
        "nothing has reached the stage yet; {waits}",
        *("nothing", "<", "dim", "#e5e5e5"),
    ),
    Cause.STAGE: CauseRow(
        *("other stages", "idle: waiting for another stage's task", "waits for another stage"),
        "nothing is ready; {waits}",
        *("nothing", "s", "yellow", "#ddcc77"),
    ),
    Cause.LINK: CauseRow(
        *("transfers", "idle: waiting for a transfer", "for a transfer"),
        "nothing is ready; what {task} needs of {source} is on its way",
        *("nothing", "l", "red", "#999933"),
    ),
    Cause.INJECTED: CauseRow(
        *("injected delays", "idle: an injected delay holds a transfer", "for a delay that was injected"),
        "nothing is ready; an injected delay holds what {task} needs of {source}",
        *("injected", "i", "bright_black", "#ffc0dc"),
    ),
    Cause.ORDER: CauseRow(
        *("fixed order", "idle: the fixed order waits for another task", "for its fixed order"),
        "another task is ready, but the order has {task} next{after}",
        *("held back", "o", "blue", "#332288"),
    ),
    Cause.MEMORY: CauseRow(
        *("memory", "idle: a limit on memory holds forwards back", "for memory"),
        "{task} is ready, but the limit on what is in flight holds it back",
        *("held back", "m", "magenta", "#882255"),
    ),
    Cause.TURN: CauseRow(
        *("gradients' turn", "idle: gradients wait for their turn", "for its turn to add gradients"),
        "{task} is ready, but its gradient's turn to be added has not come",
        *("held back", "t", "cyan", "#44aa99"),
    ),
    Cause.ESTIMATE: CauseRow(
        *("wrong estimates", "idle: an input came later than estimated", "for what was expected earlier"),
        "another task is ready, but {task} was queued first, as its input was expected earlier{after}",
        *("not started", "e", "bright_magenta", "#661100"),
    ),
    Cause.GROUP: CauseRow(
        *("agreement", "idle: the processes of the stage agree", "for its group"),
        "{task} is ready, but the stage's processes have not agreed on it yet",
        *("not started", "g", "bright_blue", "#88ccee"),
    ),
    Cause.HOST: CauseRow(
        *("host", "idle: the host", "for the host"),
        "{task} is ready, but the host has not started it yet",
        *("not started", "h", "bright_red", "#aa4499"),
    ),
    Cause.END: CauseRow(
        *("draining", "idle: the pipeline drains", "drains"),
        "nothing is left to do in this step",
        *("nothing", ">", "dim", "#c8c8c8"),
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
    **{cause: ShareRow(row.share, row.colour) for cause, row in CAUSES.items()},
    "data": ShareRow("waiting for data", "#000000"),
    "planning": ShareRow("planning the order", "#999999"),
    "between": ShareRow("between steps: the update, and what else is not a task", "#b8b8a0"),
}
"""All that the time of a run's steps goes to."""
