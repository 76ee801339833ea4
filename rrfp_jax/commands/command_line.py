"""How the commands print, refuse and end."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from rrfp_jax.errors import FAILED, INTERRUPTED, REFUSED, TrainingError, UsageError
from rrfp_jax.printing import settle_streams, warn


def print_whole(text: str) -> None:
    """Print the result of a command; whoever reads it may stop early, as `| head -1` does.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        try:
            print(text, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode(), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where what waits goes now
        if not isinstance(error, BrokenPipeError):
            raise UsageError(f"standard output: cannot be written: {error.strerror}") from None


def exit_status(command: str, body: Callable[[], int]) -> int:
    """What a command's body returns; if it raises one of our errors, that in one line, and its status.

    One of several processes ends as `runtime/run/exits.py` has it instead. Warnings are lines alike.
    """
    usual, warnings.formatwarning = warnings.formatwarning, partial(_warned, command)
    try:
        try:
            os.getcwd()  # from which paths are found
        except OSError:
            raise UsageError("the working directory was deleted: cd to one that is there") from None
        return body()
    except (UsageError, TrainingError, KeyboardInterrupt) as error:
        joined = sys.modules.get("rrfp_jax.runtime.run.join")  # importing it would import JAX
        if joined is not None and joined.in_company():
            raise
        said = "interrupted" if isinstance(error, KeyboardInterrupt) else error
        warn(f"{command}: {_plain(said)}")
        return {UsageError: REFUSED, KeyboardInterrupt: INTERRUPTED}.get(type(error), FAILED)
    finally:
        warnings.formatwarning = usual


def leave(status: int) -> None:
    """End a launcher now, without waiting for what the config that it has read may have started."""
    from rrfp_jax.runtime.run.signals import exit_now

    try:
        settle_streams()
    finally:
        exit_now(status, also_waited_for=True)


def _plain(said: object) -> str:
    """A message without characters that command a terminal; users' tracebacks have several lines."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in str(said))


def _warned(command: str, message: Warning | str, *where: Any, **line: Any) -> str:
    """A warning as a command says it: who has written the line that warns is of no interest here."""
    return f"{command}: {message}\n"
