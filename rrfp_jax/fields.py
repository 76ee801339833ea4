"""Values of dataclasses held against their declared types, and names against what a file system takes."""

from __future__ import annotations

import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeAlias, TypeVar

from rrfp_jax.errors import UsageError

T = TypeVar("T")

AnyPath: TypeAlias = str | os.PathLike[str]

LARGEST = 2**64 - 1

LONGEST_NAME, LONGEST_PATH = 200, 3000
"""In bytes; file systems take 255 and 4095, and names get endings."""

LONGEST_VALUE = 200
"""Letters of a value in a message."""

LONGEST_REASON = 1000
"""Letters of a reason that is told; what stands in a file may be of any length."""


def check_fields(config: Any) -> None:
    """Refuse a field of another type than it is declared with, or a number that no machine counts to.

    Only types that can be told are looked at: numbers, text, None, tuples of these, classes. Literals are
    left to whoever knows what the words mean.

    Raises:
        UsageError: naming the field, its value and what it may be.
    """
    hints = typing.get_type_hints(type(config))
    for name in _names(config):
        value, hint = getattr(config, name), hints[name]
        if not _fits(value, hint):
            kind, wanted = type(value).__name__, " or ".join(words_of(hint))
            raise UsageError(f"{name}={shown(value)}: is of type {kind}; give {wanted}")
    check_numbers(config)


def check_numbers(config: Any) -> None:
    """Refuse a field with a whole number that no machine counts to.

    Raises:
        UsageError: naming the field.
    """
    for name in _names(config):
        value = getattr(config, name)
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(number, int) and abs(number) > LARGEST:
                raise UsageError(
                    f"{name}={shown(value)}: is beyond what a machine counts to; give at most {LARGEST}"
                )


def _names(config: Any) -> list[str]:
    """Of a dataclass's fields; only who has one pays for importing `dataclasses`."""
    from dataclasses import fields

    return [item.name for item in fields(config)]


def check_path(name: str, given: Any) -> None:
    """Refuse a path with characters that cannot be printed, or one that is too long.

    Raises:
        UsageError: beginning with `name`.
    """
    text = str(given)
    if not text:
        raise UsageError(f"{name}={text!r}: is empty; give a path")
    odd = next((letter for letter in text if not letter.isprintable()), None)
    if odd is not None:
        raise UsageError(f"{name}={text!r}: has the character {odd!r}, which cannot be printed; leave it out")
    longest = max((len(os.fsencode(part)) for part in Path(text).parts), default=0)
    if longest > LONGEST_NAME or len(os.fsencode(text)) > LONGEST_PATH:
        raise UsageError(
            f"{name}={text[:40]}...: is too long; give at most {LONGEST_NAME} bytes a name, "
            f"{LONGEST_PATH} in all"
        )


def path_of(what: str, given: Any) -> Path:
    """A path that a user gave, with `~` replaced as by `expanded`.

    Raises:
        UsageError: it is no path, one that `check_path` or `expanded` refuses, or one in a folder that
            this user may not search; begins with `what`.
    """
    if not isinstance(given, (str, os.PathLike)):
        raise UsageError(f"{what}={shown(given)}: give the path of a file")
    check_path(what, given)
    path = expanded(what, given)
    try:
        os.stat(path)
    except PermissionError:  # which `Path.exists` and the like would raise
        raise UsageError(f"{what}={given}: is in a folder that you have no permission to search") from None
    except OSError:  # it need not be there
        pass
    return path


def expanded(what: str, path: AnyPath) -> Path:
    """A path with `~` and `~user` replaced by the home directory.

    Raises:
        UsageError: nobody has that name, or the home directory is not known.
    """
    home = os.path.expanduser(path)
    if home.startswith("~"):
        user, text = printable(Path(home).parts[0]), printable(os.fspath(path))
        raise UsageError(f"{what}={text!r}: no user here has the home {user}; give the path in full")
    return Path(home)


def output_of(what: str, given: Any) -> Path:
    """The path of a file that is written later, looked at now.

    Raises:
        UsageError: see `path_of`; or it is a folder, its folder is absent, or no file can be written there.
    """
    file = path_of(what, given)
    if not os.path.isdir(file.parent):  # nor one that this user may not look into
        raise UsageError(f"{file}: there is no folder {file.parent}")
    if os.path.isdir(file):
        raise UsageError(f"{file}: is a folder; give a file")
    if not os.access(file if os.path.exists(file) else file.parent, os.W_OK):
        raise UsageError(f"{file}: cannot be written; give a file in another folder")
    return file


def config_path(given: str) -> Path:
    """The file of a run's config, which `--config=` was given; nothing of it is read.

    Raises:
        UsageError: it is no Python file.
    """
    name = f"--config={given}"
    file = path_of("--config", given)
    if not file.is_file():
        raise UsageError(f"{name}: no such file; give a Python file with get_config(), see configs/")
    if file.suffix != ".py":
        raise UsageError(f"{name}: is no Python file; its name must end with .py")
    return file


def check_not_read(what: str, output: Path, inputs: Iterable[Path]) -> None:
    """Refuse to write to a file that is read, whatever links lead to it.

    Raises:
        UsageError: it is one of the inputs; the message begins with `what`.
    """
    for own in inputs:
        with suppress(OSError):
            if os.path.samefile(own, output):
                raise UsageError(f"{what}={output}: is the same file as {own}, which is read; give another")


def check_name(name: str, given: str, folder: str) -> None:
    """Refuse a run's name that is no plain file name in that folder.

    Raises:
        UsageError: beginning with `name`.
    """
    if not given or "/" in given or given.startswith("."):
        raise UsageError(f"{name}={given!r}: give a plain file name, for {folder}/<name>/")
    check_path(name, given)


def printable(text: str, longest: int = LONGEST_REASON) -> str:
    """A reason that may quote a file: on one line, without characters that command a terminal, and short."""
    plain = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return plain if len(plain) <= longest else f"{plain[:longest]}..."


def counted(number: int, what: str) -> str:
    """Such as "1 stage" and "2 stages"."""
    return f"{number} {what}{'s' * (number != 1)}"


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Such as "stage 1", "stages 1-3" and "stages 1, 3", given in ascending order."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"{what} {first}"
    whole = last - first + 1 == len(numbers)
    return f"{what}s {first}-{last}" if whole else f"{what}s {', '.join(map(str, numbers))}"


def shown(value: Any) -> str:
    """A value as messages have it; Python writes no number of more than 4,300 digits."""
    try:
        return printable(repr(value), LONGEST_VALUE)
    except ValueError:
        return f"<{type(value).__name__} of too many digits>"


def without_addresses(text: str) -> str:
    """A repr without what differs in every process: where objects lie."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _fits(value: Any, hint: Any) -> bool:
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    fits = True  # of types that cannot be told
    if origin in (typing.Union, UnionType):
        fits = any(_fits(value, choice) for choice in choices)
    elif hint in (int, float):
        fits = isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    elif hint is str:
        fits = isinstance(value, (str, os.PathLike))
    elif origin is tuple:
        several = isinstance(value, Sequence) and not isinstance(value, str)
        fits = several and (choices[1:] != (...,) or all(_fits(own, choices[0]) for own in value))
    elif isinstance(hint, type) and origin is None and hint is not Any:
        fits = _answers(value, hint) if getattr(hint, "_is_protocol", False) else isinstance(value, hint)
    return fits


def _answers(value: Any, protocol: type) -> bool:
    """Whether there is all that a protocol names; asked of the class, as an instance might begin to work."""
    if hasattr(type(value), "__getattr__"):
        return True
    names = {*vars(protocol), *vars(protocol).get("__annotations__", {})}
    wanted = [name for name in names if not name.startswith("_")]
    own = getattr(value, "__dict__", {})
    has_all = all(name in own or hasattr(type(value), name) for name in wanted)
    return has_all and (callable(value) or "__call__" not in names)


def words_of(hint: Any) -> list[str]:
    """What a type is called in messages."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return [word for choice in choices for word in words_of(choice)]
    if origin is typing.Literal:
        return [*map(repr, choices)]
    if origin is tuple:
        return ["several of them in brackets"]
    known = {int: "a whole number", float: "a number", str: "text", bool: "True or False", NoneType: "None"}
    return [known.get(hint, getattr(hint, "__name__", str(hint)))]


def near(text: str, words: Iterable[str]) -> str | None:
    """The word that is meant by one that is misspelt."""
    from difflib import get_close_matches  # which nobody needs who writes well

    return next(iter(get_close_matches(text.lower(), words, 1)), None)


def says_its_arguments(elsewhere: Mapping[str, str] | None = None) -> Callable[[type[T]], type[T]]:
    """A decorator for a class: calling it with arguments that it does not take is a UsageError.

    Args:
        elsewhere: what to write instead, by arguments that belong somewhere else or have other names there.
    """

    def decorated(own: type[T]) -> type[T]:
        made: Callable[..., None] = vars(own)["__init__"]

        @functools.wraps(made)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                made(self, *args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # of something inside
                name = type(self).__name__
                raise UsageError(misfit_of(name, made, args, kwargs, elsewhere or {})) from None

        setattr(own, "__init__", init)  # noqa: B010 (mypy knows of no other way)
        return own

    return decorated


def misfit_of(
    name: str,
    made: Callable[..., None],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Why a class cannot be called so, and how it is called."""
    parameters = [*inspect.signature(made).parameters.values()][1:]
    names = [parameter.name for parameter in parameters]
    if (given := next((own for own in kwargs if own not in names), None)) is not None:
        meant = near(given, names)
        remedy = f"did you mean {meant}=?" if meant else f"it takes {', '.join(names)}"
        text = getattr(kwargs[given], "__name__", None) or shown(kwargs[given])
        return f"{name}({given}={text}): no such argument; {elsewhere.get(given, remedy)}"
    places = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    if len(args) > len(places):
        them = ", ".join(f"{own}=..." for own in names[len(places) : len(args)])
        by_place = f"; only {' and '.join(places)} need no name" if places else ""
        return f"{name}: give arguments by name, such as {name}({them}){by_place}"
    if twice := [own for own in places[: len(args)] if own in kwargs]:
        return f"{name}: {twice[0]} is given twice, by its place and by name"
    bound = {*places[: len(args)], *kwargs}
    lacking = [own.name for own in parameters if own.default is own.empty and own.name not in bound]
    return f"{name}: give {' and '.join(lacking)}, too: {name}({', '.join([*places, '...'])})"
