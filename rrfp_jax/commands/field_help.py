"""What the fields of a config are for, in the words of those who declared them.

A field's sentence is in the `Attributes:` of its class's docstring, or in a comment on its own line:

    batch: int = 32  # sequences per step
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any

from rrfp_jax.runs.config import has_flag, is_nested

WIDTH, INDENT = 100, " " * 8
"""Of the lines of a sentence, and before each of them."""

MARKS = ("type:", "noqa", "fmt:", "pragma:")
"""How comments begin that are for tools."""

ONLY = "(in the file only)"
"""Behind a field that has no flag."""

NO_SENTENCE = (
    "A field without a sentence gets one from a comment on its line, or from `Attributes:` in its class's "
    "docstring."
)


def listed(config: Any) -> str:
    """All fields with their values, each with its sentence below.

    Those that a class adds stand together under its name, the config's own class first, with what is nested
    there, such as a model, last. Nobody inherits from what is nested, so that stays with its field.
    """
    # The class that added a field stands last: another value given to it later makes no owner.
    bases = [base for base in type(config).__mro__ if dataclasses.is_dataclass(base)]
    owners = {item.name: base for base in bases for item in dataclasses.fields(base)}
    fields, parts = list(_fields(config)), []
    fields.sort(key=lambda field: "." in field[0] and owners[field[0].partition(".")[0]] is type(config))
    kinds = [kind for kind in bases if kind in owners.values()]
    for kind in kinds:
        lines = [_heading(kind)] if len(kinds) > 1 else []
        for name, value, sentence in fields:
            if owners[name.partition(".")[0]] is kind:
                lines.append(f"  --config.{name}={value}" if has_flag(value) else f"  {name}={value} {ONLY}")
                lines += textwrap.wrap(sentence, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
        parts.append("\n".join(lines))
    every = all(sentence for _, _, sentence in fields)
    return "\n\n".join(parts if every else [*parts, NO_SENTENCE])


def _heading(kind: type) -> str:
    """A class's name, and its first sentence if it has one of its own."""
    said = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
    generated = said.startswith(f"{kind.__name__}(")  # by `dataclass`
    return f"{kind.__name__}{'' if generated or not said else f': {said}'}"


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """The dotted names, values and sentences of all fields that can be given, those nested taken apart."""
    sentences = sentences_of(type(config))
    for item in (own for own in dataclasses.fields(config) if own.init):
        value = getattr(config, item.name)
        if is_nested(value):
            yield from _fields(value, f"{prefix}{item.name}.")
        else:
            shown = value.__name__ if isinstance(value, type) else value
            yield f"{prefix}{item.name}", shown, sentences.get(item.name, "")


def sentences_of(kind: type) -> dict[str, str]:
    """The sentences of a dataclass's fields, by name; a class is believed before those it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            told = _of_docstring(base.__doc__ or "")
            silent = inspect.get_annotations(base).keys() - told.keys()
            found |= (_of_comments(base) if silent else {}) | told  # looking for comments takes longer
    return found


def _of_docstring(text: str) -> dict[str, str]:
    """Of `Attributes:`, in Google's style: `name: sentence`, or `name, name: sentence`, and deeper lines."""
    found: dict[str, str] = {}
    names: list[str] = []
    section = re.search(r"^Attributes:\n((?: +.*\n?|\n)*)", inspect.cleandoc(text), re.MULTILINE)
    for line in textwrap.dedent(section[1]).splitlines() if section else ():
        begins = re.match(r"(\w[\w, ]*): +(.*)", line)
        if begins:
            names = [name.strip() for name in begins[1].split(",")]
            found |= dict.fromkeys(names, begins[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def _of_comments(kind: type) -> dict[str, str]:
    """Of comments on the fields' own lines; none where there is no source, as in a notebook."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return {}
    if source[0].isspace():  # of a function's own class; a line of it may be at the margin
        source = f"if True:\n{source}"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    said = {token.start[0]: token.string.strip("# ") for token in tokens if token.type == tokenize.COMMENT}
    definition = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return {
        node.target.id: text
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if (text := said.get(node.end_lineno or 0)) and not text.startswith(MARKS)
    }
