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
from functools import cache, reduce
from typing import Any

from rrfp_jax.runs.config import fields_of, has_flag

WIDTH, INDENT = 100, " " * 8
"""Of the lines of a sentence, and before each of them."""

MARKS = ("type:", "noqa", "fmt:", "pragma:")
"""How comments begin that are for tools."""

NO_SENTENCE = "A field without a sentence gets one from a comment on its line, or its class's `Attributes:`."


def listed(config: Any) -> str:
    """All fields with their values, each with its sentence below.

    Those that a class adds stand together under its name, the config's own class first, with what is nested
    there, such as a model, last. Nobody inherits from what is nested, so that stays with its field.
    """
    # The class that added a field stands last: another value given to it later makes no owner.
    bases = [base for base in type(config).__mro__ if dataclasses.is_dataclass(base)]
    owners = {item.name: base for base in bases for item in dataclasses.fields(base)}
    fields, parts = [(name, value, _sentence(config, name)) for name, value, _ in fields_of(config)], []
    fields.sort(key=lambda field: "." in field[0] and owners[field[0].partition(".")[0]] is type(config))
    kinds = [kind for kind in bases if kind in owners.values()]
    for kind in kinds:
        lines = [_heading(kind)] if len(kinds) > 1 else []
        for name, value, sentence in fields:
            if owners[name.partition(".")[0]] is kind:
                given = f"{name}={value.__name__ if isinstance(value, type) else value}"
                lines.append(f"  --config.{given}" if has_flag(value) else f"  {given} (in the file only)")
                lines += textwrap.wrap(sentence, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
        parts.append("\n".join(lines))
    every = all(sentence for _, _, sentence in fields)
    return "\n\n".join(parts if every else [*parts, NO_SENTENCE])


def _heading(kind: type) -> str:
    """A class's name, and its first sentence if it has one of its own."""
    said = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
    generated = said.startswith(f"{kind.__name__}(")  # by `dataclass`
    return f"{kind.__name__}{'' if generated or not said else f': {said}'}"


def _sentence(config: Any, name: str) -> str:
    """That of a field with a dotted name, or none."""
    *parents, last = name.split(".")
    return sentences_of(reduce(getattr, parents, config).__class__).get(last, "")


@cache
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
        if begins := re.match(r"(\w[\w, ]*): +(.*)", line):
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
