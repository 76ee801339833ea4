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
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

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
    fields = dict(fields_of(config))
    given: dict[str, str] = {}
    for argument in argv:
        if wrong := _misnamed(argument, fields):
            raise UsageError(f"{argument}: {wrong}")
        given[argument.partition("=")[0].removeprefix("--config.")] = argument  # the last of each counts
    with called(type(config).__name__, UsageError):
        try:
            return _rebuilt(config, given)
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


def _rebuilt(config: T, given: Mapping[str, str], prefix: str = "") -> T:
    """A copy of the config with what is given for its fields."""
    types_of, values = typing.get_type_hints(type(config)), dict[str, Any]()
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        old, name = getattr(config, item.name), f"{prefix}{item.name}"
        if item.init and is_nested(old):
            values[item.name] = _rebuilt(old, given, f"{name}.")
        elif name in given:
            values[item.name] = _read(given[name], old, types_of[item.name])
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def _read(argument: str, old: Any, hint: Any) -> Any:
    """The value that an argument gives a field which has an old one, by the declared type."""
    flag, given, text = argument.partition("=")
    is_union = typing.get_origin(hint) in (UnionType, typing.Union)
    if is_union and text.lower() == "none":
        return None
    kinds = _kinds(typing.get_args(hint) if is_union else [hint])
    known = [kind for kind in READERS if kind in kinds] or [type(plain(old))]  # of a field of any type
    if known[0] not in READERS:
        raise UsageError(f"{flag}: no text can be read as {' or '.join(words_of(hint))}: set it in the file")
    for kind in known:
        with suppress(KeyError, SyntaxError, TypeError, ValueError):
            if given or kind is bool:
                return READERS[kind](text if given else "true")
    raise UsageError(f"{printable(argument)}: give {' or '.join(words_of(hint))}")


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
