"""A command line of one --config and overrides: the config is built once, from both.

A text becomes what its field is declared to be, whatever the field has in the file.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import EnumMeta
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from absl import flags

from rrfp_jax.commands.config_line import ConfigLine
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import printable, words_of
from rrfp_jax.runs.config import RunConfig, fields_of, has_flag, is_nested, load_config, plain
from rrfp_jax.user_code import called

T = TypeVar("T")

WORDS = tuple[str, ...]
"""Stands for every tuple of words."""

BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def _several(text: str) -> tuple[Any, ...]:
    """Values as Python writes them, in brackets or between commas."""
    value = ast.literal_eval(text)
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _words(text: str) -> tuple[Any, ...]:
    """Words between commas, or as above."""
    if text.startswith(("(", "[", '"', "'")):
        return _several(text)
    return tuple(word.strip() for word in text.split(",") if text)


READERS: dict[Any, Callable[[str], Any]] = {
    **{int: int, float: float, bool: lambda text: BOOLEANS[text.lower()]},
    **{WORDS: _words, tuple: _several, str: str, Path: Path},
}
"""What makes values of texts, by what a field may be; the first that can does."""


def config_of(line: ConfigLine) -> RunConfig:
    """The run that a command line describes."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that configs find `models`, as with `python -m`
    return override(load_config(line.file), line.overrides)


def override(config: T, argv: Sequence[str]) -> T:
    """The config with the command line's `--config.x=y` applied; nested fields as `--config.x.y=z`."""
    fields, given = {name: value for name, value, _ in fields_of(config)}, flags.FlagValues()
    for argument in argv:
        if wrong := _misnamed(argument, fields):
            raise UsageError(f"{argument}: {wrong}")
    for name, old, hint in fields_of(config):
        flags.DEFINE(_Reader(old, hint), f"config.{name}", None, "", given)
        given[f"config.{name}"].boolean = isinstance(old, bool) or hint == bool | None  # needs no value
    with called(type(config).__name__, UsageError):
        try:
            given(
                ["rrfp", *{argument.split("=")[0]: argument for argument in argv}.values()]
            )  # the last of each
            return _rebuilt(config, given, "config.")
        except flags.Error as error:
            raise UsageError(printable(str(error).removeprefix("flag "))) from error
        except (ValueError, TypeError) as error:
            raise UsageError(f"{error}") from error


def _misnamed(argument: str, fields: Mapping[str, Any]) -> str | None:
    """Why there is no flag of this name, and what to write instead; None if there is one."""
    name = argument.removeprefix("--").split("=")[0].removeprefix("config.")
    known = [own for own, value in fields.items() if has_flag(value)]
    if argument.startswith("--config."):
        if name in known:
            return None
        owner = next((own for own in fields if own not in known and f"{name}.".startswith(f"{own}.")), None)
        if owner is not None and isinstance(value := fields[owner], list):
            kind = type(value[0]).__name__ if value else "int"
            return f"{owner} is a list: declare it `tuple[{kind}, ...]` to set it by a flag"
        if owner is not None:
            return f"{owner} is a dict: set it in the file"
        if parts := [own for own in fields if own.startswith(f"{name}.")]:
            return f"{name} has several fields: {', '.join(parts)}"
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"did you mean --config.{near[0]}?" if near else f"known: {', '.join(sorted(known))}"
    return f"no such flag; {hint}"


def _rebuilt(config: T, given: flags.FlagValues, prefix: str) -> T:
    """A copy of the config with what is given for its fields."""
    values: dict[str, Any] = {}
    for item in (own for own in dataclasses.fields(config) if own.init):  # type: ignore[arg-type]
        old, name = getattr(config, item.name), f"{prefix}{item.name}"
        if is_nested(old):
            values[item.name] = _rebuilt(old, given, f"{name}.")
        elif given[name].present:
            values[item.name] = given[name].value
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


class _Reader(flags.ArgumentParser):  # type: ignore[misc]
    """Reads texts for a field that has an old value, by the declared type."""

    def __init__(self, old: Any, hint: Any) -> None:
        self._old, self._hint = old, hint

    def parse(self, argument: str) -> Any:
        is_union = typing.get_origin(self._hint) in (UnionType, typing.Union)
        if is_union and argument.lower() == "none":
            return None
        kinds = _kinds(typing.get_args(self._hint) if is_union else [self._hint])
        known = [kind for kind in (*READERS, *kinds) if kind in kinds and _reader(kind)]
        readers = [*filter(None, map(_reader, known or [type(plain(self._old))]))]  # of a field of any type
        if self._old is None and self._hint in (Any, object):
            readers = [ast.literal_eval, str]
        words = [own for kind in kinds if isinstance(kind, EnumMeta) for own in kind.__members__]
        may_be = " or ".join(words or words_of(self._hint))
        if not readers:
            raise ValueError(f"no text can be read as {may_be}: set it in the file")
        for read in readers:
            with suppress(KeyError, SyntaxError, TypeError, ValueError):
                return read(argument)
        raise ValueError(f"give {may_be}")


def _reader(kind: Any) -> Callable[[str], Any] | None:
    is_enum = isinstance(kind, EnumMeta)
    return flags.EnumClassParser(kind, case_sensitive=False).parse if is_enum else READERS.get(kind)


def _kinds(choices: Sequence[Any]) -> list[Any]:
    """The classes that declared types allow, of a Literal those of its words."""
    kinds: list[Any] = []
    for choice in choices:
        origin, own = typing.get_origin(choice), typing.get_args(choice)
        if origin is typing.Literal:
            kinds += map(type, own)
        else:
            kinds.append(WORDS if origin is tuple and {*_kinds(own[:1])} == {str} else origin or choice)
    return kinds
