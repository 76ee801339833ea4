"""A command line that names a run, `--config=FILE.py --config.x=y ...`, read before JAX is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import config_path, printable

FLAG = "--config"


class ConfigLine(NamedTuple):
    """A run's file, and the fields that are given other values."""

    file: str
    overrides: tuple[str, ...]


def read_config_line(arguments: Sequence[str]) -> ConfigLine:
    """What a command line says of a run, as far as that can be told without its file.

    Raises:
        UsageError: not exactly one --config, one that names no Python file, or something that is no flag.
    """
    rest = tuple(text for text in arguments if not text.startswith(f"{FLAG}="))
    files = [text.removeprefix(f"{FLAG}=") for text in arguments if text.startswith(f"{FLAG}=")]
    for stray in (text for text in rest if text and not text.startswith("-")):
        if stray.endswith(".py") and not files:
            raise UsageError(f"{printable(stray)}: to name a run write {FLAG}={printable(stray)}")
        raise UsageError(f"{printable(stray)}: is no flag; a field gets a value by {FLAG}.FIELD=VALUE")
    if len(files) != 1:
        raise UsageError(
            f"{'no' if not files else len(files)} {FLAG} given: name one run, such as "
            f"{FLAG}=configs/quickstart.py (see --help)"
        )
    return ConfigLine(str(config_path(files[0])), rest)


def joined(argv: Sequence[str]) -> list[str]:
    """`--flag value` as `--flag=value`, for the flags that begin with --config."""
    out: list[str] = []
    for argument in argv:
        waiting = out and out[-1].startswith(FLAG) and "=" not in out[-1]
        if waiting and not re.match(r"-(?![0-9.])", argument):  # -1 is no flag
            out[-1] += f"={argument}"
        else:
            out.append(argument)
    return out
