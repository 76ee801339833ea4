"""What the commands share: flags, files that they write, how they refuse and how they end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rrfp_jax.errors import FAILED, INTERRUPTED, REFUSED, TrainingError, UsageError
from rrfp_jax.fields import path_of, printable
from rrfp_jax.printing import settle_streams, warn
from rrfp_jax.runtime.run.signals import ends_at_once, exit_now, heard_signals

HELP = frozenset({"--help", "-h", "--helpfull"})


class Parser(argparse.ArgumentParser):
    """Refuses in one line, takes whole flags only, and prints its texts as they are.

    Args:
        command: by its name.
        description, epilog: of its help, before and after the flags.
        files_by: the flag of a JSON file that people give without one; None if there is none.
        formatter_class: of the help.
        **kwargs: see `argparse.ArgumentParser`.
    """

    def __init__(
        self,
        command: str,
        description: str | None,
        epilog: str | None = None,
        files_by: str | None = None,
        formatter_class: type[argparse.HelpFormatter] = argparse.RawDescriptionHelpFormatter,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            prog=command,
            description=description,
            epilog=epilog,
            formatter_class=formatter_class,
            allow_abbrev=False,
            **kwargs,
        )
        self._files_by = files_by

    def options(self, arguments: Sequence[str]) -> argparse.Namespace | None:
        """The options; None if there is nothing to do, because --help was asked for.

        Raises:
            UsageError: what cannot be understood.
        """
        try:
            options, rest = self.parse_known_args(arguments)
        except SystemExit:
            return None
        if rest and self._files_by is not None and rest[0].endswith(".json"):
            self.error(f"{rest[0]}: to name the file write {self._files_by}={rest[0]}")
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return options

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{printable(message)} (--help tells more)")


def asks_for_usage(arguments: Sequence[str]) -> bool:
    """Whether --help is asked for without a config whose fields it could list."""
    return bool(HELP & set(arguments)) and not any(text.startswith("--config") for text in arguments)


def path_argument(text: str) -> Path:
    """The `type` of an argument that is a path, which `~` may begin."""
    try:
        return path_of("path", text)
    except UsageError as error:  # which argparse would take for any other ValueError
        raise argparse.ArgumentTypeError(str(error)) from None


def print_whole(text: str) -> None:
    """Print the result of a command; whoever reads it may stop early, as `| head -1` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_status(command: str, body: Callable[[], int]) -> int:
    """What a command's body returns; if it raises one of our errors, that in one line, and its status.

    One of several processes ends as `runtime/run/exits.py` has it instead. Warnings are lines alike.
    """
    usual, warnings.formatwarning = warnings.formatwarning, partial(_warned, command)
    try:
        _require_working_directory()
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


def _require_working_directory() -> None:
    """Refuse what no path can be found from."""
    try:
        os.getcwd()
    except OSError:
        raise UsageError("the working directory was deleted: cd to one that is there") from None


def interruptible(command: str, body: Callable[[], int]) -> Callable[[], int]:
    """A body in which Ctrl-C ends the process at once, whatever it imports, until it listens itself."""

    def run() -> int:
        with heard_signals(signal.SIGINT, answer=ends_at_once(command)):
            return body()

    return run


def leave(status: int) -> None:
    """End a launcher now, without waiting for what the config that it has read may have started."""
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
