"""How our errors look where nobody catches them: the user's own lines and the sentence, without our frames.

`RRFP_TRACEBACK=full` shows all frames, and what the error was made of. Nothing is done until an error ends
the program, or a notebook's cell.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from rrfp_jax.authors import author_of
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import TrainingError, UsageError, text_of
from rrfp_jax.printing import warn

VARIABLE, FULL = "RRFP_TRACEBACK", "full"


def shown_error(error: BaseException) -> list[str]:
    """The lines that an error of ours gets, each with its end."""
    if ENVIRONMENT.get(VARIABLE) == FULL:
        return traceback.format_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if author_of(frame.filename) == "user"]
    own = own or [frame for frame in frames if author_of(frame.filename) == "package"]
    lines = [*_earlier(error), *(["Traceback (most recent call last):\n"] if own else [])]
    lines += traceback.StackSummary.from_list(own).format()
    lines += [f"{note}\n" for note in getattr(error, "__notes__", ())]
    lines += [f"  ({VARIABLE}={FULL} shows all frames, and the error behind it)\n"]
    # As Python has it, and last: a launcher reads that in the log of a rank that has not joined.
    return [*lines, f"{type(error).__module__}.{type(error).__name__}: {text_of(error)}\n"]


def _earlier(error: BaseException) -> list[str]:
    """What the user's own code was handling when an error was raised; no sentence of ours has that in it."""
    before = error.__context__
    if before is None or error.__suppress_context__:
        return []
    frames = traceback.extract_tb(before.__traceback__, 1)  # the first is of who handled it
    if not frames or author_of(frames[0].filename) != "user":
        return []
    ours = isinstance(before, (UsageError, TrainingError))
    shown = shown_error(before) if ours else traceback.format_exception(before)
    return [*shown, "\nDuring handling of the above exception, another exception occurred:\n\n"]


def hide_frames() -> None:
    """Have our errors shown so from now on, by Python and by IPython, which asks the exception."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours = isinstance(error, (UsageError, TrainingError))
        if not ours or usual is not sys.__excepthook__:  # of Sentry, rich and the like, who are to know
            usual(kind, error, trace)
        if ours:
            warn("".join(shown_error(error)), end="")

    usual = sys.excepthook
    sys.excepthook = hook
    for own in (UsageError, TrainingError):
        setattr(own, "_render_traceback_", lambda error: "".join(shown_error(error)).splitlines())  # noqa: B010
