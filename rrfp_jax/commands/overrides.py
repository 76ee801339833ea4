"""A command line of one --config and overrides: the config is built once, from both.

ml_collections overrides fields of nested dicts, not of frozen dataclasses. So the config becomes such a tree,
and is made again from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

from absl import flags
from ml_collections import config_dict, config_flags
from ml_collections.config_flags.config_flags import UnsupportedOperationError

from rrfp_jax.commands.config_line import ConfigLine
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import printable, words_of
from rrfp_jax.runs.config import RunConfig, fields_of, has_flag, is_nested, load_config, plain
from rrfp_jax.user_code import called

T = TypeVar("T")

READERS: dict[type, Callable[[str], Any]] = {
    **{int: int, float: float, bool: lambda text: {"true": True, "false": False}[text.lower()]},
    **{str: str, Path: Path},
}
"""What makes values of texts, by class; the first that can does."""


def config_of(line: ConfigLine) -> RunConfig:
    """The run that a command line describes."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that configs find `models`, as with `python -m`
    return override(load_config(line.file), line.overrides)


def override(config: T, argv: Sequence[str]) -> T:
    """The config with the command line's `--config.x=y` applied; nested fields as `--config.x.y=z`."""
    fields = dict(fields_of(config))
    argv = [*{argument.split("=")[0]: argument for argument in argv}.values()]  # the last of each counts
    for argument in argv:
        if wrong := _misnamed(argument, fields):
            raise UsageError(f"{argument}: {wrong}")
    values = flags.FlagValues()
    tree = config_dict.ConfigDict(_mutable(config))
    given = {argument: argument.removeprefix("--config.").partition("=") for argument in argv}
    none = [name for name, _, value in given.values() if value.lower() == "none"]
    cleared = [name for name in none if _is_union(_field_type(config, name))]
    full = ["rrfp", *(_spelt(config, own) for own, (name, _, _) in given.items() if name not in cleared)]
    with called(type(config).__name__, UsageError):
        try:
            config_flags.DEFINE_config_dict("config", tree, flag_values=values, sys_argv=full)
            values(full)
            return _rebuild(config, tree, frozenset(cleared))
        except flags.IllegalFlagValueError as error:
            raise UsageError(_misfit(config, argv, str(error))) from error
        except UnsupportedOperationError as error:
            raise UsageError(f"{str(error).partition('. ')[0]}: set it in the file") from error
        except (flags.Error, ValueError, TypeError) as error:
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


def _spelt(config: Any, argument: str) -> str:
    """An argument of several words without brackets with them, else they are parsed as one word."""
    name, _, value = argument.removeprefix("--config.").partition("=")
    hint = _field_type(config, name)
    choices = typing.get_args(hint) if _is_union(hint) else (hint,)
    firsts = [word for own in choices if typing.get_origin(own) is tuple for word in typing.get_args(own)[:1]]
    if (value and value[0] in "([\"'") or not any({*_kinds(word)} == {str} for word in firsts):
        return argument
    return f"--config.{name}={tuple(word.strip() for word in value.split(',') if value)}"


def _misfit(config: Any, argv: Sequence[str], said: str) -> str:
    """What a flag that has been refused may be, instead of what the parser says of it."""
    given = next((argument for argument in argv if said.startswith(f"flag {argument}:")), None)
    if given is None:
        return said
    name = given.partition("=")[0].removeprefix("--config.")
    return f"{printable(given)}: give {' or '.join(words_of(_field_type(config, name)))}"


def _mutable(config: Any) -> dict[str, Any]:
    """Plain nested dicts that ml_collections can override; frozen dataclasses it cannot."""
    types_of = typing.get_type_hints(type(config))
    out: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if is_nested(value):
            out[item.name] = _mutable(value)
        elif has_flag(value):
            out[item.name] = _parsed_as(value, types_of[item.name])
    return out


def _parsed_as(value: Any, hint: Any) -> Any:
    """A field's value as the type that texts for it are parsed as; by the declared one, not by its own."""
    value, kinds = plain(value), _kinds(hint)
    if value is None:
        return config_dict.placeholder(_parser(kinds) if _is_union(hint) else object)
    if not isinstance(value, (int, float, PathLike)):
        return value
    parser = _parser(kinds)
    if isinstance(value, bool) and parser is not str:
        return value
    return (value,) if parser is tuple else parser(value) if parser in (str, float) else value


def _parser(kinds: Sequence[Any]) -> Any:
    """The first of these classes, or the one that takes the texts for all of them."""
    if tuple in kinds:
        return tuple  # one number or several
    is_text = str in kinds or Path in kinds or len({bool, int, float} & {*kinds}) > 1
    return str if is_text else kinds[0]


def _as_declared(name: str, new: Any, old: Any, hint: Any) -> Any:
    """What has been parsed for a field, as its declared type has it; a number if it may be one."""
    kinds = _kinds(hint)
    if isinstance(new, tuple) and len(new) == 1:
        is_alone = type(new[0]) in kinds if old is None else isinstance(old, (int, float))
        return new[0] if is_alone else new
    if type(new) is not str or not READERS.keys() & {*kinds}:
        return new
    for kind, read in READERS.items():
        with suppress(KeyError, ValueError):
            if kind in kinds:
                return read(new)
    raise UsageError(f"--config.{name}={printable(new)}: give {' or '.join(words_of(hint))}")


def _kinds(hint: Any) -> list[Any]:
    """The classes that a declared type allows, of a Literal those of its words; None is left out."""
    kinds: list[Any] = []
    for choice in typing.get_args(hint) if _is_union(hint) else (hint,):
        origin = typing.get_origin(choice)
        kinds += map(type, typing.get_args(choice)) if origin is typing.Literal else [origin or choice]
    return [kind for kind in kinds if kind is not NoneType]


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (UnionType, typing.Union)


def _field_type(config: Any, name: str) -> Any:
    """The declared type of a dotted field."""
    *parents, last = name.split(".")
    for parent in parents:
        config = getattr(config, parent)
    return typing.get_type_hints(type(config))[last]


def _rebuild(config: T, tree: Any, cleared: frozenset[str], prefix: str = "") -> T:
    """A copy of the config with the tree's values; those in `cleared` become None."""
    types_of, values = typing.get_type_hints(type(config)), dict[str, Any]()
    for item in dataclasses.fields(config):  # type: ignore[arg-type]
        old, new = getattr(config, item.name), tree.get(item.name)
        if not item.init:
            continue  # it follows from the others
        if prefix + item.name in cleared:
            values[item.name] = None
        elif is_nested(old):
            values[item.name] = _rebuild(old, new, cleared, f"{prefix}{item.name}.")
        elif old is None or (item.name in tree and new != _parsed_as(old, types_of[item.name])):
            values[item.name] = _as_declared(f"{prefix}{item.name}", new, old, types_of[item.name])
    return dataclasses.replace(config, **values)  # type: ignore[type-var]
