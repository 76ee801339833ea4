"""What the commands share: how they refuse, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from rrfp_jax.errors import FAILED, INTERRUPTED, REFUSED, TrainingError, UsageError
from rrfp_jax.runtime.join import in_company


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
