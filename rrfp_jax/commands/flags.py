"""What a command of `rrfp` is: a row of the table in `verbs.py`, with a row for each of its flags.

Named tuples, as importing `dataclasses` takes a third of the time that help may take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any, NamedTuple

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import LONGEST_VALUE, near, path_of, printable


class Flag(NamedTuple):
    """A flag, or an argument that is known by its place.

    Attributes:
        name: `--limit`, or `RUN` of an argument without a flag.
        metavar: what its value is called; `""` if it takes none.
        help: what it is for.
        read: makes the value of the flag's name and a text, or raises UsageError.
        default: which its help shows.
        choices: the words that it may be.
        open_ended: it may be another word, too.
        group: its heading in the help.
        many: may be given again for another value.
        needed: must be given.
    """

    name: str
    metavar: str
    help: str
    read: Callable[[str, str], Any] = lambda name, text: text
    default: Any = None
    choices: Sequence[str] = ()
    open_ended: bool = False
    group: str = ""
    many: bool = False
    needed: bool = False

    @property
    def dest(self) -> str:
        """What its value is called among the options, `as_` if that is a word of Python's."""
        plain = self.name.lstrip("-").replace("-", "_").lower()
        return f"{plain}_" if iskeyword(plain) else plain

    @property
    def is_positional(self) -> bool:
        """Whether it is known by its place."""
        return not self.name.startswith("-")

    @property
    def suffixes(self) -> list[str]:
        """How the names of the files end that it takes; a folder's has no end."""
        return [Path(kind).suffix for kind in self.metavar.split("|")]

    def value(self, text: str) -> Any:
        """The value that a text stands for.

        Raises:
            UsageError: there is none.
        """
        if self.choices and not self.open_ended and text not in self.choices:
            meant = near(text, self.choices)
            hint = f"did you mean {meant}? It is" if meant else "choose"
            raise UsageError(f"{given(self.name, text)}: {hint} one of {', '.join(self.choices)}")
        return self.read(self.name, text)


def grouped(heading: str, *flags: Flag) -> tuple[Flag, ...]:
    """Flags under a heading of their own in the help."""
    return tuple(flag._replace(group=heading) for flag in flags)


def number(
    kind: type[int] | type[float],
    wants: str = "",
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> Callable[[str, str], Any]:
    """What reads a number within bounds; `wants` is what it counts, for refusals."""
    if math.isfinite(least):
        bounds = f", from {least:,} to {most:,}" if math.isfinite(most) else f", at least {least:,}"
    else:
        bounds = f" above {above:,}" * math.isfinite(above) + f", at most {most:,}" * math.isfinite(most)
    wants = wants or ("a whole number" if kind is int else "a number")

    def read(name: str, text: str) -> Any:
        try:
            value = kind(text if text.isascii() and "_" not in text else "")
        except ValueError:
            value = math.nan
        if not (least <= value <= most and above < value < math.inf):
            raise UsageError(f"{given(name, text)}: give {wants}{bounds}")
        return value

    return read


def folder_of(name: str, text: str) -> Path:
    """A folder that is written to; what is read has `path_of`, a file that is written `output_of`."""
    return path_of(name, text)


def given(name: str, text: str) -> str:
    """A flag and its value as messages have them."""
    shown = text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
    return f"{name}{'=' if name.startswith('--') else ' '}{printable(shown)}"


class Verb(NamedTuple):
    """A command; `main` in `commands/NAME.py` runs it with its options, and returns the exit status.

    Attributes:
        name: after `rrfp`.
        line: what it is for, in the list of commands.
        text: the same at length, before the flags in its help.
        notes: after the flags in its help.
        flags: that it takes.
        config: whether it reads a run's config, `--config=FILE.py --config.FIELD=VALUE`.
        script: whether it runs a script, too, which may follow its flags.
        usage: of its help, if it is not the list of the flags.
        at_once: Ctrl-C ends it at once, whatever it imports, until it listens itself.
    """

    name: str
    line: str
    text: str
    notes: str = ""
    flags: tuple[Flag, ...] = ()
    config: bool = False
    script: bool = False
    usage: str = ""
    at_once: bool = False

    @property
    def command(self) -> str:
        """As one types it."""
        return f"rrfp {self.name}"
