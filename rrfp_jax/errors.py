"""The errors that users meet: each message gives the value, the cause and the remedy."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses of all commands, and of every process of a run."""

HANDED_OVER = 75
"""That of a rank which has stopped after a step because its launcher had asked it to hand over."""


class UsageError(ValueError):
    """An invalid request, rejected before it costs anything."""


class TrainingError(RuntimeError):
    """A run that had started cannot continue: the message names the step and the microbatch."""


class FaultOfRank(TrainingError):
    """A failure that is the fault of one process of the run; `culprit` is its rank."""

    def __init__(self, sentence: str, culprit: int) -> None:
        super().__init__(sentence)
        self.culprit = culprit


class PeerLost(FaultOfRank):
    """Another process of the run failed, died, froze or left."""


def caused_by(culprit: int, here: int, sentence: str) -> TrainingError:
    """A failure of all processes that is the fault of one, as the process `here` has it."""
    return TrainingError(sentence) if culprit == here else PeerLost(sentence, culprit)


class Disagreement(FaultOfRank):
    """The processes of a run do not do the same; the culprit differs from the others."""


@contextmanager
def refusing(prefix: str = "") -> Iterator[None]:
    """Inside, a ValueError is the fault of who asked: it becomes a UsageError, after these words."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{prefix}{error}") from None


def text_of(error: object) -> str:
    """The text of an exception, or of what `sys.exit` was given, even if its own `__str__` raises."""
    try:
        return str(error)
    except Exception as raised:
        return f"it has no text: its __str__ raised {type(raised).__name__}"


def imported(package: str, purpose: str, install: str = "") -> Any:
    """A package that only some users have, or a module of one.

    Args:
        package: as it is imported.
        purpose: what needs it.
        install: what pip calls it, if otherwise.

    Raises:
        UsageError: it is not installed; says what for it is needed and how to get it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(
            f"{purpose} needs the package {package}, which cannot be imported ({error}): "
            f"pip install {install or package}"
        ) from error
