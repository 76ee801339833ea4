"""JSON in files: read by a schema, so that what comes out is what is asked for; written whole.

A schema is a class with annotations: a dataclass, or a `msgspec.Struct`, which can rename keys and allow
others. `msgspec` holds the data against it (https://jcristharif.com/msgspec/usage.html). Python's own parser
goes first: it also takes NaN and Infinity, which Python writes. Schemas refuse them where they cannot be.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import path_of, printable
from rrfp_jax.files import read_whole, written_whole

T = TypeVar("T")

LARGEST_FILE = 2**28
"""Bytes of a JSON file that is read; in Python it takes about ten times as many."""

LARGEST_LINES = 2**32
"""Bytes of a file with a JSON object a line that is read: some ten million steps of a `metrics.jsonl`."""

MOST_DIGITS = 400
"""Of a whole number; with more of them it fits no machine's float either."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""How many of something there are: as many as machines count to."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""A duration, or a time after some beginning; finite."""


class Unreadable(ValueError):
    """A file cannot be read as what it should be; the message begins with the file."""


def read_json(path: str | Path, kind: type[T]) -> T:
    """What is in a JSON file, held against a schema.

    Raises:
        Unreadable: there is no such file, it is no JSON, or something else than the schema says.
    """
    try:
        return as_kind(load_json(path), kind)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Unreadable(f"{path}: {error}") from None


def load_json(path: str | Path) -> Any:
    """What is in a JSON file, whatever it is.

    Raises:
        OSError: it cannot be read, is no regular file, or too large; `strerror` says why.
        ValueError: it is no JSON.
    """
    return parse_json(read_whole(path, LARGEST_FILE))


def parse_json(content: bytes) -> Any:
    """JSON text as plain data.

    Raises:
        ValueError: it is none, an object has a key twice, or it is nested too deeply.
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_without_repeats, parse_int=_whole)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"no JSON: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None


def as_kind(data: Any, kind: type[T]) -> T:
    """Plain data held against a schema. Of a dataclass all fields must be there, those with defaults, too.

    Raises:
        ValueError: it is something else, which is said with its place in the data.
    """
    _check_keys(data, kind, "$")
    try:
        return msgspec.convert(data, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise ValueError(printable(str(error))) from None


def write_json(path: str | Path, content: Any, indent: int | None = None) -> None:
    """Write plain data to a file; see `write_output`. UsageError, too, if a number is not finite."""
    try:
        text = json.dumps(content, indent=indent, allow_nan=False)
    except ValueError as error:
        raise UsageError(f"{path}: cannot be written as JSON: {error}") from None
    write_output(path, f"{text}\n".encode())


def write_output(path: str | Path, content: bytes) -> None:
    """Write a file, whole or not at all, in folders that are made if they are not there.

    Raises:
        UsageError: the file cannot be written.
    """
    file = path_of("path", path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as part:
            part.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted names and values of all leaves of nested dicts."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{prefix}.{name}" if prefix else name)
    elif prefix:
        yield prefix, value


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is beyond what a machine counts to")
    return int(digits)


def _check_keys(data: Any, kind: Any, place: str) -> None:
    """Refuse a missing or an unknown key of a dataclass, or of one in it, which msgspec lets pass."""
    if not is_dataclass(kind) or not isinstance(data, dict):
        return
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind)]
    for name in names:
        if name not in data:
            raise ValueError(f"{name} is missing - at `{place}`")
        _check_keys(data[name], hints[name], f"{place}.{name}")
    if unknown := [key for key in data if key not in names]:
        raise ValueError(f"{printable(repr(unknown[0]))} is unknown - at `{place}`")


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counted = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {counted.most_common(1)[0][0]!r} is there twice")
    return found
