"""The command line of this process, as it was typed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rrfp_jax.environment import ENVIRONMENT

NAME = "RRFP_COMMAND"
"""In which a launcher tells its ranks how it was started."""


def typed_command(environment: Mapping[str, str] = ENVIRONMENT) -> str:
    """The command line, as a shell takes it."""
    return environment.get(NAME) or shlex.join(as_typed(sys.orig_argv))


def as_typed(argv: Sequence[str]) -> list[str]:
    """A command line without the interpreter that the system puts before an installed command.

    `rrfp train a` is run as `/.../bin/python /.../bin/rrfp train a`.
    """
    script = Path(argv[1]) if len(argv) > 1 else Path()
    if script.suffix or script.parent != Path(argv[0]).parent or argv[1].startswith("-"):
        return [*argv]
    found = shutil.which(script.name)
    known = found is not None and os.path.realpath(found) == os.path.realpath(script)
    return [script.name if known else argv[1], *argv[2:]]


def without_flag(command: str, flag: str) -> str:
    """A command line without a flag, as `FLAG=VALUE` or `FLAG VALUE`."""
    left: list[str] = []
    skips = False
    for argument in shlex.split(command):
        if not skips and argument.partition("=")[0] != flag:
            left.append(argument)
        skips = not skips and argument == flag
    return shlex.join(left)
