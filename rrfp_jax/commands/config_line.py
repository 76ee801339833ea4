"""A command line that names a run, `--config=FILE.py --config.x=y ...`, read before JAX is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp_jax.commands.command_line import HELP
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import printable
from rrfp_jax.runs.config_path import config_path

FLAG = "--config"


@dataclass(frozen=True)
class ConfigLine:
    """A run's file, the fields that are given other values, and whether its fields are to be listed."""

    file: str
    overrides: tuple[str, ...]
    asks_help: bool


def read_config_line(argv: Sequence[str]) -> ConfigLine:
    """What a command line says of a run, as far as that can be told without its file.

    Raises:
        UsageError: not exactly one --config, one that names no Python file, or something that is no flag.
    """
    arguments = joined(argv)
    rest = tuple(text for text in arguments if not text.startswith(f"{FLAG}="))
    files = [text.removeprefix(f"{FLAG}=") for text in arguments if text.startswith(f"{FLAG}=")]
    for stray in (text for text in rest if text and not text.startswith("-")):
        if stray.endswith(".py") and not files:
            raise UsageError(f"{printable(stray)}: to name a run write {FLAG}={printable(stray)}")
        raise UsageError(f"{printable(stray)}: is no flag; a field gets a value by {FLAG}.FIELD=VALUE")
    if len(files) != 1:
        raise UsageError(
            f"{'no' if not files else len(files)} {FLAG} given: name one run, such as "
            f"{FLAG}=configs/quickstart.py (--help tells more)"
        )
    file = str(config_path(files[0]))
    return ConfigLine(file, tuple(text for text in rest if text not in HELP), bool(HELP & set(rest)))


def joined(argv: Sequence[str]) -> list[str]:
    """`--flag value` as `--flag=value`, for the flags that begin with --config."""
    out: list[str] = []
    for argument in argv:
        waiting = out and out[-1].startswith(FLAG) and "=" not in out[-1]
        if waiting and not argument.startswith("-"):
            out[-1] += f"={argument}"
        else:
            out.append(argument)
    return out


def names_a_run(arguments: Sequence[str], with_values: Sequence[str]) -> bool:
    """Whether a --config comes before anything that is no flag; what follows a script is the script's.

    Args:
        arguments: of the command.
        with_values: its flags that may be followed by their value as an argument of its own.
    """
    values = 0
    for number, argument in enumerate(arguments):
        if number < values:
            continue
        if argument.startswith(FLAG):
            return True
        if not argument.startswith("-") or argument == "-m":
            return False
        values = number + 2 if argument in with_values else 0
    return False
