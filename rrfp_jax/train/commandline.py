"""What the commands share: how they end, and a command line of one --config and overrides."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from rrfp_jax.errors import FAILED, INTERRUPTED, REFUSED, TrainingError, UsageError
from rrfp_jax.runtime.join import in_company
from rrfp_jax.train.config import RunConfig, fields_of, load_config
from rrfp_jax.train.overrides import override

HELP = frozenset({"--help", "-h", "--helpfull"})


class Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message} (--help tells more)")


def exit_status(command: str, body: Callable[[], int]) -> int:
    """What a command's body returns; if it raises one of our errors, that in one line, and its status.

    One of several processes ends as `runtime/farewell.py` has it instead.
    """
    try:
        return body()
    except (UsageError, TrainingError, KeyboardInterrupt) as error:
        if in_company():
            raise
        said = "interrupted" if isinstance(error, KeyboardInterrupt) else error
        print(f"{command}: {said}", file=sys.stderr)
        return {UsageError: REFUSED, KeyboardInterrupt: INTERRUPTED}.get(type(error), FAILED)


def configured(argv: Sequence[str], usage: str) -> RunConfig | None:
    """The run that a command line describes; None if it asks for help, which has been printed then.

    Raises:
        UsageError: not exactly one --config, or whatever `load_config` and `override` refuse.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that configs find `models`, as with `python -m`
    argv = joined(argv)
    files = [a.removeprefix("--config=") for a in argv if a.startswith("--config=")]
    rest = [a for a in argv if not a.startswith("--config=")]
    asks_help = bool(HELP & set(rest))
    if len(files) != 1:
        if asks_help and not files:
            print(usage)
            return None
        raise UsageError(
            f"{'no' if not files else len(files)} --config given: name one run, such as "
            f"--config=configs/quickstart.py (--help tells more)"
        )
    config = load_config(files[0])
    if asks_help:
        print(usage, "", *(f"  --config.{name}={value}" for name, value in fields_of(config)), sep="\n")
        return None
    return override(config, rest)


def joined(argv: Sequence[str]) -> list[str]:
    """`--flag value` as `--flag=value`, for the flags that begin with --config."""
    out: list[str] = []
    for argument in argv:
        waiting = out and out[-1].startswith("--config") and "=" not in out[-1]
        if waiting and not argument.startswith("-"):
            out[-1] += f"={argument}"
        else:
            out.append(argument)
    return out
